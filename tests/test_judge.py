"""judge: a true claim is accepted, and each way of cheating or slipping is refused by the rule that is meant for it."""

import json
import re
import shutil
from pathlib import Path

import claimed
import pytest
import yaml
from claimed import failed, results, three  # noqa: F401  results is a fixture

from bench.api import judging
from bench.base import atomic
from bench.base.reading import plain_file
from bench.claims import claim as claims
from bench.claims.rules import rulebook
from bench.cli import compare, judge, race, replay
from bench.compare import comparison
from bench.config import compose, schema
from bench.plans.race import runner
from bench.record import certificates, ledger, run_folder


def runs_of(results, race):
    """The folders of B's runs."""
    return [results.folder / run for run in json.loads((race / "race.json").read_text())["arms"]["B"]["runs"]]


def edit(folder, change):
    run = json.loads((folder / "run.json").read_text())
    change(run)
    atomic.write_json(folder / "run.json", run)


def test_three_true_runs_are_accepted_with_evidence_for_every_rule(results, capsys):
    folders = three(results)
    assert judge.main([str(folder) for folder in folders]) == 0
    out = capsys.readouterr().out
    first = out.splitlines()[0]
    assert first.startswith("   judge  accepted: ") and " on track cpu_nano, 3 runs: " in first
    assert first.endswith(f": 17 rules passed, {len(rulebook.RULES) - 17} not applicable")
    assert out.count("    pass  ") == 17 and out.count("FAIL") == 0
    assert "seeds 0, 1, 2" in out and "p=" in out


def test_the_verdict_and_the_count_stand_first_then_what_failed_with_its_evidence(results, answer_of, printed):
    folders = three(results)
    head, *lines = printed(judge, folders[0], code=1).splitlines()
    marks = [line.split()[0] for line in lines]
    num_failed = marks.count("FAIL")
    assert num_failed >= 2
    assert set(marks[:num_failed]) == {"FAIL"}
    assert any(line.startswith("    FAIL  there are enough runs: 1 valid of 1 run, the") for line in lines[:num_failed])
    assert head.startswith("   judge  refused: ")
    assert head.endswith(f" on track cpu_nano, 1 run: {num_failed} of {len(rulebook.RULES)} rules failed")
    verdict = answer_of(judge, *folders[:2], code=1)
    assert (verdict["accepted"], verdict["track"], verdict["n"]) == (False, "cpu_nano", 2)
    assert len(verdict["rules"]) == len(rulebook.RULES)


def test_a_changed_byte_is_refused(results):
    folders = three(results)
    path = folders[0] / "steps.csv"
    content = path.read_text()
    path.write_text(content.replace("3.0,", "3.1,", 1))
    assert content != path.read_text()
    assert list(failed(*folders)) == ["every record is internally consistent"]


def test_a_record_edited_so_well_that_it_is_true_to_itself_is_not_the_one_of_the_ledger(results):
    folders = three(results)
    edit(folders[0], lambda run: run["measured"].update(launcher_peak_mem_gib=0.01))
    why = f"cpu_nano/{folders[0].name}: run.json was changed after the run"
    assert failed(*folders) == {"every record matches the ledger": why}


def test_no_verdict_rests_on_a_record_that_is_not_the_one_of_the_ledger(results, won, answer_of, capsys):
    assert compare.main([str(won)]) == 0
    changed = runs_of(results, won)[0]
    edit(changed, lambda run: run["measured"].update(launcher_peak_mem_gib=0.01))
    capsys.readouterr()
    compared = answer_of(compare, won, code=2)
    assert (compared["verdict"], compared["answers"]["loss"]["verdict"]) == ("not_comparable", "inconclusive")
    sentence = f"run.json was changed after the run ended, in 1 run of B: cpu_nano/{changed.name}: restore"
    assert compared["reasons"][0].startswith(sentence)
    assert compare.main([str(won), "--force"]) == 2
    name, sha256 = f"cpu_nano/{changed.name}", ledger.sha256_of(changed / "run.json")
    ledger.append(results.folder, "resume", run=name)  # as if it had not been complete
    ledger.append(results.folder, "end", run=name, status="complete", run_json_sha256=sha256)
    assert compare.main([str(won)]) == 2  # whoever changes a record can write a line too
    assert failed(*runs_of(results, won))["every record matches the ledger"].startswith(f"{name}: run.json was changed")


def test_no_verdict_rests_on_steps_that_are_not_the_recorded_ones(results, won, answer_of):
    changed = runs_of(results, won)[0]
    steps = changed / "steps.csv"
    steps.write_text(steps.read_text().replace(",3.0", ",3.5"))  # runs of one trajectory would count as several
    compared = answer_of(compare, won, code=2)
    assert (compared["verdict"], compared["answers"]["loss"]["verdict"]) == ("not_comparable", "inconclusive")
    reason = "the losses of the steps are not those that were recorded, in 1 run of B"
    assert compared["reasons"][0].startswith(f"{reason}: {changed.name}: steps.csv has another sha256")
    steps.unlink()
    assert "steps.csv is missing" in answer_of(compare, won, code=2)["reasons"][0]


def test_no_verdict_names_settings_that_are_not_the_recorded_ones(results, won, answer_of):
    changed = runs_of(results, won)[0] / "config.yaml"
    changed.write_text(changed.read_text() + "# edited\n")
    (reason,) = answer_of(compare, won, code=2)["reasons"]
    assert reason.startswith("the settings are not those that were recorded, in 1 run of B") and "config.yaml" in reason


def test_a_step_that_an_instrument_disturbed_is_refused(results, monkeypatch):
    rows_of = claimed._rows
    disturbed = lambda row: row | ({"flags": "traced"} if row["step"] == 5 else {})  # noqa: E731
    monkeypatch.setattr(claimed, "_rows", lambda *args: [disturbed(row) for row in rows_of(*args)])
    assert "an instrument disturbed 1 steps" in failed(*three(results))["no forbidden instrument ran"]


@pytest.mark.parametrize(("seed", "overrides"), [(3, ()), (1, ()), (1, ("optim.lr=0.00181",))])
def test_calibrates_runs_are_in_no_claim_and_take_their_seeds_from_it(results, seed, overrides):
    """The cheapest cheat: which seeds are lucky is seen by calibrate, and only they are claimed."""
    tag = {"race_id": "calibration", "arm": "A", "position": 0, "attempt": 1, "discarded": False}
    calibrated, folders = results.add(seed, val_loss=2.7, overrides=overrides, race=tag), three(results)
    evidence = failed(*folders)
    assert list(evidence) == (["no run was left out"] if seed == 1 else [])
    assert failed(*folders, calibrated)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_run_left_out_is_found_through_the_ledger(results, is_deleted):
    folders = three(results)
    left_out = results.add(3, val_loss=3.3)
    if is_deleted:
        shutil.rmtree(left_out)
    evidence = failed(*folders)
    assert list(evidence) == ["no run was left out"]
    assert re.search(r"-s3-m\w{6} \(complete\)", evidence["no run was left out"])


@pytest.mark.parametrize(
    ("fourth", "rule", "evidence"),
    [
        ({"seed": 2, "val_loss": 2.76}, "every run has its own seed", "seed 2: "),
        ({"seed": 3, "status": "failed"}, "every run completed", ": failed, "),
        ({"seed": 3, "status": "failed"}, "the target is reached", "1 of 4 runs did not complete"),
        ({"seed": 3, "source": "51"}, "the runs share config and code", "with code 51"),
    ],
)
def test_a_fourth_run_that_is_no_repeat_of_the_others_refuses_the_claim(results, fourth, rule, evidence):
    assert evidence in failed(*three(results), results.add(**fourth))[rule]


def test_deleting_it_from_the_ledger_as_well_breaks_the_ledger(results):
    folders = [results.add(9, val_loss=3.3), *three(results)]
    shutil.rmtree(folders.pop(0))
    path = results.folder / ledger.NAME
    path.write_bytes(b"\n".join(line for line in path.read_bytes().split(b"\n") if b"-s9" not in line))
    assert list(failed(*folders)) == ["the ledger is whole"]


def test_a_run_that_begins_while_a_claim_is_judged_takes_nothing_from_its_ledger(results):
    ((_, claim),) = judging.claims_of([str(folder) for folder in three(results)])
    ledger.append(results.folder, "start", run="cpu_nano/another", race=None)
    assert not [
        rule["evidence"]
        for rule in rulebook.check(claim)
        if rule["rule"] == "the ledger is whole" and not rule["passed"]
    ]


def test_a_ledger_written_anew_is_not_the_one_that_the_runs_name(results):
    folders = three(results)
    (results.folder / ledger.NAME).unlink()
    for folder in folders:
        run = run_folder.read_raw(folder)
        ledger.started(results.folder, folder, run)
        ledger.ended(results.folder, folder, run)
    assert "is not the one that the run names" in failed(*folders)["every record matches the ledger"]


def test_without_a_ledger_nothing_is_accepted(results):
    folders = three(results)
    (results.folder / ledger.NAME).unlink()
    assert set(failed(*folders)) == {"the ledger is whole", "every record matches the ledger"}


def a_gpu(name):
    facts = {"memory_gib": 80.0, "power_limit_w": 700.0, "max_sm_clock_mhz": 1980, "uuid_hash": "0" * 16}

    def change(run):
        run["environment"]["gpus"] = [{"name": name} | facts]
        run["hardware"] |= {"device": "cuda"}

    return change


def test_another_gpu_model_is_refused(results, monkeypatch):
    """It is refused on a track that names its GPU, and among runs of which one differs."""
    rule, h100, h200 = "the hardware is that of the track", "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    folders = three(results, change=a_gpu(h200))
    assert "it ran on cuda, the track's device is cpu" in failed(*folders)[rule]
    track = vars(claims.track_rules("cpu_nano"))
    wanted = schema.TrackRules(device="cuda", gpu=h100, num_gpus=1)
    monkeypatch.setattr(claims, "track_rules", lambda _: schema.TrackConfig(**track | {"rules": wanted}))
    assert f"it ran on {h200}, the track's GPU is {h100}" in failed(*folders)[rule]
    folders = [results.add(seed, change=a_gpu(name)) for seed, name in ((4, h100), (5, h200))]
    assert "the runs share one setting" in failed(*folders)
    wanted.num_gpus = 8
    assert "1 GPU and 1 rank instead of 8" in failed(folders[0])[rule]


FIXED, TOKENS = "nothing that the track fixes was changed", "goal.val_tokens: 16384 instead of 32768"


@pytest.mark.parametrize(
    ("rule", "evidence", "made"),
    [
        ("no forbidden instrument ran", "window ran", {"overrides": ["profile=window"]}),
        (FIXED, TOKENS, {"overrides": ["goal.val_tokens=16384"]}),
        # which the record hides, and its config shows
        (FIXED, TOKENS, {"overrides": ["goal.val_tokens=16384"], "change": lambda run: run.update(deviations=[])}),
        (
            "the data are those of the track",
            "its val data are 000000000000",
            {"change": lambda run: run["data"]["val"][0].update(sha256="0" * 64)},
        ),
        (
            "only what may be untimed was untimed",
            "the first ten steps not timed",
            {"change": lambda run: run["timing_protocol"]["excluded"].append("the first ten steps")},
        ),
    ],
)
def test_runs_that_are_not_as_their_track_asks_are_refused(results, rule, evidence, made):
    assert evidence in failed(*three(results, **made))[rule]


def test_a_suspect_run_keeps_its_loss_and_its_time_does_not_count(results):
    def suspect(run):
        run["validity"], run["validity_reasons"] = "suspect", ["other programs used 0.90 CPU cores"]
        run["measured"]["foreign_cpu_cores"] = 0.9

    folders = [results.add(seed, val_loss=2.74 + 0.01 * seed, change={1: suspect}.get(seed)) for seed in range(3)]
    why = "2 valid of 3 runs, the track needs 3; suspect: other programs used 0.90 CPU cores"
    why += "; make more with fresh seeds, and judge them together with these"
    assert failed(*folders) == {"there are enough runs": why}
    for folder, reasons in zip(folders, (["a clock jumped"], ["steps 3 stalled", "x"], ["steps 4 and 5 stalled"])):
        edit(folder, lambda run, reasons=reasons: run.update(validity="suspect", validity_reasons=reasons))
    why = "; suspect: steps 3 stalled (2 of 3 suspect runs have such a reason);"
    assert why in failed(*folders)["there are enough runs"]


def test_a_failed_audit_refuses_the_claim_and_a_passed_one_is_evidence(results):
    folders = three(results)
    name = f"cpu_nano/{folders[1].name}"

    def audit(outcome):
        entry = {"kind": "random_tokens", "outcome": outcome, "why": "its loss on random tokens is 2.1", "run": None}
        about = {"run": name, "config_id": "c", "source_sha256": None, "at": "", "claimed_nats": 2.75}
        atomic.write_json(folders[1] / certificates.AUDIT_FILE, about | {"outcome": outcome, "audits": [entry]})

    audit(certificates.FAILED)
    why = f"{name}: random tokens: its loss on random tokens is 2.1"
    assert failed(*folders) == {"the contestant was audited": why}
    audit(certificates.PASSED)
    assert failed(*folders) == {}


def test_runs_of_two_tracks_are_no_claim(results):
    other = results.add(5)
    edit(other, lambda run: run.update(track="free"))
    with pytest.raises(ValueError, match="records of cpu_nano, records of free cannot be judged together: name"):
        failed(*three(results), other)


# ---- races


@pytest.fixture
def won(results, monkeypatch):
    """The folder of a race in which B is 5 % faster than A."""
    return results.kept_race(monkeypatch)


@pytest.fixture
def lost(results, monkeypatch):
    """The folder of a race in which B is 5 % slower than A."""
    return results.kept_race(monkeypatch, pct=5)


def test_a_race_that_was_won_is_accepted_by_its_folder_its_id_its_arm_and_its_runs(results, won, printed):
    for arguments in ([won], [won.name], [f"{won.name}:B"], runs_of(results, won), [results.folder / "cpu_nano"]):
        assert failed(*arguments) == {}  # the last: a baseline is no part of a claim
    out = printed(judge, won)
    assert "% faster than A" in out and "; A is the default" in out


def test_a_claim_reads_its_ledger_once(results, won, monkeypatch):
    plain = three(results, source="77")
    paths, content = [], plain_file.content  # the store, by which ids are looked up, reads for itself
    counted = lambda path, *args, **options: paths.append(Path(path)) or content(path, *args, **options)  # noqa: E731
    monkeypatch.setattr(plain_file, "content", counted)
    for arguments in ([str(won)], [f"{won.name}:B"], plain):
        paths.clear()
        assert judge.main([str(argument) for argument in arguments]) == 0
        assert paths.count(results.folder / ledger.NAME) == 1


def test_a_race_with_an_unplanned_look_is_refused_whichever_way_it_is_named(results, monkeypatch):
    folder = results.race(monkeypatch, "n=3", "--show")
    for arguments in ([folder], runs_of(results, folder)):
        assert list(failed(*arguments)) == ["there was no unplanned look"]


def test_a_missing_run_is_refused(results, won):
    shutil.rmtree(runs_of(results, won)[0])
    evidence = failed(won)
    assert "missing: " in evidence["all claimed runs are present"]
    assert "it is faster than its baseline" in evidence


def test_a_run_of_the_plan_cannot_be_left_out_by_naming_the_others(results, won):
    ((_, claim),) = judging.claims_of([str(run) for run in runs_of(results, won)[:2]])
    assert len(claim.runs) == 3


def test_a_changed_plan_and_a_changed_verdict_are_refused(lost):
    path = lost / "race.json"
    path.write_text(path.read_text().replace('"slower"', '"faster"'))
    assert "it was changed" in failed(lost)["it is faster than its baseline"]
    race_plan = json.loads((lost / "plan.json").read_text())
    (lost / "plan.json").write_text(json.dumps(race_plan | {"alpha": 0.2}))
    with pytest.raises(ValueError, match="not the plan in the ledger"):
        failed(lost)


def test_a_verdict_that_was_false_from_the_beginning_is_computed_again(results, monkeypatch):
    result_of = runner.result_of

    def rosy(state):
        race_result = result_of(state)
        race_result["against"]["B"] |= {"verdict": "faster", "words": "much faster"}
        return race_result

    monkeypatch.setattr(runner, "result_of", rosy)
    evidence = failed(results.race(monkeypatch, pct=5))["it is faster than its baseline"]
    assert "race.json says much faster; the runs say B is" in evidence


@pytest.mark.parametrize(
    ("pcts", "is_faster"), [([0, -5], True), ([0, 0, -5], True), ([-5, 0], False), ([5, -5], False), ([0, 0], False)]
)
def test_an_inconclusive_race_costs_later_ones_alpha_and_no_other_verdict_is_forgiven(
    results, monkeypatch, pcts, is_faster
):
    """What was shown to be slower, and a faster race that an inconclusive one followed, are no record."""
    races = [results.race(monkeypatch, "n=3", pct=pct, luck=luck) for luck, pct in enumerate(pcts, 3)]
    won = json.loads((races[-1] / "race.json").read_text())["result"]["against"]["B"]
    assert won["earlier_weight"] < 1
    evidence = failed(*races)
    assert ("it is faster than its baseline" not in evidence) == is_faster, evidence
    if is_faster:
        assert not evidence and "no run was left out" in failed(races[-1])


def test_a_race_that_forgot_an_inconclusive_one_before_it_is_refused(results, monkeypatch):
    """The cheapest cheat: a harness that counts no earlier race, and so keeps all of alpha."""
    races = [results.race(monkeypatch, "n=3", pct=0)]
    with monkeypatch.context() as changed:
        changed.setattr(comparison, "earlier_than", lambda *args: None)
        races.append(results.race(monkeypatch, "n=3", pct=-5, luck=4))
    evidence = failed(*races)["it is faster than its baseline"]
    assert evidence.startswith(f"{races[1].name}: race.json keeps 100 % of alpha, of which the races before it left ")


def test_a_second_race_of_the_same_candidate_must_be_claimed_too(results, lost, monkeypatch):
    evidence = failed(results.race(monkeypatch))
    assert list(evidence) == ["no run was left out"] and f"in race {lost.name}" in evidence["no run was left out"]


def test_a_config_that_was_raced_against_elsewhere_is_no_dropped_run(results, won, monkeypatch):
    arms = claimed.Racers(results, lambda arm, seed: 9 + 0.01 * seed)
    arms.install(monkeypatch)
    assert race.main(["A=optim.beta2=0.99", "B=optim.beta2=0.9", "n=2"]) == 0
    assert failed(won) == {}


def test_an_interrupted_run_is_forgiven(results, monkeypatch):
    assert failed(results.race(monkeypatch, hurt={3: "interrupt"})) == {}


def test_more_interrupts_than_the_track_allows_are_refused(results, monkeypatch):
    folder = results.race(monkeypatch, hurt={3: "interrupt", 5: "kill", 8: "interrupt"})
    assert failed(folder) == {"few runs were interrupted": "3 interrupted, 2 allowed"}


# ---- claim folders


def claim_of(results, arguments, folder):
    assert judge.main([*map(str, arguments), "--claim", str(folder)]) == 0
    return folder


def test_a_claim_folder_is_judged_without_the_results_it_was_made_from(results, won, tmp_path):
    folder = claim_of(results, [won], tmp_path / "claim")
    names = sorted(path.name for path in runs_of(results, won))
    shutil.rmtree(results.folder)
    assert failed(folder) == {}
    assert yaml.safe_load((folder / "claim.yaml").read_text())["n"] == 3
    text = (folder / "README.md").read_text()
    replayed = replay._folders(replay._parser().parse_args([str(folder)]))
    assert sorted(path.name for path in replayed) == names  # neither the baseline nor the warm-ups
    assert text.count("| 2026") == 6 and "claimed, 3 runs: train_s 9.5" in text and "raced against, 3 runs" in text


def test_races_in_any_order_and_runs_outside_of_them_are_one_claim_with_a_folder(results, won, monkeypatch, tmp_path):
    """In the order of the races the README's table was found stale by the folder that held it."""
    second = results.race(monkeypatch)
    later = results.add(20, 9.5, overrides=["optim.beta2=0.99"])
    folder = claim_of(results, [second, later, won], tmp_path / "claim")
    shutil.rmtree(results.folder)
    assert failed(folder) == {}
    assert yaml.safe_load((folder / "claim.yaml").read_text())["n"] == 7


def test_of_runs_outside_the_claims_races_none_or_all_are_claimed(results, won):
    """A contestant makes runs until one was lucky, and claims it beside the race."""
    lucky, *others = (results.add(seed, 9.5, overrides=["optim.beta2=0.99"]) for seed in (20, 21, 22))
    assert failed(won) == failed(won, lucky, *others) == {}
    assert list(failed(won, lucky)) == ["no run was left out"]


def test_a_claim_of_one_of_three_arms_was_raced_against_the_baseline_alone(
    results, monkeypatch, tmp_path, printed, capsys
):
    arms = claimed.Racers(results, lambda arm, seed: {"A": 10, "B": 9, "C": 12}[arm] + 0.01 * seed)
    arms.install(monkeypatch)
    assert race.main(["A=", "B=optim.beta2=0.99", "C=optim.beta2=0.9", "n=3"]) == 0
    (folder,) = (results.folder / "races").iterdir()
    text = (claim_of(results, [f"{folder.name}:B"], tmp_path / "claim") / "README.md").read_text()
    heads = ["claimed, 3 runs: train_s 9.01", "raced against, A: the default, 3 runs: train_s 10.01"]
    heads.append("another arm of the race, C: optim.beta2=0.9, 3 runs: train_s 12.01")
    assert [line[: len(head)] for line, head in zip(re.findall(".*3 runs.*", text), heads, strict=True)] == heads
    assert "B is 9.99 % faster than A" in text
    capsys.readouterr()
    assert "C is 19.98 % slower than A" in printed(judge, f"{folder.name}:C", code=1)


def test_a_claims_time_is_the_mean_of_its_valid_runs_and_an_older_table_stays_true(results, tmp_path):
    def suspect(run):
        run["validity"], run["validity_reasons"] = "suspect", ["other programs used 0.90 CPU cores"]
        run["measured"]["foreign_cpu_cores"] = 0.9

    runs = [(seed, 10.0 + 10 * (seed == 3), 2.74 + 0.01 * seed) for seed in range(4)]
    folders = [results.add(*run, change={3: suspect}.get(run[0])) for run in runs]
    folder = claim_of(results, folders, tmp_path / "claim")
    path = folder / "README.md"
    assert "claimed, 4 runs: train_s 10.0000 s (sd 0.0000) of the 3 valid, val_loss" in path.read_text()
    assert failed(folder) == {}
    older = "train_s 12.5000 s (sd 5.0000), val_loss"
    path.write_text(path.read_text().replace("train_s 10.0000 s (sd 0.0000) of the 3 valid, val_loss", older))
    assert failed(folder) == {}


def test_an_author_may_write_around_the_table_and_not_into_it(results, tmp_path):
    folder = claim_of(results, three(results), tmp_path / "claim")
    path = folder / "README.md"
    path.write_text(path.read_text().replace("(to be written)", "shorter sleeps"))
    assert failed(folder) == {}
    path.write_text(path.read_text().replace("2.7400", "2.7300", 1))
    assert failed(folder) == {"the table matches the runs": "README.md's table is stale: it is not what the runs say"}
    path.write_text("# no table")
    assert failed(folder) == {"the table matches the runs": "README.md has no generated table"}


def test_a_claim_folder_without_its_claim_is_none(results, tmp_path):
    folder = claim_of(results, three(results), tmp_path / "claim")
    (folder / "claim.yaml").unlink()
    with pytest.raises(ValueError, match="claim.yaml is missing"):
        judge.main([str(folder)])


def test_a_claimed_number_that_is_not_the_number_of_runs_is_refused(results, tmp_path):
    folder = claim_of(results, [*three(results), results.add(3)], tmp_path / "claim")
    content = yaml.safe_load((folder / "claim.yaml").read_text())
    (folder / "claim.yaml").write_text(yaml.safe_dump(content | {"n": 20}))
    assert failed(folder) == {"all claimed runs are present": "20 claimed, 4 there"}


def test_a_run_taken_out_of_a_claim_folder_shows_in_its_ledger_even_with_the_number_mended(results, tmp_path):
    folder = claim_of(results, [*three(results), results.add(3, val_loss=2.9)], tmp_path / "claim")
    (lost,) = folder.glob("cpu_nano/*-s3-*")
    shutil.rmtree(lost)
    content = yaml.safe_load((folder / "claim.yaml").read_text())
    (folder / "claim.yaml").write_text(yaml.safe_dump(content | {"n": 3}))
    assert set(failed(folder)) == {"no run was left out", "the table matches the runs"}


def test_a_claim_is_not_written_over_something_else(results, tmp_path):
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="it is not empty"):
        judge.main([*map(str, three(results)), "--claim", str(tmp_path / "claim")])


# ---- the track's rules


def test_rules_are_data_that_a_run_cannot_change(results):
    with pytest.raises(ValueError, match="other rules are another file in conf/track/"):
        compose.compose(["track=cpu_nano", "track.rules.max_interrupted=9"])


def test_a_claim_folder_is_made_where_it_was_typed_also_of_a_refused_claim(results, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path / "mine"))
    assert judge.main([str(three(results)[0]), "--claim", "claim"]) == 1
    refused = "claim: made, although the claim is refused (there are enough runs, no run was left out): mend that"
    assert refused in capsys.readouterr().out
    assert (tmp_path / "mine" / "claim" / "claim.yaml").is_file()


def test_a_claim_on_a_track_that_is_not_here_names_the_folder_that_is_needed(results, tmp_path):
    folder = claim_of(results, three(results), tmp_path / "claim")
    for run in run_folder.find_runs([folder]):
        edit(run, lambda record: record.update(track="fewest"))
    text = (folder / "claim.yaml").read_text()
    (folder / "claim.yaml").write_text(text.replace("cpu_nano", "fewest"))
    with pytest.raises(ValueError, match="--config-dir DIR, their conf/ with track/fewest.yaml; choose from"):
        judge.main([str(folder)])
