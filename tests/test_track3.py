"""All results of modded-nanogpt's track 3, and hand-written logs, judged by its rule, whose arithmetic is checked.

track3.csv.gz holds what tests/benchmarks/track3.py read from a clone of the public repository (MIT licence).
"""

import json
import random

import claimed
import pytest
from benchmarks import track3

from bench.claims import claim as claims
from bench.claims import leaderboard
from bench.claims.rules import runs
from bench.cli import export, import_logs, judge
from bench.compare import target
from bench.compare.target import StepMean
from bench.record import run_folder, store

RULES = claims.track_rules("steps").rules
NOT_SHOWN_UPSTREAM = (1, 2, 3)  # accepted before its rule was written, and marked so in its table
# result: (the step that we find, why it is not upstream's)
OTHERWISE = {
    14: (None, "all four logs print seed 0, and the code sets it: they count as one run"),
    16: (3124, "validated at every step near the end, and the step before the claimed one passes too"),
    34: (2920, "an earlier validation passes too; its authors chose 2925"),
    41: (None, "one of the twenty logs is public: the others are a table in its README"),
}
CURVE = {2000: 3.40, 2500: 3.32, 2750: 3.285, 2800: 3.2770, 2850: 3.2750}


# ---- the 46 results


RESULTS = list(track3.kept())


def test_all_46_results_are_there():
    assert [result[0] for result in RESULTS] == list(range(1, 47))


@pytest.mark.parametrize(("number", "step", "mean", "n", "runs"), RESULTS)
def test_the_importer_reads_upstreams_mean_at_the_step_of_the_claim(number, step, mean, n, runs):
    at = next(at for at in target.step_means([run["curve"] for run in runs]) if at.step == step)
    if number == 41:
        assert (at.n, n) == (1, 20)
    else:
        assert at.n == n and at.mean == pytest.approx(mean, abs=0.0002)


@pytest.mark.parametrize(("number", "step", "mean", "n", "runs"), RESULTS)
def test_each_result_is_judged_as_upstream_did_or_with_the_reason(number, step, mean, n, runs):
    rows = [{"seed": run["seed"], "provenance": "imported", "target": 3.28} for run in runs]
    decision = target.decide_z(rows, [run["curve"] for run in runs], RULES)
    expected = None if number in NOT_SHOWN_UPSTREAM else OTHERWISE.get(number, (step, ""))[0]
    assert (decision["step"], decision["passed"]) == (expected, expected is not None), decision["words"]


def test_only_results_11_and_14_have_logs_of_several_codes():
    """Result 11 pools twelve runs at MUON_LR 0.0375 with four at 0.04; in 14 names and printed texts differ."""
    several = {number: len({run["code"] for run in runs} - {""}) for number, _, _, _, runs in RESULTS}
    assert {number: codes for number, codes in several.items() if codes > 1} == {11: 2, 14: 3}


# ---- hand-written logs


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """logs("a", {step: val_loss}) writes a log and returns its path."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    folder = tmp_path / "logs"
    folder.mkdir()

    def write(name, curve, total=2900, seed=None, code="import torch\n", gpu="NVIDIA H100 80GB HBM3", tail=""):
        head = f"{code}{'=' * 100}\nRunning PyTorch 2.10.0 on device_name={gpu} with world_size=8\n{'=' * 100}\n"
        head += f"Using seed={seed}\n" * (seed is not None)
        lines = [
            f"step:{step}/{total} val_loss:{loss:.5f}{tail} train_time:{0.3 * step:.3f}s step_avg:300.00ms\n"
            for step, loss in curve.items()
        ]
        (folder / f"{name}.txt").write_text((head if gpu else f"{code}{'=' * 100}\n") + "".join(lines))
        return folder / f"{name}.txt"

    write.folder = folder
    return write


def judged(capsys, *arguments, code):
    """Runs judge --json with these arguments.  Returns (verdict, {rule: result})."""
    assert judge.main(["--json", *map(str, arguments)]) == code
    verdict = json.loads(capsys.readouterr().out)
    return verdict, {rule["rule"]: rule for rule in verdict["rules"]}


def failures(rules):
    return {name: rule["evidence"] for name, rule in rules.items() if rule["passed"] is False}


def test_a_log_is_judged_where_it_lies_and_what_it_cannot_show_neither_accepts_nor_refuses(logs, printed, capsys):
    log = logs("a", CURVE)
    first, *lines = printed(judge, "--track", "steps", log).splitlines()
    assert "  not refused: " in first
    assert first.endswith(" on track steps, 1 run: 8 rules passed, 10 not applicable, 10 not known from a log")
    assert "       ?  no run was left out: not known from a log" in lines
    assert not (logs.folder.parent / "results").exists()
    verdict, rules = judged(capsys, "--track", "steps", log, code=0)
    assert verdict["accepted"] is None and sum(not rule["known"] for rule in rules.values()) == 10
    # 3.28 - 3.2750 at step 2850; 0.003 at step 2800 is not enough for one run
    assert rules["the target is reached"]["evidence"].startswith("step 2850 is the first")


def test_an_imported_log_is_judged_alike_and_has_the_track_of_its_folder(logs, capsys, tmp_path):
    folder = tmp_path / "track_3_optimization" / "results" / "idea"
    folder.mkdir(parents=True)
    logs("a", CURVE).rename(folder / "a.txt")
    import_logs.main(["modded-nanogpt", str(folder)])
    capsys.readouterr()
    (imported,) = (tmp_path / "results" / "steps").iterdir()
    verdict, rules = judged(capsys, imported, code=0)
    again, rules_again = judged(capsys, folder, code=0)
    assert (verdict["track"], verdict["accepted"]) == (again["track"], again["accepted"]) == ("steps", None)
    evidence = [of["the target is reached"]["evidence"] for of in (rules, rules_again)]
    assert evidence[0] == evidence[1]


def test_a_log_imported_when_tracks_had_upstreams_names_is_judged_on_ours(logs, capsys, tmp_path):
    import_logs.main(["modded-nanogpt", str(logs("a", CURVE))])
    (imported,) = (tmp_path / "results" / "imported").iterdir()
    run = json.loads((imported / "run.json").read_text())
    (imported / "run.json").write_text(json.dumps(run | {"track": "track_3_optimization"}))
    capsys.readouterr()
    assert judged(capsys, imported, code=0)[0]["track"] == "steps"


def test_logs_that_ended_at_one_step_of_a_longer_schedule_are_judged_there(logs, capsys):
    paths = [logs(name, {2700: 3.281, 2720: 3.2770 + 0.0001 * number}) for number, name in enumerate("abcd")]
    assert not next(run_folder.find_runs([logs.folder]), None)
    _, rules = judged(capsys, "--track", "steps", *paths, code=0)
    assert rules["every run completed"]["evidence"].startswith("0 complete, 4 stopped within their schedules")
    assert rules["the target is reached"]["evidence"].startswith("step 2720 is the first")
    _, rules = judged(capsys, "--track", "gpt2_small", *paths, code=1)  # its t test is of complete runs
    assert "every run completed" in failures(rules) and "the target is reached" in failures(rules)


def test_where_logs_print_the_loss_of_averaged_weights_it_is_judged(logs, capsys):
    log = logs("a", {2600: 3.29, 2690: 3.281}, tail=" val_ema_loss:3.27500")
    _, rules = judged(capsys, "--track", "steps", log, code=0)
    assert rules["the target is reached"]["evidence"].endswith("by val_ema_loss, which the logs go by")
    other = logs("b", {2600: 3.291, 2690: 3.282})  # goes by val_loss: then all are judged by that
    _, rules = judged(capsys, "--track", "steps", log, other, code=1)
    assert "mean val_loss 3.28150" in failures(rules)["the target is reached"]


def test_two_results_are_compared_by_upstreams_rule(logs, capsys):
    old, new, same = (
        logs(name, {2000: loss, step: 3.2750}) for name, loss, step in zip("abc", (3.4, 3.35, 3.3), (2900, 2700, 2850))
    )
    _, rules = judged(capsys, "--track", "steps", new, "--against", old, code=0)
    # (0 + 2 * 0.0045) / sqrt(2) = 0.00636; for 50 steps 0.00159
    assert rules["it is better than the other"]["evidence"].endswith("= 0.00636, needed 0.004; p = 4.9e-07")
    _, rules = judged(capsys, "--track", "steps", same, "--against", old, code=1)
    assert failures(rules)["it is better than the other"].endswith("= 0.00159, needed 0.004; p = 0.11")
    _, rules = judged(capsys, "--track", "gpt2_small", new, "--against", old, code=1)
    assert "race them" in failures(rules)["it is better than the other"]


# ---- cheats


def test_a_log_counted_twice_is_one_run_also_with_its_end_cut_off(logs, capsys):
    """One run at 3.2765 is not enough, (3.28 - 3.2765) * 2**0.5 = 0.0049 would be."""
    lucky = CURVE | {2850: 3.2765, 2900: 3.2764}
    paths = [logs("a", lucky), logs("b", lucky), logs("c", {step: lucky[step] for step in lucky if step < 2900})]
    verdict, rules = judged(capsys, "--track", "steps", *paths, code=1)
    assert verdict["n"] == 1 and list(failures(rules)) == ["the target is reached"]
    assert "copies of these, not counted: " in rules["every run has its own seed"]["evidence"]


def test_runs_of_one_printed_seed_are_one_run(logs, capsys):
    paths = [logs(str(k), {2000 + k: 3.4, 2850: 3.2770 + k * 1e-4}, seed=7) for k in range(4)]
    _, rules = judged(capsys, "--track", "steps", *paths, code=1)
    assert {"every run has its own seed", "the target is reached"} <= set(failures(rules))


def test_a_log_without_the_validations_that_others_have_is_refused(logs, capsys):
    paths = [logs("a", CURVE), logs("b", {2000: 3.39, 2850: 3.2700})]
    _, rules = judged(capsys, "--track", "steps", *paths, code=1)
    assert "1 of 2 runs lack the validation at step 2500" in failures(rules)["the target is reached"]


def test_logs_of_two_codes_are_refused_and_a_literal_seed_makes_no_other_code(logs, capsys):
    code = "import torch\nSEED = {}\nMUON_LR = {}\n"
    paths = [
        logs("a", CURVE, code=code.format(1, 0.0375)),
        logs("b", {step: loss + 2e-4 for step, loss in CURVE.items()}, code=code.format(2, 0.0375)),
        logs("c", {step: loss - 2e-4 for step, loss in CURVE.items()}, code=code.format(3, 0.04)),
    ]
    _, rules = judged(capsys, "--track", "steps", *paths[:2], code=0)
    assert rules["the runs share config and code"]["passed"]
    _, rules = judged(capsys, "--track", "steps", *paths, code=1)
    assert "2 codes" in failures(rules)["the runs share config and code"]


def test_another_gpu_is_refused_although_another_log_does_not_print_its_own(logs, capsys):
    paths = [logs("a", CURVE, gpu=None), logs("b", {2850: 3.2}, gpu="NVIDIA A100-SXM4-80GB")]
    _, rules = judged(capsys, "--track", "gpt2_small", *paths, code=1)
    assert "the track's GPU is NVIDIA H100" in failures(rules)["the hardware is that of the track"]
    _, rules = judged(capsys, "--track", "gpt2_small", paths[0], code=1)
    assert not rules["the hardware is that of the track"]["known"]


def test_a_record_that_is_refused_is_not_accepted_as_a_log_either(logs, capsys, tmp_path):
    """A failing record may become a log: it is then "not refused" and counts nowhere."""
    results = claimed.Results(tmp_path / "results")
    record = results.add(0, val_loss=2.9, overrides=["data.seq_len=64"])
    _, rules = judged(capsys, record, code=1)
    assert "nothing that the track fixes was changed" in failures(rules)
    log = tmp_path / "a.txt"
    export.main([str(record), "--to", "modded-nanogpt", "--out", str(log)])
    capsys.readouterr()
    verdict, _ = judged(capsys, "--track", "steps", log, code=0)
    assert verdict["accepted"] is None
    with pytest.raises(ValueError, match="a claim needs records and their ledger; these are logs"):
        judge.main(["--track", "steps", str(log), "--claim", str(tmp_path / "claim")])
    import_logs.main(["modded-nanogpt", str(log)])
    (imported,) = (tmp_path / "results" / "imported").iterdir()
    run = json.loads((imported / "run.json").read_text())
    (imported / "run.json").write_text(json.dumps(run | {"track": "steps"}))
    assert "steps" not in leaderboard.by_track(store.read_rows([tmp_path / "results"]))
    with pytest.raises(ValueError, match="records of cpu_nano, logs of .* cannot be judged together"):
        judge.main([str(record), str(imported)])
    with pytest.raises(ValueError, match="--track steps: .* is on track cpu_nano, and was made to its rules"):
        judge.main(["--track", "steps", str(record)])


def test_a_record_that_calls_itself_imported_is_no_log_where_the_ledger_knows_it(logs, capsys, tmp_path):
    results = claimed.Results(tmp_path / "results")
    record = results.add(0, val_loss=2.9, overrides=["data.seq_len=64"])
    run = json.loads((record / "run.json").read_text())
    (record / "run.json").write_text(json.dumps(run | {"provenance": "imported"}))
    _, rules = judged(capsys, record, code=1)
    assert {"nothing that the track fixes was changed", "every record matches the ledger"} <= set(failures(rules))


def test_a_log_whose_track_nothing_names_asks_for_one(logs):
    with pytest.raises(ValueError, match="a log does not name its track: add --track and one of autoresearch"):
        judge.main([str(logs("a", CURVE))])


# ---- records


def test_records_of_a_track_with_the_z_rule_are_judged_at_the_first_step_that_passes(logs, monkeypatch, tmp_path):
    """cpu_nano, as if its rule were that of steps: (3.0 - mean) * 2**0.5 >= 0.004."""
    track_rules = claims.track_rules("cpu_nano")
    monkeypatch.setattr(track_rules.rules, "statistic", "z")
    monkeypatch.setattr(track_rules.rules, "judged", "steps")
    monkeypatch.setattr(track_rules, "repeats", 1)
    results = claimed.Results(tmp_path / "results")
    folders = [results.add(seed, losses={0: 5.5, 60: loss, 120: 2.9}) for seed, loss in ((0, 2.999), (1, 2.994))]
    claim = claims.from_folders(folders)
    assert claim.decision["step"] == 60 and runs.the_target_is_reached(claim)[0]
    assert claims.from_folders(folders[:1]).decision["step"] == 120  # one run alone needs 2.996
    (entry,) = leaderboard.by_track(store.read_rows([tmp_path / "results"]))["cpu_nano"]
    assert entry.score == 60
    failed = results.add(2, losses={0: 5.5, 60: 2.5, 120: 2.4}, status="failed")
    assert claims.from_folders([*folders, failed]).decision["passed"] is False  # of ours only logs may end early


@pytest.mark.parametrize(
    ("losses", "fault"),
    [
        ({0: 5.6, 60: 2.99, 120: 2.8}, None),
        ({0: 5.6, 60: 3.2, 120: 2.8}, ": it reaches the target at step 120; its baseline had not at step 60"),
        # validated more often than its baseline, which may have passed at step 61
        ({0: 5.6, 60: 3.2, 90: 2.99, 120: 2.8}, ": it reaches the target at step 90; its baseline had not at step 60"),
    ],
)
def test_a_race_on_such_a_track_is_won_where_the_baseline_was_seen_to_fail(losses, fault, monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    rules = claims.track_rules("cpu_nano").rules
    monkeypatch.setattr(rules, "judged", "steps")
    results, baseline = claimed.Results(tmp_path / "results"), {0: 5.6, 60: 3.2, 120: 2.8}

    def losses_of(arm, seed):
        return {step: loss + 1e-4 * seed for step, loss in (losses if arm == "B" else baseline).items()}

    race = results.race(monkeypatch, pct=-20, losses_of=losses_of)
    monkeypatch.setattr(rules, "statistic", "z")
    evidence = claimed.failed(f"{race.name}:B").get("it is faster than its baseline")
    assert evidence is None if fault is None else evidence.endswith(fault)


def test_free_has_no_rule_on_data_and_asks_for_no_number_of_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    results = claimed.Results(tmp_path / "results")
    claim = claims.from_folders([results.add(0, change=lambda run: run.update(track="free", validity="suspect"))])
    assert runs.the_data_are_those_of_the_track(claim) == (None, "track free fixes no data")
    assert runs.there_are_enough_runs(claim) == (None, "track free keeps no records, so it asks for no number of runs")


def passing_step(*curves):
    passing = target.first_passing(curves, 3.28, 0.004)
    return passing and passing.step


def test_the_first_step_counts_at_which_the_mean_of_all_runs_passes():
    a = {3100: 3.2790, 3125: 3.2775, 3150: 3.2760}
    b = {3100: 3.2780, 3125: 3.2768, 3150: 3.2750}
    # (3.28 - 3.2785) * 2**0.5 = 0.0021, (3.28 - 3.27715) * 2**0.5 = 0.0040305, and 0.0064
    assert target.first_passing([a, b], 3.28, 0.004) == StepMean(3125, 2, pytest.approx(3.27715))


@pytest.mark.parametrize(
    ("n", "mean", "passes"),
    [(1, 3.276, True), (1, 3.2761, False), (4, 3.278, True), (4, 3.2781, False), (16, 3.279, True), (1, 3.28, False)],
)
def test_one_run_needs_3_276_and_sixteen_need_3_279(n, mean, passes):
    assert (passing_step(*[{3000: mean}] * n) == 3000) is passes


def test_runs_that_stopped_early_are_judged_at_the_steps_that_all_of_them_reached():
    whole, stopped = {2720: 3.2772, 2725: 3.2700, 2900: 3.26}, {2720: 3.2770}
    assert passing_step(whole, stopped) == 2720
    assert passing_step(whole, {2700: 3.2700}) is None  # validated at no step of the other's
    assert passing_step() is None


def test_upstreams_own_examples_of_two_results_are_the_same_numbers():
    eleven, thirteen = StepMean(3225, 16, 3.2785), StepMean(3210, 10, 3.2785)
    assert target.pairwise_margin_nats(thirteen, eleven, 0.0045) == pytest.approx(0.00167, abs=5e-6)
    six, twelve = StepMean(3375, 20, 3.2788), StepMean(3325, 20, 3.2790)
    assert target.pairwise_margin_nats(twelve, six, 0.0045) == pytest.approx(0.00648, abs=5e-6)
    eight = StepMean(3250, 10, 3.2778)  # its README counts 10 runs in its table, and 16 in this example: 0.0027
    assert target.pairwise_margin_nats(thirteen, eight, 0.0045) == pytest.approx(0.00246, abs=5e-6)


def test_the_p_values_of_pairs_that_upstreams_table_gives_are_the_same():
    eight, nine, eleven = StepMean(3250, 10, 3.2778), StepMean(3250, 8, 3.2771), StepMean(3225, 16, 3.2785)
    thirteen, fourteen, sixteen = StepMean(3210, 10, 3.2785), StepMean(3150, 4, 3.2776), StepMean(3125, 8, 3.2784)
    for new, old, p in [
        (eleven, nine, 0.69),
        (thirteen, eleven, 0.099),
        (thirteen, eight, 0.029),
        (sixteen, fourteen, 0.34),
    ]:
        margin_nats = target.pairwise_margin_nats(new, old, 0.0045)
        assert target.z_p(margin_nats, 0.0013) == pytest.approx(p, abs=0.005)


def test_a_mean_at_the_target_passes_hardly_more_often_however_many_validations_are_looked_at():
    """4,000 results of four runs: 4.2 pass by chance at one validation each.

    Spreads as in upstream's logs: runs 0.0013 nats, which the rule assumes, validations within a run 0.00003.
    """
    chance = random.Random(3)
    num_passed = {1: 0, 20: 0}
    for _ in range(4000):
        offsets = [chance.gauss(3.28, 0.0013) for _ in range(4)]
        curves = [{step: offset + chance.gauss(0, 0.00003) for step in range(20)} for offset in offsets]
        for count in num_passed:
            num_passed[count] += (
                passing_step(*[{step: curve[step] for step in range(count)} for curve in curves]) is not None
            )
    assert num_passed[1] <= num_passed[20] <= 12
