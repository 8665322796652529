"""The noise floor of a session: worked by hand, kept, found again, used."""

import json
import math

import claimed
import least_squares
import pytest
from comparing import FAILED, a_run, raced, write

from bench.base import stats
from bench.cli import calibrate, compare
from bench.compare import calibration, effects
from bench.launch import prepare
from bench.machine.preflight import Check
from bench.record.rows import row_of

TIMES = [10.0, 10.1, 9.9, 10.05, 9.95]
BUSY = {"validity": "suspect", "validity_reasons": ["other programs used 1.50 CPU cores during the run (limit 0.1)"]}


def rows_of(a_times_s, b_times_s):
    arms = raced(a_times_s, b_times_s)
    return tuple([row_of(run) | {"config_id": "aaaaaaaa"} for run in runs] for runs in arms)


def test_the_floor_worked_by_hand():
    """sd of logs 0.01 from 10 runs: t of 97.5 % with df 9, 2.2622 * 0.01 * sqrt(2/5) = 0.014307: 1.441 %."""
    assert calibration.floor_pct(0.01, 9, 5) == pytest.approx(1.44100, abs=1e-5)


def test_what_is_kept():
    figures = calibration.calibrate(*rows_of(TIMES, TIMES[::-1]))
    logs = [math.log(value) for value in TIMES * 2]
    assert figures["floor_pct"] == pytest.approx(calibration.floor_pct(stats.sd(logs), 9, 5))
    assert figures["session_id"] == "c0ffee00c0ffee00"
    expected = least_squares.raced(TIMES, TIMES[::-1]).difference
    assert figures["aa"]["change_pct"] == pytest.approx(100 * math.expm1(expected), abs=1e-9)
    assert list(figures["needed_n"]) == ["0.1", "0.2", "0.5", "1", "2", "5"]
    assert figures["needed_n"]["1"] == stats.needed_n(math.log1p(0.01), stats.sd(logs))
    smallest = stats.smallest_difference([stats.sd(logs)] * 2, (5, 5))
    assert figures["smallest_change_pct"]["5"] == pytest.approx(100 * math.expm1(smallest))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [([10.0], [10.1], "1 and 1 runs have a time"), ([10.0, 10.0], [10.0, 10.0], "4 identical times: not measured?")],
)
def test_too_little_to_calibrate_with_is_refused(a, b, sentence):
    with pytest.raises(ValueError, match=sentence):
        calibration.calibrate(*rows_of(a, b))


def test_it_is_found_by_its_session_the_newest_of_comparable_runs_first(results):
    def keep(stamp, session_id="5" * 16, comparability_id="c" * 16, floor_pct=1.0):
        calibration.folder().mkdir(exist_ok=True)
        kept = {"session_id": session_id, "comparability_id": comparability_id, "floor_pct": floor_pct}
        kept |= {"floor_n": 5, "cv_pct": 0.5}
        (calibration.folder() / f"{stamp}-{session_id}.json").write_text(json.dumps(kept))

    assert calibration.find("5" * 16) is None
    keep("20261121T010000Z", floor_pct=1.0)
    keep("20261121T020000Z", floor_pct=2.0)
    keep("20261121T030000Z", floor_pct=3.0, comparability_id="d" * 16)
    keep("20261121T040000Z", floor_pct=4.0, session_id="6" * 16)
    (calibration.folder() / "20261121T050000Z-damaged.json").write_text("{")
    (calibration.folder() / "20261121T060000Z-foreign.json").write_text('["x"]')
    figures = calibration.find("5" * 16, "c" * 16)
    assert (figures["floor_pct"], figures["exact"]) == (2.0, True)
    figures = calibration.find("5" * 16, "e" * 16)
    assert (figures["floor_pct"], figures["exact"]) == (3.0, False)
    assert calibration.find("7" * 16) is None
    assert calibration.find(None) is None


@pytest.fixture
def calibrated(results, monkeypatch, capsys):
    """Calibrates with runs that take these times: (times, disturbed times, *options) -> (exit code, output)."""

    def of(times_s, busy_s, *options):
        records = [
            a_run("A", train_s, number, **(BUSY if train_s in busy_s else {}))
            for number, train_s in enumerate([30.0, *times_s])
        ]
        runs = [record | {"folder": str(write(results, record))} for record in records]
        monkeypatch.setattr(calibrate, "_make_runs", lambda *_: runs)
        return calibrate.main([f"n={len(times_s) // 2}", *options]), capsys.readouterr().out

    return of


def test_runs_are_dealt_out_in_the_order_a_b_b_a(calibrated):
    code, shown = calibrated([10.0, 10.1, 10.05, 9.95, 10.02, 9.9], (), "--json")
    figures = json.loads(shown)
    assert (code, figures["n"], figures["aa"]["n"]) == (0, [3, 3], [3, 3])
    # A B B A A B: 10.0, 9.95, 10.02 against 10.1, 10.05, 9.9; geometric means
    geometric = [math.prod(times_s) ** (1 / 3) for times_s in ((10.0, 9.95, 10.02), (10.1, 10.05, 9.9))]
    assert figures["aa"]["mean_s"] == pytest.approx(geometric, rel=1e-12)
    assert calibration.find("c0ffee00c0ffee00")["file"] == figures["file"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_busy_machine_is_not_calibrated(calibrated, options):
    """Its figures are shown, nothing is kept, and the exit code says so."""
    times_s = [10.0, 14.0, 9.0, 12.0]
    code, shown = calibrated(times_s, times_s, *options)
    assert code == 1 and not calibration.folder().exists()
    if options:
        figures = json.loads(shown)
        assert figures["file"] is None and figures["doubts"] and figures["floor_pct"] > 20
        return
    assert "noise floor: " in shown and "MDE (80 % power)" in shown
    assert "not kept, and no verdict uses it: the machine disturbed 4 of 4 runs: other programs used 1.50 CPU" in shown


def test_a_machine_that_is_busy_beside_one_side_is_not_calibrated_with_the_same_exit_code(calibrated):
    code, shown = calibrated([10.0, 14.0, 14.1, 10.1], [14.0, 14.1])  # of A B B A
    assert code == 1 and not calibration.folder().exists()
    assert "not kept  these runs cannot be used to calibrate: other programs kept the machine busy" in shown
    assert "try: stop other programs, then calibrate again" in shown


def test_one_disturbed_run_is_excluded_and_the_others_calibrate(calibrated):
    code, shown = calibrated([10.0, 10.1, 10.05, 9.95, 10.02, 29.9], [29.9])
    assert code == 0 and "kept in" in shown and "runs-excluded" in shown
    assert "coarser than the margin of 0.5 %" in shown  # 1 %: nothing will be called equivalent


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("n=1", "n=1: use 2 or more runs per side"),
        ("seed=abc", "seed=abc: use a whole number of 0 or more"),
        ("n=1000000000", "use 2 or more runs per side, at most 10,000"),
        ("n=x", "n=x: use 2 or more runs per side"),
    ],
)
def test_the_users_mistakes_are_said(argument, sentence):
    with pytest.raises(ValueError, match=sentence):
        calibrate.main([argument])


def test_the_floor_of_more_runs_is_lower_and_of_uneven_groups_in_between():
    """log1p(0.0441) = 0.04315 for 5 and 5; for 20 and 20 half of it; for 5 and 20 sqrt(0.25 * 2.5) = 0.7906 of it."""
    kept = {"floor_pct": 4.41, "floor_n": 5}
    assert calibration.floor_for(kept, 5, 5) == pytest.approx(4.41)
    assert calibration.floor_for(kept, 20, 20) == pytest.approx(2.1812, abs=1e-3)
    assert calibration.floor_for(kept, 5, 20) == pytest.approx(3.4705, abs=1e-3)


def test_it_races_a_warm_up_run_and_then_both_sides_alternately_with_fresh_seeds(results, monkeypatch, answer_of):
    """The launcher is a stand-in: what matters here is what it is asked for."""
    launched = []

    def launch(job, command, series, plan, *sweep):
        race = plan and plan["race"]
        train_s = [30.0, 10.0, 10.1, 9.9, 10.05][len(launched)]
        record = a_run("A", train_s, len(launched), seed=job.config.seed, race=race)
        launched.append((job.overrides, race and race["discarded"]))
        return record | {"folder": str(write(results, record))}

    play(monkeypatch, launch)
    figures = answer_of(calibrate, "n=2", "model=modern", "seed=7")  # progress goes elsewhere
    warm_up, *others = launched
    assert warm_up == (["model=modern", "seed=7"], True)
    assert others == [(["model=modern", f"seed={seed}"], False) for seed in (7, 8, 9, 10)]
    assert figures["aa"]["mean_s"] == pytest.approx([math.sqrt(10.0 * 10.05), math.sqrt(10.1 * 9.9)])  # A B B A
    assert figures["warm_up_run"].endswith("-s7")
    assert len(figures["runs"]) == 4


def play(monkeypatch, launch, *checks):
    """Prepares jobs of cpu_nano without data, launches them by `launch`, and gives `checks` as the machine's state."""
    job = lambda overrides, say: prepare.Job(claimed.config(7), None, overrides, [])  # noqa: E731
    monkeypatch.setattr(calibrate, "prepare", job)
    monkeypatch.setattr(calibrate.launcher, "launch", launch)
    monkeypatch.setattr(calibrate.ready, "checks", lambda job: checks)


def test_a_run_that_fails_ends_it_and_keeps_nothing(results, monkeypatch, answer_of):
    failed = a_run("A", None, 0, base=FAILED) | {"folder": "x"}
    play(monkeypatch, lambda *args, **kwargs: failed)
    (printed,) = answer_of(calibrate, "n=2", code=1)["runs"]
    assert (printed["run_id"], printed["status"]) == (failed["run_id"], "failed")
    assert not calibration.folder().exists()


def test_a_busy_machine_is_not_calibrated_unless_that_is_asked_for(results, monkeypatch, capsys):
    """Nobody can be asked here: a test has no terminal."""
    failed = a_run("A", None, 0, base=FAILED) | {"folder": "x"}
    busy = Check("cpu load", "warn", "other programs use 1.95 of 2 cores (limit 0.1)", "end them")
    play(monkeypatch, lambda *args, **kwargs: failed, busy)
    with pytest.raises(ValueError, match="use 1.95 of 2 cores .*, and the noise floor would be unreliable.*--anyway"):
        calibrate.main(["n=2"])
    assert "warn  cpu load" in capsys.readouterr().out
    assert calibrate.main(["n=2", "--anyway"]) == 1  # it ran, and the run failed


def test_no_number_of_runs_shows_what_no_verdict_says():
    figures = calibration.calibrate(*rows_of([10.0, 10.0001, 10.0002], [10.0001, 10.0, 10.0002]))
    assert figures["smallest_change_pct"]["10"] == 0.1 and figures["needed_n"]["0.2"] == 2


# ---- how far a machine drifts


def repeats(times_s, first_minute=0, **changes):
    return [row_of(a_run("A", time_s, first_minute + number, **changes)) for number, time_s in enumerate(times_s)]


def test_the_drift_of_a_machine_is_the_most_that_halves_of_a_session_differ_by():
    """1 % between the first two and the last two, the middle one of five left out; 0.2 % of public logs at least."""
    drifting = [10.0, 10.0, 50.0, 10.1, 10.1]
    assert calibration.drift_pct(repeats(drifting), True) == pytest.approx(1.0)
    assert calibration.drift_pct(reversed(repeats(drifting)), True) == pytest.approx(1.0)  # in order of time
    steady = repeats([10.0, 10.1, 10.0, 10.1, 10.0, 10.1, 10.0, 10.1], 20, session_id="1" * 16)
    assert calibration.drift_pct(steady, True) == effects.DRIFT_PCT == 0.2
    assert calibration.drift_pct([*steady, *repeats(drifting)], True) == pytest.approx(1.0)
    assert calibration.drift_pct(repeats([10.0, 10.0, 11.0]), True) == 0.2  # too few to tell
    assert calibration.drift_pct([], True) == 0.2


def test_between_sessions_it_is_the_most_that_their_means_differ_by():
    first, second = repeats([10.0, 10.0]), repeats([10.4, 10.4], 5, session_id="1" * 16)
    assert calibration.drift_pct([*first, *second], False) == pytest.approx(4.0)
    assert calibration.drift_pct([*first, *second], True) == 0.2
    assert calibration.drift_pct([*first, *second[:1]], False) == effects.SESSION_DRIFT_PCT == 1.8
    assert calibration.drift_pct([*first, *repeats([10.1, 10.1], 5, session_id="1" * 16)], False) == 1.8


def test_only_repeats_of_one_code_on_one_machine_show_a_drift():
    first, source = repeats([10.0, 10.0]), a_run("A", 1.0, 0)["code"]
    other_code = {"code": source | {"source_sha256": "f" * 64}}
    incomparable, undated = {"comparability_id": "1" * 16}, {"started_at": None}
    for changes in ({"config_id": "bbbbbbbb"}, other_code, incomparable, undated, BUSY, {"base": FAILED}):
        other = repeats([10.4, 10.4], 5, session_id="1" * 16, **changes)
        assert calibration.drift_pct([*first, *other], False) == 1.8, changes
    assert calibration.drift_pct([*first, *repeats([10.4, 10.4], 5, session_id="1" * 16)], False) > 3.9


def test_arms_one_after_the_other_are_as_uncertain_as_the_history_of_their_track_is(results, answer_of):
    """Repeats of another config in the same folder drifted by 1 %, so these may drift too."""
    for number, time_s in enumerate([10.0, 10.0, 10.1, 10.1]):
        write(results, a_run("C", time_s, number))
    for arm, first, scale in (("A", 10, 1.0), ("B", 30, 1.1)):
        for number, time_s in enumerate(TIMES):
            write(results, a_run(arm, scale * time_s, first + number))
    comparison = answer_of(compare, "aaaaaaaa", "bbbbbbbb")
    assert (comparison["verdict"], comparison["time"]["drift_pct"]) == ("not_interleaved", pytest.approx(1.0))
    welch = stats.interval(stats.welch(*([math.log(scale * time_s) for time_s in TIMES] for scale in (1.0, 1.1))))
    low_pct, high_pct = (100 * math.expm1(edge) for edge in welch)
    assert comparison["time"]["ci95_pct"] == pytest.approx([low_pct - 1.0, high_pct + 1.0])
