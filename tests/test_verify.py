"""verify: each rule passes on a true record and fails on one that was touched."""

import shutil

import pytest
from comparing import COMPLETE, FAILED, RECORDS
from kept_records import changed

from bench.base import atomic
from bench.cli import verify
from bench.config import identity, schema
from bench.record import run_folder, step_files, validity, verification
from bench.record.verification import RunFiles


@pytest.fixture
def folder(tmp_path):
    """A true record, its config_id that of today's settings (a kept one's may be that of settings as they were)."""
    run = run_folder.read_raw(COMPLETE)
    config_id = identity.config_id(schema.read(COMPLETE))
    run["run_id"] = run["run_id"].replace(run["config_id"], config_id)
    run["config_id"] = config_id
    folder = shutil.copytree(COMPLETE, tmp_path / run["run_id"])
    atomic.write_json(folder / "run.json", run)
    return folder


def edit(folder, **changes):
    atomic.write_json(folder / "run.json", changed(run_folder.read_raw(folder), **changes))


def listed_again(folder):
    """Updates the files' hashes as a forger would, so that only the content can betray the change."""
    edit(folder, artifacts=run_folder.listed(folder))


def with_its_metrics(folder):
    """Derives the metrics again as a forger would, so that only the facts can betray the change."""
    edit(folder, metrics=verification.metrics(run_folder.read_raw(folder), step_files.read(folder)))


def replace_in(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def failed_rules(folder):
    return {rule["rule"]: rule["evidence"] for rule in verification.report(folder)["rules"] if not rule["passed"]}


def test_a_true_record_passes_every_rule(folder, printed):
    lines = printed(verify, folder).splitlines()
    num_rules = len(verification.RULES + verification.RULES_OF_A_COMPLETE_RUN)
    assert lines[0] == f"  verify  {folder.name}: all {num_rules} rules passed"
    assert all(line.startswith("    pass  ") for line in lines[1:])


@pytest.mark.parametrize("kept", sorted(RECORDS.iterdir()), ids=lambda path: path.name)
def test_a_kept_record_stays_true_but_for_what_newer_settings_add_to_its_config_id(kept):
    wrong = set(failed_rules(kept)) - {"config id is that of the config"}
    assert wrong == (set() if run_folder.read(kept)["status"] == "complete" else {"is complete"})


def test_one_changed_byte_in_steps_csv_is_found(folder, printed):
    path = folder / "steps.csv"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    first, failed, *_ = printed(verify, folder, code=1).splitlines()  # a rule that failed stands first
    assert " rules failed" in first and failed == "    FAIL  artifacts are unchanged: steps.csv has another sha256"


def test_a_file_of_another_size_a_missing_one_and_one_outside_are_found(folder):
    (folder / "overrides.yaml").write_text("")
    (folder / "environment.json").unlink()
    run = run_folder.read_raw(folder)
    edit(folder, artifacts=[*run["artifacts"], run["artifacts"][0] | {"path": "../other/steps.csv"}])
    assert failed_rules(folder) == {
        "artifacts are unchanged": "environment.json is missing; overrides.yaml has 0 bytes instead of 9; "
        "../other/steps.csv lies outside the folder"
    }


def test_a_clone_lacks_the_logs_as_a_whole_and_still_passes(folder):
    shutil.rmtree(folder / "logs")
    (rule,) = [rule for rule in verification.report(folder)["rules"] if rule["rule"] == "artifacts are unchanged"]
    assert (rule["passed"], rule["evidence"]) == (True, "7 files; not here, as in a clone: logs")


def test_one_log_missing_among_others_is_found(folder):
    (folder / "logs" / "rank1.log").write_text("")
    listed_again(folder)
    assert failed_rules(folder) == {}
    (folder / "logs" / "rank1.log").unlink()
    assert failed_rules(folder) == {"artifacts are unchanged": "logs/rank1.log is missing"}


def test_a_link_that_a_dashboard_makes_among_its_own_files_is_no_fault(folder):
    (folder / "dashboards/wandb/offline-run-1").mkdir(parents=True)
    (folder / "dashboards/wandb/latest-run").symlink_to("offline-run-1")
    assert verification.report(folder)["passed"]


def test_an_unrecorded_file_is_found(folder):
    (folder / "code" / "patch.py").write_text("")
    assert failed_rules(folder) == {"nothing is unrecorded": "code/patch.py is not listed"}


@pytest.mark.parametrize(
    ("file", "old", "new", "rule", "evidence"),
    [
        ("config.yaml", "lr: 0.003", "lr: 0.004", "config id is that of the config", ""),
        ("config.yaml", "seed: 0", "seed: 5", "names agree", "seed: 5, but the record says 0"),  # no part of config_id
        ("config.yaml", "name: gpt2-adamw", "name: fast", "names agree", "name: 'fast'"),
        ("environment.json", '"3.12.8"', '"3.12.9"', "names agree", "environment.json: another python"),
        ("steps.csv", ",2048,", ",2047,", "tokens are counted", "wrong at steps [2]"),
        ("steps.csv", ",4.5,", ",nan,", "losses are finite", "not finite at steps [2]"),
    ],
)
def test_a_change_is_found_although_the_files_are_listed_again(folder, file, old, new, rule, evidence):
    replace_in(folder / file, old, new)
    listed_again(folder)
    failed = failed_rules(folder)
    assert list(failed) == [rule] and evidence in failed[rule]


def test_environment_json_has_every_gpu_of_the_machine_and_the_record_those_of_the_run(folder):
    env, gpus = atomic.read_json(folder / "environment.json"), [{"name": "H100", "uuid_hash": of} for of in "abc"]
    atomic.write_json(folder / "environment.json", env | {"gpus": [gpu | {"visible": None} for gpu in gpus[:2]]})
    listed_again(folder)
    for gpu, evidence in zip(gpus, ("", "", "environment.json: another gpus"), strict=True):
        edit(folder, environment__gpus=[gpu | {"name": "H100 MIG"}])
        assert failed_rules(folder).get("names agree", "") == evidence
    atomic.write_json(folder / "environment.json", env | {"gpus": []})  # as of a machine without a GPU
    listed_again(folder)
    edit(folder, environment__gpus=gpus[:1])
    assert failed_rules(folder)["names agree"] == "environment.json: another gpus"


def test_a_renamed_folder_is_found(folder):
    assert set(failed_rules(folder.rename(folder.parent / "best-run"))) == {"names agree"}


def test_a_record_that_breaks_the_schema_is_found(folder):
    edit(folder, seed="zero", data__train=None)
    evidence = failed_rules(folder)["follows the schema"]
    assert "$.seed: 'zero' is not of type 'integer'" in evidence
    assert "$.data.train" in evidence


@pytest.mark.parametrize(
    ("status", "evidence"), [("running", "status aborted, launcher_killed"), ("failed", "status failed, x")]
)
def test_a_run_that_is_not_complete_fails(folder, status, evidence):
    failure = {"kind": "x", "rank": None, "step": None, "signal": None, "exit_code": None, "message": "", "hint": ""}
    edit(
        folder, status=status, failure=failure if status == "failed" else None, heartbeat_at="2020-01-01T00:00:00.000Z"
    )
    assert failed_rules(folder)["is complete"] == evidence


@pytest.mark.parametrize(
    "change, evidence",
    [(lambda lines: lines[:2] + lines[3:], "lacking [1]"), (lambda lines: [*lines, lines[-1]], "repeated")],
)
def test_a_step_that_is_missing_or_there_twice_is_found(folder, change, evidence):
    path = folder / "steps.csv"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    listed_again(folder)
    assert evidence in failed_rules(folder)["steps are without gaps"]


def test_a_better_loss_in_the_record_alone_is_found(folder):
    edit(folder, metrics__val_loss=4.2499999)
    assert failed_rules(folder) == {"metrics follow from the facts": "val_loss: 4.25, recorded 4.2499999"}


def test_a_rounding_error_of_one_in_ten_to_the_ten_is_none(folder):
    edit(folder, metrics__tokens_per_s=3072 / 0.16 * (1 + 1e-10))
    assert failed_rules(folder) == {}
    edit(folder, metrics__tokens_per_s=4096 / 0.22 * (1 + 1e-8))
    assert list(failed_rules(folder)) == ["metrics follow from the facts"]


def test_a_missing_and_an_invented_metric_are_found(folder):
    metrics = run_folder.read_raw(folder)["metrics"]
    del metrics["target_reached"]
    edit(folder, metrics=metrics | {"speedup": 2.0})
    evidence = failed_rules(folder)["metrics follow from the facts"]
    assert "target_reached: True, recorded None" in evidence
    assert "speedup: None, recorded 2.0" in evidence


@pytest.mark.parametrize(("status", "failing"), [("aborted", False), ("complete", True)])
def test_only_a_run_that_did_not_complete_may_have_no_metrics(folder, status, failing):
    edit(folder, status=status, metrics={})
    assert ("metrics follow from the facts" in failed_rules(folder)) == failing


def test_a_clock_that_ran_too_slowly_is_found(folder):
    """The steps add up to 218 ms; train_s of 0.2 s allows 210."""
    edit(folder, measured__train_s_by_rank=[0.2, 0.2])
    with_its_metrics(folder)
    assert failed_rules(folder) == {"steps fit into the time": "they add up to 0.2180 s, the limit is 0.2100 s"}


def two_ranks_take_turns(folder, step_ms=(0.5, 9.5)):
    """At odd steps rank 0 is the slower one, at even steps rank 1, as on a busy machine."""
    rows = step_files.read(folder)
    ms_by_rank = [{row["step"]: step_ms[(row["step"] + rank) % 2] for row in rows[1:]} for rank in range(2)]
    for row in rows[1:]:
        row["step_ms"] = max(rank_ms[row["step"]] for rank_ms in ms_by_rank)
    step_files.write(folder, rows)
    step_files.write_by_rank(folder, {"step_ms": ms_by_rank})
    train_s = 1.001 * max(sum(rank_ms.values()) for rank_ms in ms_by_rank) / 1e3
    edit(folder, measured__train_s_by_rank=[train_s, train_s])
    with_its_metrics(folder)
    return verification.steps_fit_into_the_time(RunFiles(folder), run_folder.read_raw(folder))


def test_each_ranks_steps_fit_into_its_time_and_a_step_is_as_long_as_its_slowest_rank(folder):
    def checked():
        return verification.steps_fit_into_the_time(RunFiles(folder), run_folder.read_raw(folder))

    assert two_ranks_take_turns(folder) == (True, "on each of 2 ranks")
    by_rank, rows = step_files.read_by_rank(folder)["step_ms"], step_files.read(folder)
    rows[3]["step_ms"] -= 1.0
    step_files.write(folder, rows)
    assert checked() == (False, "not the slowest rank's at steps [3]")
    by_rank[1] = {step: 2 * step_ms for step, step_ms in by_rank[1].items()}
    step_files.write_by_rank(folder, {"step_ms": by_rank})
    passed, evidence = checked()
    assert not passed and evidence.startswith("those of rank 1 add up to")


def test_a_run_that_ended_before_its_first_step_needs_no_steps(folder):
    (folder / "steps.csv").unlink()
    run = run_folder.read_raw(folder)
    run["artifacts"] = [artifact for artifact in run["artifacts"] if artifact["path"] != "steps.csv"]
    passed, evidence = verification.nothing_is_unrecorded(RunFiles(folder), run)
    assert not passed and "steps.csv is not listed" in evidence
    assert verification.nothing_is_unrecorded(RunFiles(folder), run | {"status": "aborted"})[0]


def test_a_training_longer_than_its_run_is_found(folder):
    edit(folder, measured__wall_s=0.26)  # 0.22 of training + 0.05 of validation
    with_its_metrics(folder)
    assert list(failed_rules(folder)) == ["times fit into the wall time"]


def test_a_run_that_was_stopped_early_is_found(folder):
    lines = (folder / "steps.csv").read_text().splitlines(keepends=True)
    (folder / "steps.csv").write_text("".join(lines[:4]))  # steps 0 to 2, with a validation at 2
    with_its_metrics(folder)
    listed_again(folder)
    assert failed_rules(folder) == {"steps are those of the goal": "2 of 4"}


@pytest.mark.parametrize(
    ("device", "cores", "why"),
    [
        ("cpu", 0.1, []),
        ("cpu", 0.12, ["other programs used 0.12 CPU cores during the run (limit 0.1)"]),
        ("cpu", None, ["how busy other programs kept the CPU is unknown: the system does not say"]),
        ("cuda", None, []),
        ("cuda", 0.25, []),
    ],
)
def test_a_run_beside_other_programs_on_its_cpu_or_who_knows_what_is_suspect(folder, device, cores, why):
    run = run_folder.read(folder)
    run["hardware"] |= {"device": device}
    run["measured"] |= {"foreign_cpu_cores": cores}
    assert validity.validity(run | {"doubts": []}) == ("suspect" if why else "valid", why)
    run["foreign_programs"] = [{"name": "burner", "cpu_cores": 0.11}]
    named = [f"{reason}: burner 0.11" if cores else reason for reason in why]
    assert validity.validity(run | {"doubts": []})[1] == named


def test_a_loss_below_the_floor_that_is_called_valid_is_found(folder):
    """Slack for 2,048 tokens is far below the 4 nats by which this loss undercuts its floor."""
    edit(folder, data__floor_nats=8.25)
    with_its_metrics(folder)
    evidence = failed_rules(folder)["validity is honest"]
    assert "recorded valid, ruled invalid" in evidence
    assert "below the data's floor" in evidence
    edit(folder, validity="invalid", validity_reasons=["val_loss is below the floor"])
    assert failed_rules(folder) == {}


def test_a_record_with_holes_fails_rules_and_ends_none_of_them(folder):
    (folder / "config.yaml").unlink()
    (folder / "steps.csv").unlink()
    rules = verification.report(folder)["rules"]
    assert len(rules) == len(verification.RULES + verification.RULES_OF_A_COMPLETE_RUN)
    assert any("cannot be checked: Missing" in rule["evidence"] for rule in rules)


def test_json_lists_every_run_with_its_rules(folder, answer_of):
    shutil.copytree(FAILED, folder.parent / FAILED.name)
    true, failed = answer_of(verify, folder.parent, code=1)
    assert (true["run_id"], true["passed"]) == (folder.name, True)
    assert (failed["run_id"], failed["passed"]) == (FAILED.name, False)
    assert set(true["rules"][0]) == {"rule", "passed", "evidence"}


def test_what_is_no_record_is_wrong_use(tmp_path, folder, capsys):
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), "no-such-run"):
        assert verify.main([name]) == 2
        assert name in capsys.readouterr().err
    (folder / "run.json").write_text("{")
    assert verify.main([str(folder)]) == 2
    assert "is not valid JSON" in capsys.readouterr().err


def test_what_is_made_of_a_record_afterwards_is_no_part_of_it(folder):
    (folder / "plots").mkdir()
    for name in ("report.html", "analysis.json", "plots/loss.png"):
        (folder / name).write_text("made again at will")
    assert failed_rules(folder) == {}
    (folder / "notes.txt").write_text("mine")
    assert failed_rules(folder) == {"nothing is unrecorded": "notes.txt is not listed"}
