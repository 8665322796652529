"""./run.sh compare: words to arms, what is shown, exit codes, its page.  The numbers have their own tests."""

import csv
import io
import json
import math
import re
import shutil

import pytest
import traces
from browser import Browser, needs_browser
from comparing import FAST, SLOW, a_run, raced, write

from bench.analysis.diagnosis import between_runs
from bench.cli import compare, explain
from bench.cli import compare as cli
from bench.compare import calibration
from bench.record import run_folder


@pytest.fixture
def arms(results):
    """Two interleaved arms of five runs -> (folders of A, folders of B)."""
    return tuple([write(results, run) for run in runs] for runs in raced(FAST, SLOW))


# ---- words


def test_parts_of_run_ids_quoted_globs_lists_and_vs_name_the_same_runs(arms, results, answer_of):
    expected, typed = answer_of(compare, "aaaaaaaa", "bbbbbbbb"), {"names": None, "about": None}
    assert expected["verdict"] == "slower"
    assert (expected["started"], expected["time"]["n"]) == ([5, 5], [5, 5])
    for arguments in (
        ("cpu_nano/*aaaaaaaa*", "cpu_nano/*bbbbbbbb*"),
        (str(results / "cpu_nano" / "*aaaaaaaa*"), "*bbbbbbbb*"[1:-1]),
        (",".join(str(folder) for folder in arms[0]), ",".join(folder.name for folder in arms[1])),
        (*arms[0], "vs", *arms[1]),
        (*(folder / "run.json" for folder in arms[0]), "vs", *arms[1]),
        ("cpu_nano/*aaaaaaaa*,aaaaaaaa", "bbbbbbbb"),  # twice named, once counted
    ):
        comparison = answer_of(compare, *arguments)
        assert comparison | typed == expected | typed
    (results / "other").mkdir()
    for folder in arms[1]:
        folder.rename(results / "other" / folder.name)
    assert answer_of(compare, "cpu_nano", "other")["started"] == [5, 5]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["aaaaaaaa"], "this is a single group of runs: name two, A B, or a race"),
        (["aaaaaaaa", "vs"], "write runs on both sides of vs"),
        (["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower:x"], "--fail-on slower:x: use slower:0.5%, or one of slower"),
        (["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower:nan%"], "--fail-on slower:nan%: use slower:0.5%"),
        (["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower:1e999%"], "--fail-on slower:1e999%: use slower:0.5%"),
        (["aaaaaaaa", "bbbbbbbb", "--fail-on", "quick"], "--fail-on quick: use"),
        (["aaaaaaaa", "bbbbbbbb", "--fail-on", "faster:1%"], "--fail-on faster:1%: use"),
        (["empty", "empty"], "it holds no run folder and no training log"),
        (["damaged"], "race.json: "),
        ([], "10 words are one run each"),  # a glob that the shell took apart
    ],
)
def test_a_users_mistake_says_what_to_type(arms, results, arguments, sentence):
    for name in ("empty", "races/damaged"):
        (results / name).mkdir(parents=True)
    (results / "races/damaged/race.json").write_text('{"arms": 3}')
    arguments = arguments or [str(folder) for folder in arms[0] + arms[1]]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        compare.main(arguments)


def test_the_warm_up_runs_of_races_are_no_part_of_an_arm(arms, results, answer_of):
    warm_up = a_run("A", 30.0, 50, race={"race_id": "r", "arm": "A", "position": 0, "attempt": 1, "discarded": True})
    write(results, warm_up)
    assert answer_of(compare, "aaaaaaaa", "bbbbbbbb")["started"] == [5, 5]
    with pytest.raises(ValueError, match="all of them discarded warm-up runs"):
        compare.main([warm_up["run_id"], "bbbbbbbb"])


# ---- races


@pytest.fixture
def race(arms, results):
    """race.json as bench/plans/race/runner.py writes it, with three arms: C runs beside B in every round."""
    starts = [f"2026-11-21T03:0{2 * number + (1 - number % 2)}:{30 - 15 * (number % 2)}.000Z" for number in range(5)]
    third = [
        write(results, a_run("C", 10.5 + 0.01 * number, 20 + number, started_at=start))
        for number, start in enumerate(starts)
    ]
    folder = results / "races" / "r1"
    folder.mkdir(parents=True)
    runs = {
        name: {"runs": [f"cpu_nano/{path.name}" for path in paths], "warm_up_runs": []}
        for name, paths in zip("ABC", (*arms, third), strict=True)
    }
    plan = {"n": 5, "looks": [5], "alpha": 0.05, "loss_margin_nats": 0.002}
    (folder / "race.json").write_text(json.dumps({"arms": runs, "plan": plan}))
    return folder


def test_a_race_alone_compares_every_arm_with_the_first(race, answer_of):
    comparisons = answer_of(compare, "r1")
    assert [comparison["names"] for comparison in comparisons] == [["A", "B"], ["A", "C"]]
    assert [comparison["verdict"] for comparison in comparisons] == ["slower", "slower"]
    assert all(comparison["time"]["p_holm"] >= comparison["time"]["p"] for comparison in comparisons)
    assert comparisons[0]["plan"] == {"looks": [5], "alpha": 0.05, "name": None, "sequential": False}


def test_every_arm_is_called_by_its_name(race, arms, answer_of, printed):
    """Three arms: C is never called B, in a race or outside of one."""
    verdict_of_b, verdict_of_c, *_ = printed(compare, "r1").splitlines()
    assert verdict_of_b.startswith("verdict: SLOWER  B is 4.98 % slower than A") and "C is " not in verdict_of_b
    assert re.match("verdict: SLOWER  C is 5.[0-9]+ % slower than A", verdict_of_c) and "B" not in verdict_of_c
    for arguments, first, second in ((["r1:A", "r1:C"], "A", "C"), (["r1:C", "r1:A"], "C", "A")):
        assert answer_of(compare, *arguments)["arms"] == [first, second]
    comparisons = answer_of(compare, "aaaaaaaa", "bbbbbbbb", "cccccccc")
    assert [comparison["arms"] for comparison in comparisons] == [["A", "B"], ["A", "C"]]
    assert [comparison["about"] for comparison in comparisons] == [["aaaaaaaa", "bbbbbbbb"], ["aaaaaaaa", "cccccccc"]]
    assert comparisons[1]["words"].startswith("C is 5.")
    assert answer_of(compare, "r1:C", "bbbbbbbb")["arms"] == ["A", "B"]  # not of one race
    lines = [line.split(",") for line in printed(compare, "r1", "--csv").splitlines()]
    assert {(line[0], *line[-2:]) for line in lines[1:]} == {("B", "A", "B"), ("C", "A", "C")}


def test_arms_of_a_race_can_be_named(race, answer_of):
    comparison = answer_of(compare, "races/r1:B", f"{race}:C")
    assert comparison["names"] == ["races/r1:B", f"{race}:C"]
    assert comparison["started"] == [5, 5]
    with pytest.raises(ValueError, match="the race has no arm D; choose from A, B, C"):
        compare.main(["r1:A", "r1:D"])
    with pytest.raises(ValueError, match="this race has several arms: name one, r1:B"):
        compare.main(["r1", "bbbbbbbb"])


# ---- exit codes


def test_exit_codes(arms, results, capsys):
    assert compare.main(["aaaaaaaa", "bbbbbbbb"]) == 0  # slower is an answer, not a failure
    assert compare.main(["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower"]) == 1
    assert compare.main(["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower:0.5%"]) == 1
    assert compare.main(["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower:6%"]) == 0
    assert compare.main(["bbbbbbbb", "aaaaaaaa", "--fail-on", "slower:0.5%"]) == 0  # faster
    why = "--fail-on slower fails: a slowdown of B by more than 0.5 % is shown"
    written = capsys.readouterr().err
    assert f"{why} (95 % interval +4.84 to +5.13 %, verdict slower)" in written
    assert "--fail-on slower passes: a slowdown of B by more than 6 % is excluded (95 % interval +4.84 to" in written


def test_a_faster_arm_whose_losses_miss_the_target_is_said_to_be_no_claim(results, capsys):
    for runs in raced(SLOW, FAST, b_losses=[4.3, 4.69, 4.3, 4.69, 4.48]):
        for run in runs:
            write(results, run)
    assert compare.main(["aaaaaaaa", "bbbbbbbb"]) == 0
    verdict, note, *_ = capsys.readouterr().out.splitlines()
    assert "FASTER  B is 4.78 % faster than A" in verdict
    missed = "the mean val_loss of B is not shown to be below the target of 4.5"
    assert note.strip().startswith(f"It cannot be claimed: {missed} (p = 0.") and note.endswith(", needed p < 0.01).")


def test_a_limit_has_its_per_cent_sign(arms):
    with pytest.raises(ValueError, match="--fail-on slower:0.01: write the limit in per cent, slower:0.01%"):
        compare.main(["aaaaaaaa", "bbbbbbbb", "--fail-on", "slower:0.01"])


def test_not_comparable_is_exit_code_2_forced_or_not(arms, results, answer_of, capsys):
    for minute in (40, 41):
        write(results, a_run("C", 10.0 + minute / 1000, minute, session_id="1111111111111111"))
    assert compare.main(["aaaaaaaa", "cccccccc"]) == 2
    assert compare.main(["aaaaaaaa", "cccccccc", "--force"]) == 2
    assert compare.main(["aaaaaaaa", "cccccccc", "--fail-on", "slower"]) == 2
    capsys.readouterr()
    assert answer_of(compare, "aaaaaaaa", "cccccccc", code=2)["time"]["change_pct"] is None
    forced = answer_of(compare, "aaaaaaaa", "cccccccc", "--force", code=2)
    assert forced["time"]["change_pct"] == pytest.approx(0.4, abs=0.1)


def test_a_gate_on_one_run_is_no_gate(arms, capsys):
    """One run has no verdict, so it would pass for ever."""
    run_id = arms[1][0].name
    assert compare.main(["aaaaaaaa", run_id]) == 0
    assert compare.main(["aaaaaaaa", run_id, "--fail-on", "slower:0.5%"]) == 2
    assert "give at least two a side" in capsys.readouterr().err


@pytest.fixture
def noisy(results):
    """Two arms with the same five times in another order."""
    times_s = [10.0, 10.5, 9.6, 10.2, 9.9]
    for run in sum(raced(times_s, times_s[::-1]), []):
        write(results, run)


def test_other_conditions_to_fail_on(noisy, capsys):
    arguments = ["aaaaaaaa", "bbbbbbbb", "--fail-on"]
    assert compare.main([*arguments, "slower", "--fail-if", "shown"]) == 0
    assert compare.main([*arguments, "slower,inconclusive", "--fail-if", "shown"]) == 1
    assert compare.main([*arguments, "loss"]) == 1  # from -0.00133 to +0.00453 nats: a rise of 0.002 is possible
    assert "val_loss by 0.002 nats is not excluded (95 % interval -0.00133 to +0.00453 nats" in capsys.readouterr().err
    assert compare.main([*arguments, "loss", "--fail-if", "shown"]) == 0
    with pytest.raises(ValueError, match="--fail-if: it needs --fail-on: add it"):
        compare.main(["aaaaaaaa", "bbbbbbbb", "--fail-if", "shown"])


def test_a_slowdown_that_the_interval_does_not_exclude_fails_the_gate(noisy, capsys):
    """-0.28 to +3.16 %: slower by 3 % is possible and not shown; by 3.2 % is excluded."""
    end = "(95 % interval -0.28 to +3.16 %, verdict inconclusive)\n"
    for condition, reading, code, why in (
        ("slower:3%", "possible", 1, "fails: a slowdown of B by more than 3 % is not excluded"),
        ("slower:3%", "shown", 0, "passes: a slowdown of B by more than 3 % is not shown"),
        ("slower:3.2%", "possible", 0, "passes: a slowdown of B by more than 3.2 % is excluded"),
        ("slower", "possible", 1, "fails: a slowdown of B by more than 0.5 % is not excluded"),  # than the margin
        ("worse", "possible", 0, "passes: inconclusive: B against A: +1.43 %"),
    ):
        assert compare.main(["bbbbbbbb", "aaaaaaaa", "--fail-on", condition, "--fail-if", reading]) == code
        written = capsys.readouterr().err
        assert written.startswith(f"--fail-on {condition.partition(':')[0]} {why}")
        assert condition == "worse" or written.endswith(end)


# ---- what is shown


def test_the_terminal_shows_the_verdict_first_then_differences_comparability_and_numbers(arms, capsys):
    compare.main(["aaaaaaaa", "bbbbbbbb", "--why"])
    shown = capsys.readouterr().out
    statements = ["verdict: SLOWER", "nothing in the records differs", "comparable: yes", "compared: "]
    numbers = ["noise floor: 0.1 %", "MDE (80 % power)", "\ntime ", "\nval_loss", "peak memory", "within-run"]
    places = [shown.index(phrase) for phrase in statements + numbers]
    assert places == sorted(places)
    assert "change %  share %" in shown  # every column of per cent has a head
    assert shown.startswith("verdict: SLOWER  B is 4.98 % slower")
    assert "10.001 s   10.499 s   +4.98 %" in shown
    assert max(len(line) for line in shown.splitlines() if "verdict" not in line and "  - " not in line) <= 110


def test_where_the_time_went_is_shown_when_asked_for(arms, capsys):
    compare.main(["aaaaaaaa", "bbbbbbbb"])
    shown = capsys.readouterr().out
    assert "within-run" not in shown
    assert "\n--why shows where the time went\n" in shown  # all regions are as much slower: none is the cause


def test_a_verdict_has_its_colour_on_a_terminal_alone(arms, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for is_terminal, badge in ((True, "\x1b[31mSLOWER\x1b[0m"), (False, "SLOWER")):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        compare.main(["aaaaaaaa", "bbbbbbbb", "--why"])
        shown = capsys.readouterr().out
        assert shown.startswith(f"verdict: {badge}  B is 4.98 % slower")
        assert shown.count("\x1b") == 2 * is_terminal


def test_what_telemetry_measured_has_words_and_units():
    means = {"mean_cpu_util_pct": [90.0, 80.0], "sampler_cpu_frac": [0.01, 0.02], "max_tick_ms": [3.0, 4.0]}
    pair = {"a_ms": 1.0, "b_ms": 2.0, "change_ms": 1.0, "change_pct": 100.0, "share_frac": 1.0}
    facts = {"label": "x", "runs": [2, 2], "regions": {"step_ms": pair}, "stretches": [], "words": [], "ranks": None}
    *_, table = between_runs.blocks(facts | {"telemetry": means})
    assert table.rows == [["CPU use, %", "90", "80"], ["CPU use of the sampler, %", "1", "2"]]


def test_config_yaml_and_environment_json_show_what_differs(arms, answer_of):
    for folder in arms[1]:
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config.replace("lr: 0.003", "lr: 0.001"))
        environment = json.loads((folder / "environment.json").read_text())
        variables = {"NCCL_ALGO": "Ring", "SPEEDRUN_LAUNCHED_S": folder.name}
        (folder / "environment.json").write_text(json.dumps(environment | {"env": variables}))
        run = json.loads((folder / "run.json").read_text()) | {"artifacts": run_folder.listed(folder)}
        (folder / "run.json").write_text(json.dumps(run))
    differences = answer_of(compare, "aaaaaaaa", "bbbbbbbb")["differences"]
    assert {"kind": "config", "what": "optim.lr", "a": [0.003], "b": [0.001]} in differences
    assert {"kind": "environment", "what": "env.NCCL_ALGO", "a": [None], "b": ["Ring"]} in differences
    assert len(differences) == 2


def test_markdown_and_csv(arms, printed, capsys):
    shown = printed(compare, "aaaaaaaa", "bbbbbbbb", "--md")
    assert shown.startswith("# B against A\n\nverdict: **SLOWER**  B is 4.98 % slower")
    assert "A: aaaaaaaa (5 runs" in shown and "B: bbbbbbbb (5 runs" in shown
    assert "|  10.001 s |  10.499 s |  +4.98 % |" in shown
    assert compare.main(["aaaaaaaa", "bbbbbbbb", "--csv"]) == 0
    rows = {row["metric"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert float(rows["time"]["change"]) == pytest.approx(4.984, abs=1e-3)
    assert rows["val_loss"]["n_a"] == "5"


def test_what_a_foreign_record_says_is_text_and_does_nothing(results, capsys):
    """An escape sequence must not reach the terminal, nor a tag, a link or a table's end the Markdown."""
    evil = "\x1b[2Jx|<script>[a](javascript:b)`"
    a, b = raced(FAST, SLOW)
    for run in a:
        write(results, run)
    for run in b:
        write(results, run | {"code": run["code"] | {"commit": evil}})
    compare.main(["aaaaaaaa", "bbbbbbbb"])
    assert "\x1b" not in capsys.readouterr().out
    compare.main(["aaaaaaaa", "bbbbbbbb", "--md"])
    shown = capsys.readouterr().out
    assert r"\[2Jx\|\<script\>\[a\](javascript:b)\`" in shown
    assert "\x1b" not in shown


def test_a_calibration_of_this_session_sets_the_noise_floor(arms, results, answer_of):
    kept = {"schema_version": 1, "session_id": "c0ffee00c0ffee00", "comparability_id": "0" * 16}
    kept |= {"floor_pct": 7.5, "floor_n": 5, "cv_pct": 5.0}
    calibration.folder().mkdir()
    (calibration.folder() / "20261121T030000Z-c0ffee00c0ffee00.json").write_text(json.dumps(kept))
    comparison = answer_of(compare, "aaaaaaaa", "bbbbbbbb")
    num_a, num_b = comparison["time"]["n"]
    shrink = math.sqrt((1 / num_a + 1 / num_b) * 5 / 2)  # kept for 5 a side, used for these
    assert comparison["time"]["floor_pct"] == pytest.approx(100 * (1.075**shrink - 1))
    assert comparison["calibration"]["floor_pct"] == 7.5
    assert (comparison["verdict"], comparison["time"]["margin_pct"]) == ("inconclusive", 0.5)
    assert comparison["calibration"]["exact"] is False  # made with other runs than these
    assert "uncalibrated" not in comparison["flags"]


# ---- trajectories


def test_losses_that_are_the_same_bit_for_bit_waive_the_loss_test(results, answer_of):
    """The same seeds in both arms, and steps.csv with the same losses; one digit of one loss is enough to end that."""
    a, b = raced(FAST, SLOW)
    folders = [write(results, run | {"seed": number}) for runs in (a, b) for number, run in enumerate(runs)]
    assert answer_of(compare, "aaaaaaaa", "bbbbbbbb")["val_loss"]["verdict"] == "waived"
    steps = (folders[-1] / "steps.csv").read_text().replace("5.75", "5.750000001")
    shutil.rmtree(folders[-1])
    write(results, b[-1] | {"seed": len(b) - 1}, steps)
    val_loss = answer_of(compare, "aaaaaaaa", "bbbbbbbb")["val_loss"]
    assert (val_loss["identical"], val_loss["verdict"]) == (False, "inconclusive")


def test_equal_losses_waive_no_test_of_another_metric(results, answer_of):
    """As where an arm evaluates averaged weights: the training is the same, bit for bit."""
    goal = {"metric": {"name": "accuracy", "unit": "", "direction": "higher"}, "target": None}
    for run_of_arm, level in zip(raced(FAST, SLOW), (0.5, 0.4), strict=True):
        for number, run in enumerate(run_of_arm):
            metrics = run["metrics"] | {"score": level + number / 1000}
            write(results, run | {"seed": number, "goal": run["goal"] | goal, "metrics": metrics})
    loss = answer_of(compare, "aaaaaaaa", "bbbbbbbb")["val_loss"]
    assert (loss["metric"][0], loss["identical"], loss["verdict"]) == ("accuracy", False, "worse")


def test_a_condition_on_losses_that_do_not_vary_is_not_passed(results, capsys):
    """As of scripts whose seed is fixed: no test can say whether 4.5 is more than 4.0."""
    for arm, loss in enumerate((4.0, 4.5)):
        for number, run in enumerate(raced(FAST, SLOW)[arm]):
            write(results, run | {"seed": 9 * arm + number, "metrics": run["metrics"] | {"val_loss": loss}})
    for condition in ("loss", "worse"):
        arguments = ["aaaaaaaa", "bbbbbbbb", "--on", "loss", "--fail-on", condition, "--fail-if", "shown"]
        assert compare.main(arguments) == 2
        assert "--fail-on needs a verdict on the loss, and these runs give none" in capsys.readouterr().err


def test_equal_losses_waive_nothing_within_a_budget_that_the_arms_use_differently(results, answer_of):
    """The slower arm validates for the last time after the budget, so that an earlier validation counts."""
    for run_of_arm, level in zip(raced(FAST, SLOW), (3.2, 5.6), strict=True):
        for number, run in enumerate(run_of_arm):
            goal, metrics = {"budget": {"time_s": 300.0}}, {"score": level + number / 1000}
            write(results, run | {"seed": number, "goal": run["goal"] | goal, "metrics": run["metrics"] | metrics})
    loss = answer_of(compare, "aaaaaaaa", "bbbbbbbb", "--on", "loss")["val_loss"]
    assert (loss["identical"], loss["verdict"]) == (False, "worse")


# ---- traces


def test_the_traces_of_both_arms_are_compared_where_both_have_some(arms, answer_of, printed):
    """A kernel of 100 us a step that takes 150 in B.  Profiled runs: their times are refused, traces shown."""
    for folders, kernel_us in zip(arms, (100, 150), strict=True):
        (folders[2] / "traces").mkdir()
        events = traces.steps_of_a_kernel(kernel_us, step_us=900)
        traces.write(folders[2] / "traces" / "window-rank0.pt.trace.json.gz", events)
    difference = answer_of(compare, "aaaaaaaa", "bbbbbbbb")["diagnosis"]["traces"]
    assert difference["files"][0].endswith("-s4/traces")
    changes_ms = {line["what"]: line["change_ms"] for line in difference["lines"]}
    assert changes_ms["my_kernel"] == pytest.approx(0.05)
    assert sum(row["change_ns"] for row in difference["parts"]) == difference["change_ns"]
    for folder in arms[1]:
        run = json.loads((folder / "run.json").read_text())
        run["metrics"]["num_flagged_steps"] = 2
        (folder / "run.json").write_text(json.dumps(run))
    shown = printed(compare, "aaaaaaaa", "bbbbbbbb", "--why", code=2)
    assert "steps that an instrument disturbed" in shown
    assert "+0.050" in shown
    assert "my_kernel" in shown
    assert "backward" not in shown


def test_traces_of_one_arm_only_are_not_compared(arms, answer_of):
    (arms[0][0] / "traces").mkdir()
    assert answer_of(compare, "aaaaaaaa", "bbbbbbbb")["diagnosis"]["traces"] is None
    (arms[1][0] / "traces").mkdir()
    (arms[1][0] / "traces" / "x.json").write_text("{")
    assert answer_of(compare, "aaaaaaaa", "bbbbbbbb")["diagnosis"]["traces"] is None


def test_explain_takes_two_arms_of_a_race_as_a_and_b_by_the_look_of_each(race, arms, printed, capsys):
    content = json.loads((race / "race.json").read_text())
    with pytest.raises(ValueError, match="r1: it has 3 arms: name two of them, r1:A r1:B"):
        explain.main(["r1"])
    del content["arms"]["C"]
    for name, folders in zip("AB", arms, strict=True):
        warm_up = content["arms"][name]["runs"].pop(0)  # has the look, and is in no number of the race
        content["arms"][name]["warm_up_runs"] = [warm_up]
        (folders[0] / "traces").mkdir()
    (race / "race.json").write_text(json.dumps(content))
    advice = "r1:A: no run of this arm has a profiled step: race again with look=on; `./run.sh compare r1 --why` shows"
    for names in (["r1:A", "r1:B"], ["r1"]):
        with pytest.raises(ValueError, match=advice):
            explain.main(names)
    for folders, kernel_us in zip(arms, (100, 150), strict=True):
        events = traces.steps_of_a_kernel(kernel_us, step_us=kernel_us + 800)
        traces.write(folders[0] / "traces" / "look_rank0.pt.trace.json.gz", events)
    first, causes = (shown := printed(explain, "r1:A", "r1:B")).splitlines()[:2]
    assert printed(explain, "r1") == shown
    assert "A: the run's own steps took " in shown and " on average, unlike the profiled ones: read gains as" in shown
    assert first.startswith("r1:A -> r1:B: a step takes") and "+0.050 ms no bound known: my_kernel" in causes
    assert explain.main(["r1:B", str(arms[0][0]), "--json"]) == 0  # an arm against a run
    assert json.loads(capsys.readouterr().out)["lines"][0]["change_ms"] == pytest.approx(-0.05)
    for folders, kernel_us in zip(arms, (150, 100), strict=True):  # now B, slower in the race, has the faster look
        events = traces.steps_of_a_kernel(kernel_us, step_us=kernel_us + 800)
        traces.write(folders[0] / "traces" / "look_rank0.pt.trace.json.gz", events)
    assert "The means of the race differ the other way, a step of" in printed(explain, "r1:A", "r1:B")


# ---- logs of other harnesses

LOG = """import torch
====================================================================================================
Running Python 3.12.7 (main, Mar  2 2026, 17:32:53) [GCC 13.2.0]
Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8
Mon Mar  2 {clock} 2026
| NVIDIA-SMI 550.144.03             Driver Version: 550.144.03     CUDA Version: 12.4     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:0A:00.0 Off |                    0 |
| N/A   38C    P0            123W /  700W |    1516MiB /  81559MiB |      0%      Default |
====================================================================================================
step:0/2 val_loss:10.8258 train_time:0ms step_avg:0.02ms
step:1/2 train_time:{half}ms step_avg:{half}.00ms
step:2/2 val_loss:{loss} train_time:{ms}ms step_avg:{avg}ms
peak memory allocated: 31296 MiB reserved: 47862 MiB
"""


def write_logs(folder, starts_and_times):
    folder.mkdir(parents=True)
    for clock, ms in starts_and_times:
        text = LOG.format(clock=clock, ms=ms, half=ms // 2, avg=f"{ms / 2:.2f}", loss=f"3.27{ms % 7}1")
        (folder / f"{clock.replace(':', '')}.txt").write_text(text)


def test_folders_of_logs_are_compared_and_what_they_do_not_say_is_marked(results, answer_of, printed):
    write_logs(results / "claim" / "baseline", [("18:00:00", 88000), ("18:20:00", 88100), ("18:40:00", 87900)])
    write_logs(results / "claim" / "this_pr", [("18:10:00", 86000), ("18:30:00", 86100), ("18:50:00", 85900)])
    comparison = answer_of(compare, "claim/baseline", "claim/this_pr")
    assert (comparison["verdict"], comparison["time"]["n"]) == ("faster", [3, 3])
    assert comparison["time"]["change_pct"] == pytest.approx(100 * (86 / 88 - 1), abs=0.01)
    assert {"imported", "session-unknown"} <= set(comparison["flags"])
    assert not {"order-confounded", "order-unknown", "mixed-code"} & set(comparison["flags"])
    assert comparison["memory"]["change_pct"] == 0.0
    assert "whether both arms ran in one session is unknown" in printed(compare, "claim/baseline", "claim/this_pr")


def test_copies_of_a_log_count_once_and_in_both_arms_not_at_all(results, answer_of):
    write_logs(results / "a", [("18:00:00", 88000), ("18:20:00", 88100)])
    (results / "a" / "copy.txt").write_text((results / "a" / "180000.txt").read_text())
    write_logs(results / "b", [("18:10:00", 86000), ("18:30:00", 86100)])
    assert answer_of(compare, "a", "b")["time"]["n"] == [2, 2]
    (results / "b" / "copy.txt").write_text((results / "a" / "180000.txt").read_text())
    comparison = answer_of(compare, "a", "b", code=2)
    assert "1 run in both arms" in comparison["reasons"][0]


def test_one_log_under_six_names_with_other_times_is_one_run(results, answer_of):
    """Its last time is a millisecond later in each copy; its six validations are the same."""
    head = LOG.partition("step:")[0].format(clock="18:00:00")
    lines = "".join(f"step:{step}/6 val_loss:{8 - step}.1258 train_time:{step}ms step_avg:1ms\n" for step in range(6))
    for arm, last_ms in (("a", 88000), ("b", 86000)):
        for copy in range(6):
            loss = f"step:6/6 val_loss:3.27{last_ms // 1000} train_time:{last_ms + copy}ms step_avg:1ms\n"
            (results / arm).mkdir(exist_ok=True)
            (results / arm / f"{copy}.txt").write_text(head + lines + loss)
    assert answer_of(compare, "a", "b")["time"]["n"] == [1, 1]


NUM_STEPS = 20


def log(step_ms, final_loss):
    """A log as modded-nanogpt writes it: each step takes step_ms."""
    lines = [f"step:0/{NUM_STEPS} val_loss:10.8258 train_time:0ms step_avg:nanms"]
    for step in range(1, NUM_STEPS + 1):
        lines.append(
            f"step:{step}/{NUM_STEPS} train_loss:{10 - step / 4:.4f} train_time:{step * step_ms:.0f}ms "
            f"step_avg:{step_ms:.2f}ms"
        )
    end = f"train_time:{NUM_STEPS * step_ms:.0f}ms step_avg:{step_ms:.2f}ms"
    return "\n".join([*lines, f"step:{NUM_STEPS}/{NUM_STEPS} val_loss:{final_loss} {end}"]) + "\n"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Two folders of three logs each: theirs steps in 100 ms, ours in 90."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    for name, step_ms in (("theirs", 100), ("ours", 90)):
        (tmp_path / name).mkdir()
        for num in range(3):
            (tmp_path / name / f"{num}.txt").write_text(log(step_ms + num / 2, 5.0 + num / 100))
    return tmp_path


def page_of(logs, capsys):
    path = logs / "pages" / "verdict.html"
    assert cli.main([str(logs / "theirs"), str(logs / "ours"), "--html", str(path)]) == 0
    assert capsys.readouterr().out.strip().endswith("verdict.html")
    return path


def test_two_folders_of_logs_become_one_page_to_send(logs, capsys):
    html = page_of(logs, capsys).read_text()
    order = (">not interleaved</span>", "<dt>A</dt>", "<dt>B</dt>", "<svg", ">-9.95 %", "data-chart", "<h2>Runs</h2>")
    assert sorted(order, key=html.index) == list(order)  # 20 * 90.5 ms against 20 * 100.5 ms; no log has a date
    assert re.search(r"<dd>[^<]*/theirs</dd>", html) and str(logs) not in html  # no path of this machine
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)


@needs_browser
def test_the_page_shows_its_verdict_on_its_first_screen(logs, capsys):
    path = page_of(logs, capsys)
    with Browser() as browser:
        for width, height in ((1300, 900), (400, 800)):
            shown = browser.open(path, width=width, height=height)
            assert shown.errors == [] and len(shown.requests) == 1
            assert shown.js("document.querySelector('.verdict .badge').getBoundingClientRect().bottom < innerHeight")
            assert shown.js("document.documentElement.scrollWidth <= innerWidth")
            num_charts = shown.js("document.querySelectorAll('[data-chart]').length")
            assert num_charts >= 2 and shown.js("document.querySelectorAll('.u-over').length") == num_charts


def test_a_path_that_cannot_be_written_is_refused_by_its_option(logs):
    with pytest.raises(ValueError, match="--html .*0.txt/page.html: cannot be written"):
        cli.main([str(logs / "theirs"), str(logs / "ours"), "--html", str(logs / "ours" / "0.txt" / "page.html")])
