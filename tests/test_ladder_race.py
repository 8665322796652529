"""The ladder as a race: rungs found by their yamls, fitted to a size, the staircase worked out by hand, its page."""

import csv
import functools
import io
import json
import warnings
from math import exp, log

import claimed
import pytest
import real_runs
import scipy.stats
from browser import Browser, needs_browser
from cases import slow

from bench.base import metric
from bench.base.paths import CONF
from bench.cli import ladder
from bench.compare import same_loss
from bench.config import compose, resolve, schema
from bench.config.resolve import deviations_of
from bench.launch import own_model
from bench.plans.ladder import page, request, sizes, staircase
from bench.record import ledger

# val_loss by step of each rung's two runs.  r01's runs end at 3.2 and 3.3: the target is 3.3, which both reach at 120.
LOSSES = {
    "R01": [{0: 5.6, 40: 4.0, 80: 3.5, 120: 3.2}, {0: 5.6, 40: 4.0, 80: 3.5, 120: 3.3}],
    "R04": [{0: 5.6, 40: 3.6, 80: 3.3, 120: 3.0}, {0: 5.6, 40: 3.6, 80: 3.25, 120: 3.1}],
    "R11": [{0: 5.6, 40: 3.1, 80: 2.9, 120: 2.8}, {0: 5.6, 40: 3.2, 80: 2.9, 120: 2.7}],
}
TRAIN_S = {"R01": [12.0, 13.0], "R04": [12.0, 12.6], "R11": [24.0, 24.6]}  # of 120 steps
WORDS = ("r01", "r04", "r11", "n=2", "seed=0", "size=nano", "goal.num_steps=120", "goal.val_every_steps=40")


@pytest.fixture(autouse=True)
def tried_here(monkeypatch):
    """Models are tried in this process: another for each question would import torch, in three seconds."""

    def answers(questions, files):
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as there
            return [own_model.faults_of(question) for question in json.loads(questions)]

    monkeypatch.setattr(own_model, "_ask", answers)


@pytest.fixture
def raced(tmp_path, monkeypatch):
    """raced(losses, ...) races a ladder of planted runs, by default of LOSSES, and returns (exit code, Racers).

    The third run of a rung is as its first.
    """
    return functools.partial(race, tmp_path, monkeypatch)


def race(base, monkeypatch, losses=None, train_s=None, overrides=(), names=WORDS[:3], **options):
    monkeypatch.setattr(own_model, "faults_of_configs", lambda configs: [[] for _ in configs])
    losses, train_s = LOSSES | (losses or {}), TRAIN_S | (train_s or {})
    arms = claimed.Racers(
        base / "results",
        lambda arm, seed: train_s[arm][seed % 2],
        lambda arm, seed: losses[arm][seed % 2][120],
        losses_of=lambda arm, seed: losses[arm][seed % 2],
        **options,
    )
    arms.install(monkeypatch)
    return ladder.main([*names, *WORDS[3:], *overrides, "--anyway"]), arms


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """The folder of the race of LOSSES, for tests that only read it."""
    base = tmp_path_factory.mktemp("climbed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert race(base, monkeypatch)[0] == 0
    return folder_of(base)


def folder_of(tmp_path):
    (folder,) = (tmp_path / "results" / "races").glob("*")
    return folder


# ---- rungs


def test_every_record_of_the_speedrun_in_conf_is_a_rung_and_nothing_else():
    names = [rung.name for rung in sizes.known_rungs()]
    assert names == [*sorted(path.stem for path in (CONF / "experiment").glob("r[0-9]*.yaml")), "simple"]
    assert "smoke" not in names


def test_a_rung_says_what_its_record_reached():
    rungs = {rung.name: rung for rung in sizes.known_rungs()}
    r09 = rungs["r09"]
    assert (r09.minutes, r09.num_steps, r09.step_ms, r09.val_loss) == (8.2, 3200, 154.78, 3.2791)
    assert r09.what == "value residual, embedding skip, momentum warm-up, cap 30"
    assert (rungs["r01"].minutes, rungs["r01"].num_steps) == (45.0, 19560)
    simple = rungs["simple"]  # "3.28 or a little less", "147 to 155 ms" are no measurements
    assert (simple.minutes, simple.num_steps, simple.step_ms, simple.val_loss) == (None, 3250, None, None)
    for rung in rungs.values():
        assert rung.what and (rung.minutes or rung.name == "simple"), f"{rung.name}.yaml: its head is not read"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own(name, text) writes an experiment into a folder of the user's."""
    monkeypatch.setenv("SPEEDRUN_CONFIG_DIR", str(tmp_path / "conf"))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    return lambda name, text: (tmp_path / "conf" / "experiment" / f"{name}.yaml").write_text(text)


HEAD = """# @package _global_
# Record 99, 1.5 minutes: everything at once.
# Source: records/track_1_short/2030-01-01/log.txt
# Expected on 8x H100: val_loss 3.2799 after 1,000 steps, 90 ms a step.
defaults:
  - r11
  - _self_
"""


def test_a_new_yaml_is_a_new_rung_in_its_place(own):
    own("r99", HEAD)
    assert [rung.name for rung in sizes.known_rungs()][-2:] == ["r99", "simple"]
    assert sizes.rung_named("r99") == sizes.Rung("r99", "everything at once", "track_1", 1.5, 1000, 90.0, 3.2799)


# ---- sizes


def test_what_a_yaml_sets_for_the_records_own_size_is_derived_and_said(own):
    own("r99", HEAD + "model: {num_heads: 6, width: 768, num_layers: 16, vocab_size: 50257}\n")
    (fit,) = sizes.fitted([sizes.rung_named("r99")], sizes.SIZES["nano"], [])
    assert fit.fault is None
    assert fit.overrides[0] == "experiment=r99"
    assert set(fit.overrides[1:]) == {
        "model.num_layers=4",
        "model.num_heads=4",
        "model.width=128",
        "model.vocab_size=null",
    }
    changed = {key: (before, after) for key, before, after in fit.changed}
    assert changed["model.width"] == ("768", "128") and changed["goal.num_steps"] == ("3000", "60")
    assert not any(key.startswith("optim.") for key in changed)  # no learning rate is touched


def test_the_users_own_setting_wins_over_what_would_be_derived():
    (fit,) = sizes.fitted([sizes.rung_named("r02")], sizes.SIZES["nano"], ["model.vocab_size=512"])
    assert fit.overrides == ["experiment=r02"]


@pytest.mark.slow
def test_batch_sequences_and_windows_of_a_rung_are_in_proportion():
    fits = sizes.fitted([sizes.rung_named(name) for name in ("r12", "r13", "r19", "r21")], sizes.SIZES["nano"], [])
    changed = [{key: (before, after) for key, before, after in fit.changed} for fit in fits]
    assert [fit.fault for fit in fits] == [None] * 4
    for diff in changed:
        assert diff["model.args.block"] == ("128", "16")  # an eighth, as 1,024 tokens of a sequence are 128
    assert [diff["data.seq_len"][1] for diff in changed] == ["1024", "1024", "1024", "768"]  # not more than a step has
    assert changed[0]["stages[0].window_tokens"] == ("1024", "128")
    assert changed[1]["stages[0].first_window_tokens"] == ("64", "8")
    assert changed[1]["stages[0].window_tokens"] == ("1792", "224")
    assert "stages[0].first_window_tokens" not in changed[2]  # 0
    assert changed[2]["stages[0].window_tokens"] == ("1728", "216")
    assert changed[3]["data.batch_tokens"] == ("393216", "768")  # 1,024 * 393,216 / 524,288
    assert changed[3]["goal.val_seq_len"] == ("262144", "4096")  # all of a validation
    assert "stages=[{window_tokens:216,first_window_tokens:0,window_rounding:up}]" in fits[2].overrides


def test_stages_are_in_proportion_in_every_setting(own):
    stages = "[{until_step: 1500, batch_tokens: 262144, seq_len: 2048, momenta: {matrices: 0.85}},"
    stages += " {lr_frac: 1.5, momenta: {matrices: 0.9}}]"
    own("r99", HEAD + f"stages: {stages}\n")
    (fit,) = sizes.fitted([sizes.rung_named("r99")], sizes.SIZES["nano"], ["goal.num_steps=10"])
    assert fit.fault is None
    assert fit.overrides[-1] == (
        "stages=[{until_step:5,batch_tokens:512,seq_len:256,momenta:{matrices:0.85}},"
        "{lr_frac:1.5,momenta:{matrices:0.9}}]"
    )
    (fit,) = sizes.fitted([sizes.rung_named("stages")], sizes.SIZES["nano"], [])  # no record: in proportion to itself
    assert fit.fault is None and not any(key.startswith("stages") for key, *_ in fit.changed)
    (fit,) = sizes.fitted([sizes.rung_named("r12")], sizes.SIZES["nano"], ["data.batch_tokens=512", "stages=null"])
    assert fit.overrides == ["experiment=r12", "data.seq_len=512", "model.args.block=16"]  # the user's own win


def test_a_rung_that_cannot_run_is_excluded_from_all_and_refused_by_name(monkeypatch):
    monkeypatch.setattr(sizes, "known_rungs", lambda: [sizes.rung_named(name) for name in ("r08", "r09", "r11")])
    with pytest.raises(ValueError, match="r11 cannot run at size=nano: .*use an even number"):
        request.parse(["r09", "r11", "size=nano", "model.num_layers=3"])
    _, fitted, requested = request.parse(["size=nano", "model.num_layers=3"])
    assert "even number" in {fit.rung.name: fit.fault for fit in fitted}["r11"]
    assert "R11" not in requested["arms"] and "r11" in requested["ladder"]["excluded"] and "R09" in requested["arms"]


def test_the_size_follows_the_machine():
    assert [sizes.for_machine(num).name for num in (0, 1, 7, 8)] == ["nano", "short", "short", "record"]


@pytest.mark.parametrize(("name", "num_gpus", "batch_tokens"), [slow("short", 1, 131_072), ("record", 8, 524_288)])
def test_on_gpus_the_rungs_are_their_records_and_in_the_closed_division(name, num_gpus, batch_tokens, monkeypatch):
    """Composed and resolved for such a machine; the record's size changes nothing but how often it validates."""
    machine, size = schema.Machine(num_gpus, 16, 80.0), sizes.SIZES[name]
    monkeypatch.setattr(sizes.prepare, "this_machine", lambda: machine)
    for rung in map(sizes.rung_named, ("r01", "r04", "r11", "r12", "r13", "r20", "r21", "simple")):
        record = compose.compose([f"experiment={rung.name}"], machine)
        own = sizes._derived(rung, record, size, [])
        config = compose.compose([*size.all_overrides, f"experiment={rung.name}", *own], machine)
        assert deviations_of(config) == []
        resolved, tokens_frac = resolve.resolve(config, machine, 50257), 0.75 if rung.name == "r21" else 1
        assert (resolved.model.width, resolved.data.batch_tokens) == (768, tokens_frac * batch_tokens)
        assert resolved.data.seq_len == record.data.seq_len and config.stages == record.stages
        assert resolved.goal.num_steps == (400 if name == "short" else rung.num_steps)
        assert name == "short" or {key for key, *_ in sizes._changed(record, config)} == {"goal.val_every_steps"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["r04"], "r04: a ladder needs two rungs"),
        (["r04", "r04"], "r04 r04: a ladder needs two rungs, each once"),
        (["r04", "r99"], "r99: no such experiment; the rungs are r01"),
        (["r01", "r04", "size=huge"], "choose from nano, short, record"),
        (["r01", "r04", "experiment=r02"], "each rung is an experiment"),
        (["A=optim=muon"], "makes its own arms"),
        (["on=loss"], "on=loss: a ladder has its own question"),
        (["n=auto:3-20"], "n=auto:3-20: a ladder has its own question, and no n=auto"),
    ],
)
def test_wrong_words_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        request.parse(arguments)


# ---- the way to the target


def test_the_target_is_reached_at_the_first_validation_at_or_below_it():
    curve = [(0, 0.0, 5.0), (10, 2.0, 4.0), (20, 4.0, 3.0), (30, 6.0, 3.5)]
    assert same_loss.way(curve, 3.5) == (20, 4.0)
    assert same_loss.way(curve, 4.0) == (10, 2.0)
    assert same_loss.way(curve, 2.9) == (None, None)
    assert same_loss.way(curve, 3.5, interpolate=True) == (15.0, 3.0)  # half of the way from 4.0 to 3.0
    assert staircase.every_steps([*curve, (33, 6.6, 3.4)]) == {10}


def test_the_staircase_is_what_a_hand_works_out(climbed):
    stairs = staircase.from_race(climbed)
    assert (stairs["target_val_loss"], stairs["val_every_steps"]) == (3.3, [40])
    assert "the highest final val_loss of r01, of 2 runs" in stairs["target_words"]
    r01, r04, r11 = stairs["rungs"]
    assert [run["steps_to_target"] for rung in stairs["rungs"] for run in rung["runs"]] == [120, 120, 80, 80, 40, 40]
    ways_s = [[run["to_target_s"] for run in rung["runs"]] for rung in stairs["rungs"]]
    assert ways_s == [pytest.approx([12.0, 13.0]), pytest.approx([8.0, 8.4]), pytest.approx([8.0, 8.2])]
    assert r01["step"] is None
    assert r04["levels"]["to_target_s"]["mean"] == pytest.approx((8.0 * 8.4) ** 0.5)
    assert r04["levels"]["steps_to_target"] == {"mean": 80, "ci95": None, "n": 2}
    assert r04["levels"]["val_loss"]["mean"] == pytest.approx(3.05)
    assert r04["step"]["to_target"]["change_pct"] == pytest.approx(100 * ((8 * 8.4 / 12 / 13) ** 0.5 - 1))  # -34.4
    assert r04["step"]["steps"]["change_pct"] == pytest.approx(-100 / 3)
    assert r04["step"]["val_loss"]["change"] == pytest.approx(3.05 - 3.25)
    assert r11["step"]["step_ms"]["change_pct"] == pytest.approx(100 * ((24 * 24.6 / 12 / 12.6) ** 0.5 - 1))  # +97.6
    assert r04["step"]["record_pct"] == pytest.approx(100 * (22.3 / 45 - 1))
    assert r11["step"]["record_pct"] == pytest.approx(100 * (7.2 / 22.3 - 1))


def test_its_intervals_and_p_are_welchs_on_logarithms_and_p_is_adjusted_for_all_steps(climbed):
    steps = [rung["step"]["to_target"] for rung in staircase.from_race(climbed)["rungs"][1:]]
    ways_s = [[12.0, 13.0], [8.0, 8.4], [8.0, 8.2]]
    logs = [[log(value) for value in values] for values in ways_s]
    tests = [scipy.stats.ttest_ind(logs[k + 1], logs[k], equal_var=False) for k in (0, 1)]
    for step, test in zip(steps, tests, strict=True):
        edges = test.confidence_interval(0.95)
        assert step["ci95_pct"] == pytest.approx([100 * (exp(edges.low) - 1), 100 * (exp(edges.high) - 1)])
        assert step["p"] == pytest.approx(test.pvalue)
    small, large = sorted(test.pvalue for test in tests)
    assert sorted(step["p_holm"] for step in steps) == pytest.approx([2 * small, max(2 * small, large)])


def test_the_verdict_of_a_step_is_a_races(raced, tmp_path):
    """About 12 s against 8 s is shown; 8.0 and 8.001 s against 8.0 and 8.002 s is no change."""
    steady = {"R01": [12.0, 12.001], "R04": [12.0, 12.0015], "R11": [24.0, 24.006]}  # to the target a third
    raced(train_s=steady)
    steps = [rung["step"] for rung in staircase.from_race(folder_of(tmp_path))["rungs"][1:]]
    assert steps[0]["verdict"] == "faster"
    assert steps[1]["verdict"] in ("equivalent", "inconclusive")


def test_rungs_whose_steps_are_of_different_sizes_are_compared_on_their_way_to_the_target(raced, tmp_path):
    raced({"R21": LOSSES["R11"]}, {"R01": [12.0, 12.001], "R21": [24.0, 24.006]}, names=("r01", "r21"))
    (step,) = [rung["step"] for rung in staircase.from_race(folder_of(tmp_path))["rungs"][1:]]
    assert (step["verdict"], step["why"]) == ("faster", [])
    assert step["step_ms"]["change_pct"] is None  # a step is 1,024 tokens in one and 768 in the other


def test_a_rung_of_which_one_run_misses_the_target_has_no_time_to_it(raced, tmp_path, capsys):
    raced(losses={"R04": [LOSSES["R04"][0], {0: 5.6, 40: 4.5, 80: 4.0, 120: 3.4}]})
    r01, r04, r11 = staircase.from_race(folder_of(tmp_path))["rungs"]
    assert (r04["num_reached"], r04["levels"]["to_target_s"]["mean"]) == (1, None)
    assert r04["step"]["verdict"] == r11["step"]["verdict"] == "not_comparable"
    assert r04["step"]["why"] == r11["step"]["why"] == ["1 of 2 runs of r04 do not reach the target"]
    assert r11["levels"]["to_target_s"]["n"] == 2  # its own way is known all the same
    assert r04["step"]["val_loss"]["change"] is not None and r04["step"]["step_ms"]["change_pct"] is not None
    out = capsys.readouterr().out
    assert "1 of 2 runs reach it" in out and "r04: 1 of 2 runs of r04 do not reach the target" in out


def test_a_target_of_the_users_own_is_the_target(raced, tmp_path):
    raced(overrides=["goal.target_val_loss=3.55"])
    stairs = staircase.from_race(folder_of(tmp_path))
    assert (stairs["target_val_loss"], stairs["target_words"]) == (3.55, "the runs' own target (goal.target_val_loss)")
    assert [rung["runs"][0]["steps_to_target"] for rung in stairs["rungs"]] == [80, 80, 40]


def test_a_ladder_of_bits_per_byte_is_judged_and_tabled_by_them(raced, tmp_path, printed, capsys):
    raced(overrides=["goal.metric=val_bpb", "margin=0.003"])
    stairs = staircase.from_race(folder_of(tmp_path))
    assert stairs["target_val_loss"] == 3.3 / 4 and stairs["metric"] == ["val_bpb", "bits per byte", "lower"]
    r04 = stairs["rungs"][1]
    assert r04["levels"]["val_loss"]["mean"] == pytest.approx(3.05 / 4) and r04["num_reached"] == 2
    assert r04["step"]["val_loss"]["margin"] == 0.003
    capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(printed(ladder, "--page", folder_of(tmp_path).name, "--csv"))))
    assert float(rows[1]["val_bpb"]) == pytest.approx(3.05 / 4) and float(rows[1]["target_val_bpb"]) == 3.3 / 4
    assert not [key for key in rows[0] if "val_loss" in key and not key.startswith("record_")]
    text = page.document(folder_of(tmp_path), stairs).markdown()
    assert "target val_bpb 0.8250" in text and "val_bpb |" in text and "val_loss" not in text, text
    assert "val_bpb by step" in page.document(folder_of(tmp_path), stairs).html()


def test_where_higher_is_better_a_target_is_reached_from_below():
    curve = [(0, 0.0, 0.1), (10, 1.0, 0.2), (20, 2.0, 0.4)]
    assert same_loss.way(curve, 0.3, metric.CORE) == (20, 2.0)
    assert same_loss.way(curve, 0.3, metric.CORE, interpolate=True) == (15.0, 1.5)
    assert same_loss.way(curve, 0.5, metric.CORE, interpolate=True) == (None, None)


def test_a_failed_run_reached_nothing_and_is_noted(raced, tmp_path):
    raced(overrides=["n=3"], hurt={6: "fail"})
    stairs = staircase.from_race(folder_of(tmp_path))
    assert sorted(rung["num_reached"] for rung in stairs["rungs"]) == [2, 3, 3]
    assert any("1 of 9 runs failed" in note for note in stairs["notes"])


@pytest.mark.parametrize(("n", "num_timed", "says"), [(3, 2, "are excluded from times"), (2, 2, "still count")])
def test_disturbed_runs_are_in_no_time_where_two_others_are_left(raced, tmp_path, monkeypatch, n, num_timed, says):
    """The first run of each rung is disturbed; its loss and its steps count whatever happens."""
    raced(overrides=[f"n={n}"])
    read = staircase.selection.arm_from_folders

    def doubted(name, paths):
        arm = read(name, paths)
        arm.rows[0]["machine_doubts"] = ["the GPU was throttled"]
        return arm

    monkeypatch.setattr(staircase.selection, "arm_from_folders", doubted)
    stairs = staircase.from_race(folder_of(tmp_path))
    assert f"the machine disturbed 3 of {3 * n} runs, which {says}" in stairs["notes"][0]
    for rung in stairs["rungs"]:
        ns = [rung["levels"][key]["n"] for key in ("to_target_s", "step_ms", "steps_to_target", "val_loss")]
        assert ns == [num_timed, num_timed, n, n]


# ---- the verb


def test_it_is_a_race_whose_plan_keeps_the_rungs_before_the_first_run(climbed):
    plan = json.loads((climbed / "plan.json").read_text())
    assert plan["ladder"]["size"] == "nano" and plan["ladder"]["rungs"]["R04"]["minutes"] == 22.3
    assert ["model.vocab_size", "50257", "null"] in plan["ladder"]["rungs"]["R04"]["changed"]
    assert ledger.read(climbed.parent.parent).lines[0]["event"] == "plan"
    assert (climbed / page.NAME).exists()
    assert f'href="{page.NAME}">its staircase</a>' in (climbed / "race.html").read_text()


def test_an_interrupted_ladder_is_resumed(raced, capsys):
    code, arms = raced(hurt={4: "interrupt"})
    assert code == 1 and "./run.sh ladder --resume" in capsys.readouterr().out
    assert ladder.main(["--resume", "--anyway"]) == 0
    assert arms.num_started == 10
    assert "Each against the rung below" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no ladder is unfinished"):
        ladder.main(["--resume"])


def test_csv_and_json_are_on_standard_output_alone(climbed, monkeypatch, answer_of, printed):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(climbed.parent.parent))
    lines = list(csv.DictReader(io.StringIO(printed(ladder, "--page", "--csv"))))
    assert [line["rung"] for line in lines] == ["r01", "r04", "r11"]
    assert float(lines[1]["to_target_s_change_pct"]) == pytest.approx(-34.367, abs=1e-3)
    assert (lines[1]["steps_to_target"], lines[2]["record_minutes"], lines[0]["verdict"]) == ("80", "7.2", "")
    assert answer_of(ladder, "--page", climbed.name)["target_val_loss"] == 3.3


def test_a_race_of_other_arms_is_no_ladder(raced, tmp_path):
    raced()
    folder = folder_of(tmp_path)
    outcome = json.loads((folder / "race.json").read_text())
    del outcome["plan"]["ladder"]
    (folder / "race.json").write_text(json.dumps(outcome))
    with pytest.raises(ValueError, match="it is not a ladder"):
        staircase.from_race(folder)


def test_a_dry_run_says_what_it_would_run_and_runs_nothing(raced, tmp_path, printed, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    out = printed(ladder, "r01", "r04", "n=4", "size=nano", "--dry-run")
    assert "10 runs: 4 of each of 2 rungs, after a warm-up of each" in out
    assert "about 5 min in all, a guess: none has run here" in out  # ten of 30 s, by the size's own guess
    assert "a run: about 30 s (every rung)" in out
    cells = [line.split() for line in out.splitlines()]
    assert ["model.vocab_size", "50257", "null", "r04"] in cells
    assert ["goal.num_steps", "19560", "or", "6200", "60", "every", "rung"] in cells
    assert max(map(len, out.splitlines())) <= 100
    assert not (tmp_path / "results").exists()


def test_what_the_size_changes_is_a_line_a_setting_whatever_the_number_of_rungs():
    changed = {
        "r01": [("steps", "900", "60"), ("heads", "12", "4")],
        "r02": [("steps", "1000", "60"), ("heads", "6", "4")],
        "r03": [("steps", "80", "60"), ("source", "hub", "own")],
        "r04": [("steps", "1000", "60"), ("heads", "6", "3"), ("source", "net", "own")],
        "r05": [("steps", "7", "60"), ("source", "disk", "own")],
    }
    assert request.change_rows(changed) == [
        ("heads", "12 or 6", "4", "r01, r02"),
        ("heads", "6", "3", "r04"),
        ("source", "hub or net or disk", "own", "r03 to r05"),
        ("steps", "7 to 1000", "60", "every rung"),
    ]
    assert request.spans(["r05", "r01", "r03", "r04"], list(changed)) == "r01, r03 to r05"


# ---- its page


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (400, True)])
def test_the_staircase_can_be_read_on_a_screen_and_on_a_phone(raced, tmp_path, width, dark):
    raced(losses={"R11": [{0: 5.6, 120: 3.4}, LOSSES["R11"][1]]})
    with Browser() as browser:
        shown = browser.open(folder_of(tmp_path) / page.NAME, width=width, dark=dark)
        assert shown.errors == [] and len(shown.requests) == 1
        assert shown.js("document.documentElement.scrollWidth <= innerWidth")
        texts = "[...document.querySelectorAll('.stairs text')].map(one => one.getBoundingClientRect())"
        assert shown.js(f"Math.min(...{texts}.map(one => one.height))") >= 11  # CSS pixels
        assert shown.js(f"{texts}.every(one => one.left >= 0 && one.right <= innerWidth)")
        assert shown.js("document.querySelectorAll('.stairs svg').length") == 5
        edge = "(svg, what, side) => [...svg.querySelectorAll(what)].map(one => one.getBoundingClientRect()[side])"
        label = "'text:has(.name):not(:last-of-type)'"  # of the last rung, which has no value, over all of its row
        clear = f"Math.max(...({edge})(svg, {label}, 'right')) < Math.min(...({edge})(svg, '.riser, .tread', 'left'))"
        assert shown.js(f"[...document.querySelectorAll('.stairs svg')].every(svg => {clear})")
        rects = "[...document.querySelector('.stairs svg').querySelectorAll('rect')]"
        treads = shown.js(f"{rects}.map(one => one.width.baseVal.value)")
        assert len(treads) == 2 and treads[1] / treads[0] == pytest.approx((8 * 8.4 / 12 / 13) ** 0.5, abs=0.01)
        assert "1 of 2 runs reach it" in shown.text and "1 of 2 runs of r11 do not reach the target" in shown.text
        assert shown.js("document.querySelector('a[href=\"race.html\"]') !== null")


@pytest.mark.slow
def test_rungs_are_raced_for_real(tmp_path):
    """The user's command races the first and the last rung of the planted races, two runs each of four steps."""
    arguments = ["r01", "r11", "n=2", "size=nano", "goal.num_steps=4", "goal.val_every_steps=2"]
    arguments += ["goal.val_tokens=1024", "instruments=[]", "hardware=cpu", "--anyway", "--json"]
    done = real_runs.bench(tmp_path / "results", "ladder", *arguments, timeout_s=900, code=0)
    stairs = json.loads(done.stdout)
    assert [rung["rung"]["name"] for rung in stairs["rungs"]] == ["r01", "r11"]
    assert stairs["rungs"][0]["num_reached"] == 2  # by the rule of the target
    assert all(len(rung["runs"]) == 2 and rung["levels"]["val_loss"]["n"] == 2 for rung in stairs["rungs"])
    assert "data-chart" in (folder_of(tmp_path) / page.NAME).read_text()
