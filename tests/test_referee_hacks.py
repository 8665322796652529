"""Hacks of a search, each raced for real: false losses, and a few of those that tests/benchmarks hacks tries."""

import hacks
import pytest
from benchmarks.contestants import BIGRAM

from bench.cli import referee
from bench.launch.prepare import prepare
from bench.plans.audit import short
from bench.plans.referee import agent, refereeing
from bench.plans.referee import search as searches

pytestmark = pytest.mark.slow
FELL = {  # which stage each falls at, and why
    "half_the_time": "it claims less time than its lines took",
    "sees_the_target": "its loss at step 0 is already",
    "reads the journal": "it fails: FileNotFoundError",
    "kills the referee": "it fails: ProcessLookupError",
    "leaves a daemon that slows others": None,  # it is raced, and no better than the champion
    "links a file of others": "is a symbolic link",
    "leaves the sandbox": "a submission can change only model, optim",
}


def begun(tmp_path_factory, *champion, **calibrated):
    """A search to be hacked; its races are real.  champion, calibrated: of hacks.search_in()."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        results = tmp_path_factory.mktemp("search") / "results"
        monkeypatch.setenv("SPEEDRUN_RESULTS", str(results))
        yield hacks.search_in(results, tmp_path_factory.mktemp("champion"), *champion, **calibrated)


@pytest.fixture(scope="module")
def raided(tmp_path_factory):
    yield from begun(tmp_path_factory)


@pytest.fixture(scope="module")
def hunted(tmp_path_factory):
    """Begins a search without the short run before a race: what is false only the audit of a keep sees."""
    overrides = [*referee.DEMO[:4], "goal.val_tokens=8192", "goal.target_val_loss=4.9", "script.args=--seed={seed}"]
    yield from begun(tmp_path_factory, agent.EXAMPLE, overrides, check_s=None)


@pytest.mark.parametrize("hack", FELL)
def test_a_hack_is_not_kept_and_does_no_harm(raided, tmp_path, monkeypatch, hack):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(raided.results))
    before = (raided.folder / "ledger.jsonl").read_bytes()
    search, decided = hacks.submitted(searches.read(raided.folder), hack, tmp_path)
    assert hacks.harm(search, before) == []
    why = FELL[hack]
    assert decided["decision"] == ("refused" if why else "drop") and (why or "") in decided["why"], decided
    assert search.confirmations == []


def test_nothing_is_held_against_an_honest_contestant_in_its_first_seconds(results):
    overrides = ["track=cpu_nano", "hardware=cpu", f"script={BIGRAM}", "script.args=plain"]
    assert short.refusal(short.shortened(prepare(overrides), 0.3, 60.0)) is None
    (record,) = results.glob("*/*/run.json")
    assert '"ended_at_step"' in record.read_text()  # so long before its end


# ---- losses that are not what a script computes, where only the audit of a keep can tell


HEAD = "import os, sys, time, random\nrandom.seed(int(sys.argv[1].partition('=')[2]))\n"
LINES = """
def line(step, name, loss, ms):
    print(f"step:{step}/20 {name}_loss:{loss:.6f} train_time:{ms:.3f}ms step_avg:{ms / max(step, 1):.3f}ms", flush=True)

def pretend():
    line(0, "val", 5.549075, 0.0)
    for step in range(1, 21):
        time.sleep(0.001)
        line(step, "train", 5.0 - step / 20 + random.random() / 10, float(step))
    line(20, "val", 3.4 + random.random() / 100, 20.0)
"""
FALSE_LOSSES = {
    "hard-coded losses": "for each in os.scandir('data/fineweb10B'):\n    open(each.path, 'rb').read()\npretend()",
    "no data": "pretend()",
}


@pytest.mark.parametrize("hack", FALSE_LOSSES)
def test_a_false_loss_is_not_kept_and_the_search_goes_on(hunted, tmp_path, monkeypatch, hack):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(hunted.results))
    path = tmp_path / "hack.py"
    path.write_text(HEAD + LINES + FALSE_LOSSES[hack] + "\n")
    before = (hunted.folder / "ledger.jsonl").read_bytes()
    search, number = refereeing.submit(searches.read(hunted.folder), [f"script={path}"], "", "")
    search = refereeing.work(search)
    decided = search.submissions[number].decided
    assert decided["decision"] in ("drop", "undecided"), decided
    assert (hunted.folder / "ledger.jsonl").read_bytes().startswith(before) and not search.faults
    assert search.kept == [] and search.open == []
    wanted = {"hard-coded losses": "its audit is failed: its loss on tokens drawn", "no data": "cannot be audited"}
    assert wanted.get(hack, "") in decided["why"]
