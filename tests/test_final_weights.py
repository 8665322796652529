"""./run.sh audit --only weights: the loss of a run's final weights, from new processes that are given no targets."""

import json
import shutil
import sys

import pytest
import real_runs
from cases import slow

from bench.data.sources.source import data_root
from bench.machine import sandbox
from bench.plans.audit import auditing, final_weights
from bench.plans.replay import recorded
from bench.record import certificates, run_folder
from bench.record.certificates import DOUBTED, FAILED, NOT_POSSIBLE, PASSED
from bench.record.rows import row_of

LIARS = real_runs.REPO / "tests" / "planted" / "contestants" / "liars.py"
SMALL = ["track=free", "model.num_layers=2", "model.width=64", "model.num_heads=2", "goal.num_steps=40"]
SMALL += ["optim.lr=0.01", "goal.val_tokens=8192", "hardware.num_threads=1"]


def trained(folder, *overrides):
    """A run of tests/planted/contestants/liars.py, which lies in folder, as a user's own file would."""
    shutil.copyfile(LIARS, folder / "liars.py")
    overrides = [*SMALL, "checkpoint.save=true", *overrides]
    return real_runs.run(folder / "results", *overrides, SPEEDRUN_CWD=str(folder))


def audited(folder, run, code=0):
    """Audits the weights of a run as a user does.  Returns {"outcome", "why", ...}."""
    arguments = ["audit", str(run), "--only", "weights", "--json"]
    done = real_runs.bench(folder / "results", *arguments, SPEEDRUN_CWD=str(folder), code=code)
    (audit,) = json.loads(done.stdout)[0]["audits"]
    return audit


def test_a_validation_of_one_batch_has_a_mean_and_no_spread():
    assert final_weights._summary([2.5])["from_logits_nats"] == 2.5 and final_weights._summary([2.5])["sd_nats"] == 0.0
    assert final_weights._summary([])["from_logits_nats"] is None


@pytest.mark.parametrize(
    ("overrides", "bound_nats"),
    [
        (["model=gpt2"], 1e-6),
        slow(["model=windowed", "hardware.dtype=bfloat16"], 1e-3),
        slow(["model=modern", "optim=muon", "hardware.num_processes=2"], 1e-6),
    ],
)
def test_the_weights_of_an_honest_run_give_its_loss_and_no_later_token_moves_it(tmp_path, overrides, bound_nats):
    run = trained(tmp_path, *overrides)
    audit = audited(tmp_path, run)
    assert audit["outcome"] == PASSED, audit
    assert audit["nats"] == pytest.approx(real_runs.run_json(run)["metrics"]["val_loss"], abs=bound_nats)
    assert audit["moved_nats"] <= bound_nats


@pytest.mark.parametrize(
    ("name", "why"),
    [
        slow("ReadsTheStack", "but it claims"),
        slow("LooksAheadUnlessExamined", "it sees what it must predict"),
        slow("OwnTensors", "but it claims"),
        slow("ReplacesTheLoader", "but it claims"),
        slow("LowersWhatIsWritten", "but it claims"),
    ],
)
def test_what_lies_in_the_referees_process_is_found_where_its_record_has_nothing_against_it(tmp_path, name, why):
    run = trained(tmp_path, "model=gpt2", f"model.arch=liars.py:{name}")
    record = run_folder.read(run)
    assert set(record["validity_reasons"]) <= set(row_of(record)["machine_doubts"])
    audit = audited(tmp_path, run, code=1)
    assert audit["outcome"] == FAILED and why in audit["why"], audit


def test_without_weights_or_with_others_there_is_nothing_to_pass(tmp_path):
    run = trained(tmp_path, "model=gpt2", "goal.num_steps=2")
    with open(run / run_folder.WEIGHTS, "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    assert "is not the file that the run wrote" in audited(tmp_path, run, code=1)["why"]
    (run / run_folder.WEIGHTS).unlink()
    audit = audited(tmp_path, run, code=2)
    assert audit["outcome"] == NOT_POSSIBLE and "checkpoint.save=true" in audit["why"]
    assert certificates.read_audit(run)["outcome"] == NOT_POSSIBLE


# ---- the two processes


SPY = """
import os

from models.gpt2 import GPT2

class Spy(GPT2):
    def logits(self, tokens_BT):
        missing = [name for name in {names} if not os.path.exists(name)]
        if missing:
            raise ValueError(f"it cannot see {{len(missing)}} of 3")
        return super().logits(tokens_BT)
"""


@pytest.mark.slow
def test_the_processes_see_neither_data_nor_results_nor_the_users_folder(tmp_path):
    (tmp_path / "results" / "another").mkdir(parents=True)
    names = [str(data_root()), str(tmp_path / "results" / "another"), str(tmp_path / "spy.py")]
    (tmp_path / "spy.py").write_text(SPY.format(names=names))
    run = trained(tmp_path, "model=gpt2", "model.arch=spy.py:Spy", "goal.num_steps=2")
    audit = audited(tmp_path, run)
    assert audit["outcome"] == DOUBTED and "ValueError: it cannot see 3 of 3" in audit["why"]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('gone')", "could not be evaluated from its weights: gone"),
        slow("print('0' * 64)", "it wrote 65 bytes"),
        slow("import time; time.sleep(60)", "it took more than 0 s"),
    ],
)
def test_a_process_that_ends_answers_something_else_or_hangs_gives_no_logits(tmp_path, monkeypatch, program, why):
    record = recorded.read(trained(tmp_path, "model=gpt2", "goal.num_steps=2"))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    monkeypatch.setattr(final_weights, "LEAST_S", 0.5 if "sleep" in program else 20.0)
    monkeypatch.setattr(final_weights, "TIMES", 0.0)
    job = auditing.job_of(record, lambda *said: None)
    monkeypatch.setattr(sandbox, "command", lambda argv, env, *rest, **named: ([sys.executable, "-c", program], env))
    verdict = final_weights.verdict(record.folder, record.run, job)
    assert verdict["outcome"] == DOUBTED and why in verdict["why"]
