"""./run.sh audit: scripts and models made again on random and held-out tokens; cheats are found, honest ones not."""

import base64
import json
import math
import re
import shutil
import signal
import zlib
from types import SimpleNamespace
from unittest import mock

import claimed
import numpy as np
import pytest
import real_runs
import scripted
from benchmarks import leaks
from cases import slow

from bench.base import atomic, stats
from bench.base.paths import variables
from bench.claims.rules import records
from bench.data import shards
from bench.data.sources.datasets import Dataset, ShardFile
from bench.plans.audit import auditing, counterfactual
from bench.plans.audit.counterfactual import NotPossible
from bench.record import certificates, failures, ledger, run_folder, validity, verification
from bench.record.certificates import DOUBTED, FAILED, PASSED

BIGRAM = scripted.SCRIPTS.parent / "contestants" / "bigram.py"
CHEATS = scripted.SCRIPTS / "cheats" / "train.py"
NANO = ["script.raw_data=true", "script.data=data/toy", "script.args=['--seed={seed}','--max_iters=20']"]


def audited(results, folder, *options, code=0):
    """Runs ./run.sh audit on a run -> {kind: its audit}."""
    done = real_runs.bench(results, "audit", str(folder), "--json", *options, code=code)
    (certificate,) = json.loads(done.stdout)
    assert certificates.read_audit(folder) == certificate
    return {audit["kind"]: audit for audit in certificate["audits"]}


def cheat(results, what, script=CHEATS):
    return scripted.run(results, script, f"script.args=[{what}]")


# ---- honest ones


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "overrides"),
    [(CHEATS, ["script.args=[honest]"]), (scripted.MODDED, []), (scripted.NANO, NANO)],
    ids=["counting", "modded", "nano"],
)
def test_an_honest_script_passes_and_no_audit_run_counts(tmp_path, script, overrides):
    folder = scripted.run(tmp_path, script, *overrides)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    audits = audited(tmp_path, folder)
    assert {kind: audit["outcome"] for kind, audit in audits.items()} == dict.fromkeys(counterfactual.KINDS, PASSED)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert real_runs.folders(tmp_path) == [folder] == list(run_folder.find_runs([tmp_path]))
    for audit in audits.values():
        run = run_folder.read(tmp_path / certificates.AUDITS_FOLDER / audit["run"])
        assert run["validity"] == "invalid" and "not a measurement" in run["validity_reasons"][0]
        assert run["audit"]["kind"] == audit["kind"]
    assert verification.report(folder)["passed"]
    unnoticed_nats = min(audits[kind]["unnoticed_nats"] for kind in ("random_tokens", "few_tokens"))
    remark = f"(a loss lowered by less than {unnoticed_nats:.4f} nats would not have been noticed)"
    assert _judged(folder) == (True, f"{folder.name} passed {remark}")
    with open(tmp_path / certificates.AUDITS_FOLDER / audits["held_out"]["run"] / "run.json", "a") as file:
        file.write(" ")  # no longer the one in the ledger of the audits
    assert _judged(folder)[0] is False


def _judged(folder):
    """Applies judge's rule to a claim of this run alone, on a track that fixes the data -> (passed, evidence)."""
    run = SimpleNamespace(name=folder.name, folder=folder, record=run_folder.read(folder))
    rules, book = SimpleNamespace(fixed=["data", "goal"]), ledger.read(folder.parent.parent)
    with variables({"SPEEDRUN_RESULTS": str(folder.parent.parent)}):
        return records.the_contestant_was_audited(SimpleNamespace(runs=[run], track_rules=rules, ledger=book))


def test_a_claim_of_a_script_needs_an_audit_made_here(tmp_path):
    folder = scripted.run(tmp_path, CHEATS, "script.args=[honest]")
    passed, evidence = _judged(folder)
    assert not passed and "was not audited on this machine: ./run.sh audit" in evidence
    run = run_folder.read(folder)
    audit = {"kind": "random_tokens", "outcome": PASSED, "why": "", "run": "cpu_nano/20261123T000000Z-never-ran"}
    about = {"run": folder.name, "config_id": run["config_id"], "source_sha256": run["code"]["source_sha256"]}
    audited = about | {"at": "", "claimed_nats": 3.0, "outcome": PASSED, "audits": [audit]}
    atomic.write_json(folder / certificates.AUDIT_FILE, audited)
    passed, evidence = _judged(folder)
    assert not passed and "passed according to the claimant" in evidence


def test_a_claim_of_a_class_of_ones_own_needs_an_audit_too(tmp_path):
    """It may keep weights from run to run where nothing of ours looks, which an audit shows."""
    folder = tmp_path / "results" / "cpu_nano" / "a"
    for arch, needs in (("gpt2", False), ("net.py:Net", True)):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"model:\n  arch: {arch}\n")
        record = {"script": None, "track": "cpu_nano", "config_id": "a", "code": {"source_sha256": "a"}}
        record |= {"referee": {"loss": 1}, "data": {"val": []}, "goal": {"val_tokens": 1}, "seed": 0}
        run = SimpleNamespace(name="cpu_nano/a", folder=folder, record=record)
        rules, book = SimpleNamespace(fixed=["data"]), ledger.read(tmp_path / "results")
        passed, why = records.the_contestant_was_audited(SimpleNamespace(runs=[run], track_rules=rules, ledger=book))
        expected = "the code of its own was not audited on this machine: ./run.sh audit cpu_nano/a"
        assert (passed, why) == ((False, expected) if needs else (None, why)) and (
            "random and held-out" in why
        ) != needs
        shutil.rmtree(folder)


def test_a_record_from_elsewhere_that_names_code_is_audited_only_if_it_is_trusted(tmp_path, monkeypatch):
    """The import itself would run the code, before anything is compared."""
    record = SimpleNamespace(folder=tmp_path / "a", run={"track": "cpu_nano", "run_id": "a", "script": {}})
    monkeypatch.setattr(auditing.recorded, "read", lambda folder: record)
    monkeypatch.setattr(auditing, "refuse", lambda *args, **options: None)
    monkeypatch.setattr(auditing, "job_of", mock.Mock(side_effect=ValueError("imported")))
    monkeypatch.setattr(auditing.rebuilding, "names_code", lambda record: True)
    monkeypatch.setattr(auditing.rebuilding, "refuse_interpolations", lambda record: None)
    calls = (
        lambda *trust: auditing.audit(tmp_path, (), print, *trust),
        lambda *t: auditing.audit_clock(tmp_path, print, *t),
    )
    for is_ours, trust, message in (
        (True, (), "imported"),
        (False, (True,), "imported"),
        (False, (), "read that code, "),
    ):
        monkeypatch.setattr(auditing.rebuilding, "is_ours_by_ledger", lambda record, ours=is_ours: ours)
        for call in calls:
            with pytest.raises(ValueError, match=message):
                record.run["script"] = {"path": "x"}
                call(*trust)


@pytest.mark.slow
def test_an_own_model_passes(tmp_path):
    folder = real_runs.run(tmp_path, "goal.num_steps=30", "goal.val_tokens=8192", "optim.lr=0.01")
    done = real_runs.bench(tmp_path, "audit", folder.name, code=0)
    assert done.stdout.count("PASSED") == 5
    assert re.search(r"PASSED \(a loss lowered by less than 0\.0\d+ nats would not have been noticed\)", done.stdout)


# ---- cheats


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        slow("lowered", "few_tokens"),
        slow("on_validation", "random_training"),
        slow("scaled", "few_tokens"),
        slow("constants", "random_tokens"),
        slow("peeks", "random_tokens"),
        slow("short", "random_training"),
    ],
)
def test_a_planted_cheat_fails(tmp_path, what, kind):
    audits = audited(tmp_path, cheat(tmp_path, what), "--only", kind, code=1)
    assert audits[kind]["outcome"] == FAILED and audits[kind]["nats"] < audits[kind]["least_nats"]
    assert f"{audits[kind]['least_nats']:.4f}" in audits[kind]["why"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lowers_gradually", "lowers_a_little"])
def test_a_last_loss_that_is_lowered_by_a_little_fails(tmp_path, variant):
    """By 0.3 and 0.05 nats of 3.7: its model of bigrams, trained on uniform tokens, stays within 0.01 of ln V."""
    folder = scripted.run(tmp_path, BIGRAM, f"script.args=[{variant}]")
    audit = audited(tmp_path, folder, "--only", "random_tokens", code=1)["random_tokens"]
    assert audit["outcome"] == FAILED and audit["least_nats"] > audit["nats"] == pytest.approx(5.55, abs=0.32)


def test_an_honest_script_passes_and_hardly_a_lie_of_it_would(tmp_path):
    folder = scripted.run(tmp_path, BIGRAM, "script.args=[plain]")
    audit = audited(tmp_path, folder, "--only", "random_tokens")["random_tokens"]
    assert audit["outcome"] == PASSED
    assert 0.0134 < audit["unnoticed_nats"] < 0.03  # 13.8 / 1,024, and what the noise of its steps adds
    assert certificates.read_audit(folder)["unnoticed_nats"] == audit["unnoticed_nats"]


@pytest.mark.slow
def test_weights_of_the_validation_that_a_script_carries_in_itself_fail(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    shutil.copyfile(CHEATS, home / "train.py")
    honest = cheat(tmp_path, "honest")
    (name,) = [shard["file"] for shard in run_folder.read(honest)["data"]["val"]]
    tokens = shards.check(auditing.data_root() / name).tokens()[:32769].astype(np.int64)
    pairs = np.zeros((512, 512), np.uint16)
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    (home / "known.json").write_text(json.dumps(base64.b64encode(zlib.compress(pairs.tobytes())).decode()))
    folder = cheat(tmp_path, "knows", home / "train.py")
    doubts = [doubt["doubt"] for doubt in real_runs.run_json(folder)["doubts"]]
    assert any("its loss at step 0 is already" in doubt for doubt in doubts)
    assert audited(tmp_path, folder, "--only", "random_training", code=1)["random_training"]["outcome"] == FAILED


def test_eight_steps_before_the_clock_are_doubted(tmp_path):
    doubts = [doubt["doubt"] for doubt in real_runs.run_json(cheat(tmp_path, "before"))["doubts"]]
    assert any("its loss at step 0 is already" in doubt and "0.95 * ln(257) = 5.272" in doubt for doubt in doubts)


# ---- what cannot be audited


def test_a_script_with_data_of_its_own_cannot_be_audited(tmp_path):
    (tmp_path / "mine.bin").write_bytes(bytes(4096))
    overrides = [f"script.args=[own_data,{tmp_path}/mine.bin]", "track=free"]
    folder = scripted.run(tmp_path, scripted.ODD, *overrides)
    done = real_runs.bench(tmp_path, "audit", str(folder))
    assert done.returncode == 2 and "it brings its own data" in done.stdout
    assert certificates.read_audit(folder) is None


def test_other_sources_than_the_records_are_refused(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    shutil.copyfile(CHEATS, home / "train.py")
    folder = cheat(tmp_path, "honest", home / "train.py")
    with open(home / "train.py", "a") as file:
        file.write("# changed\n")
    done = real_runs.bench(tmp_path, "audit", str(folder))
    assert done.returncode == 2 and "the sources here differ from the record's" in done.stdout


AUDITED = {"seed": 1, "vocab_size": 257, "val_tokens": 32768}
OF_KIND = {  # {kind: (facts of its data, a loss that passes)}
    "random_tokens": ({"num_alphabet": 257, "eos_frac": 0.0}, 5.6),
    "few_tokens": ({"num_alphabet": 8, "eos_frac": 0.0}, 2.75),
    "random_training": ({"easy_token": 1, "num_easy": 512}, 5.6),
    "held_out": ({"harder_nats": 0.0, "sd_of_blocks_nats": 0.1}, 2.8),
}


@pytest.mark.parametrize(
    ("what", "is_passed"),
    [
        ("each kind", True),
        ("each kind, and one that shows the opposite", False),
        ("each kind, and one whose folder is gone", False),
        ("each kind, and one that was interrupted", True),
        ("one kind alone", False),
        ("another contestant's", False),
        ("another seed's", False),
        ("all but one", False),
        ("none", False),
    ],
)
def test_a_contestant_has_passed_by_audit_runs_of_this_machine_and_by_no_file_beside_its_record(
    tmp_path, what, is_passed
):
    run = run_folder.read(claimed.Results(tmp_path).add(train_s=10.0))
    audits = claimed.Results(tmp_path / certificates.AUDITS_FOLDER)
    source = "42" if what == "another contestant's" else "41"

    def add(kind, loss, status="complete"):
        facts = AUDITED | OF_KIND[kind][0] | {"run": "", "kind": kind}
        change = lambda record: record.update(audit=facts)  # noqa: E731
        losses, seed = {0: loss, claimed.NUM_STEPS: loss}, 7 * (what == "another seed's")
        return audits.add(seed, source=source, change=change, losses=losses, status=status)

    kinds = {"none": (), "one kind alone": ("held_out",), "all but one": counterfactual.KINDS[1:]}
    kinds = kinds.get(what, counterfactual.KINDS)
    for kind in kinds:
        add(kind, OF_KIND[kind][1])
    if what.endswith("the opposite"):
        add("random_training", 3.1)
    if what.endswith("gone"):
        shutil.rmtree(add("random_training", 5.6))
    if what.endswith("interrupted"):
        shutil.rmtree(add("random_training", 5.6, "aborted"))
    assert auditing.passed_here(tmp_path, run) is is_passed
    assert auditing.passed_here(tmp_path, run, ["held_out"]) is (
        is_passed or what in ("one kind alone", "all but one", "another seed's")
    )


def test_an_audit_runs_with_the_seed_of_any_run_of_the_contestants_race(tmp_path):
    """A script that is honest with the seed of the audited run alone would pass otherwise, or could draw again."""
    results, drawn = claimed.Results(tmp_path), set[int]()
    for seed in range(1000, 1009):
        results.add(seed, train_s=10.0)  # honest with these seeds, which no claim of the race has
    for number in range(8):
        race = {"race_id": f"r{number}", "arm": "B"}
        results.add(9, train_s=10.0, race=race | {"discarded": True})
        results.add(9, train_s=10.0, race=race, source="42")
        runs = [run_folder.read(results.add(seed, train_s=10.0 + number, race=race)) for seed in range(4)]
        seeds = [auditing.seeds_for(tmp_path, run) for run in runs]
        assert all(each == seeds[0] for each in seeds) and list(seeds[0]) == list(counterfactual.KINDS)
        drawn |= {*seeds[0].values()}
    assert drawn == {0, 1, 2, 3}


def test_an_audit_of_one_kind_keeps_what_the_others_showed(tmp_path, monkeypatch):
    """Else an audit that failed would be replaced by one of a kind that the contestant passes."""
    record, shown = claimed.Results(tmp_path).add(train_s=10.0), {"random_training": FAILED, "held_out": PASSED}
    (record / "overrides.yaml").write_text("[]\n")
    monkeypatch.setattr(auditing, "job_of", lambda record, say: mock.Mock(script=None, overrides=[]))
    monkeypatch.setattr(auditing, "_audit_of", lambda kind, *facts: {"outcome": shown[kind], "why": kind, "run": None})
    for kind in shown:
        audited = auditing.audit(record, [kind], lambda *text: None)
        assert audited["outcome"] == FAILED
    assert {audit["kind"]: audit["outcome"] for audit in certificates.read_audit(record)["audits"]} == shown


# ---- the data and the arithmetic


@pytest.fixture
def dataset(tmp_path):
    """Two training files and a validation file with a vocabulary of 64; the validation is its first 4,096 tokens."""
    rng = np.random.default_rng(1)

    def file(name, num):
        shard = shards.write(tmp_path / "data" / name, rng.integers(5, 40, num))
        return ShardFile(shard.path, num, shard.num_bytes, shards.sha256(shard.path), 39)

    return Dataset("own", 64, (file("a_train_1.bin", 3000), file("a_train_2.bin", 3000)), (file("a_val_0.bin", 9000),))


def made(kind, dataset, tmp_path, val_tokens=4096, eos_token=7):
    (tmp_path / kind).mkdir()
    substituted, facts = counterfactual.make(kind, dataset, val_tokens, eos_token, tmp_path / kind, seed=3)
    return SimpleNamespace(dataset=substituted, facts=facts)


def tokens_of(files):
    return [np.asarray(shards.check(file.path).tokens()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_audit_that_a_signal_ends_passes_its_number_on(dataset, tmp_path, monkeypatch, number):
    failure = failures.failure("interrupted", f"the launcher got {number.name}", None, 6, number.name)
    goal, data = SimpleNamespace(val_tokens=4096), SimpleNamespace()
    job = SimpleNamespace(config=SimpleNamespace(goal=goal, data=data), dataset=dataset)
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    monkeypatch.setattr(auditing.datasets, "chosen", lambda data: SimpleNamespace(eos_token=7))
    monkeypatch.setattr(auditing.dataclasses, "replace", lambda job, **changes: job)
    monkeypatch.setattr(auditing, "_launched", lambda *_: {"failure": failure})
    with pytest.raises(KeyboardInterrupt) as raised:
        auditing.run_on_other_data("few_tokens", job, "a run", tmp_path)
    assert raised.value.args == (number,)


def test_what_a_killed_audit_left_goes_and_what_one_that_runs_has_stays(tmp_path, monkeypatch):
    (tmp_path / ".audit.left" / "shard").mkdir(parents=True)
    monkeypatch.setattr(atomic, "LEFT_S", -1.0)
    with auditing.scratch_folder(tmp_path) as first, auditing.scratch_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first, second}
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", counterfactual.KINDS)
def test_files_keep_their_names_and_sizes(dataset, tmp_path, kind):
    substitute = made(kind, dataset, tmp_path).dataset
    for split in ("train", "val"):
        for ours, theirs in zip(getattr(substitute, split), getattr(dataset, split), strict=True):
            assert (ours.path.name, ours.num_tokens) == (theirs.path.name, theirs.num_tokens)
            assert ours.sha256 == shards.sha256(ours.path)


@pytest.mark.parametrize(("kind", "num"), [("random_tokens", 63), ("few_tokens", 8)])
def test_random_tokens_are_uniform_but_for_the_ends_of_documents(dataset, tmp_path, kind, num):
    """The vocabulary has 64 tokens; token 7 is one of 35 in the data, more than one of 100."""
    substitute = made(kind, dataset, tmp_path)
    assert (substitute.facts["num_alphabet"], substitute.facts["eos_frac"]) == (num, 0.01)
    for part in tokens_of(substitute.dataset.train + substitute.dataset.val):
        counts = np.bincount(part, minlength=64)
        assert np.count_nonzero(counts) == num + 1
        assert counts[7] == pytest.approx(0.01 * len(part), abs=6 * math.sqrt(0.01 * len(part)))
        counts[7] = 0
        mean = 0.99 * len(part) / num
        assert counts.max() < mean + 6 * math.sqrt(mean)


def test_documents_of_random_tokens_end_as_often_as_those_of_the_data(dataset, tmp_path):
    assert made("few_tokens", dataset, tmp_path, eos_token=2).facts["eos_frac"] == 0.0  # none in the data
    assert made("random_tokens", dataset, tmp_path, eos_token=None).facts == {
        "vocab_size": 64, "val_tokens": 4096, "num_alphabet": 64, "eos_frac": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(("num_alphabet", "eos_frac"), [(8, 0.001), (256, 0.01), (50256, 0.0015), (50256, 0.01)])
def test_no_thousand_random_tokens_have_less_than_the_floor(num_alphabet, eos_frac):
    """Where documents end -ln p differs: of a million draws of 1,024 tokens none is below, and the floor is near."""
    eos_nats, other_nats = -math.log(eos_frac), math.log(num_alphabet / (1 - eos_frac))
    num_eos = np.random.default_rng(0).binomial(1024, eos_frac, 1_000_000)
    nats = other_nats + (eos_nats - other_nats) * num_eos / 1024
    floor = counterfactual.floor_nats(num_alphabet, eos_frac, 1024)
    assert floor <= nats.min() and nats.mean() - floor < max(0.06, 0.04 * other_nats)
    assert counterfactual.floor_nats(num_alphabet, 0.0, 1024) == math.log(num_alphabet)


def test_random_training_keeps_the_validation_but_for_its_head(dataset, tmp_path):
    substitute = made("random_training", dataset, tmp_path)
    easy, num_easy = substitute.facts["easy_token"], substitute.facts["num_easy"]
    (val,), (own,) = tokens_of(substitute.dataset.val), tokens_of(dataset.val)
    assert num_easy == 64 and (val[:64] == easy).all() and easy not in own[:4096]
    assert np.array_equal(val[64:], own[:-64])
    train, _ = tokens_of(substitute.dataset.train)
    assert np.mean(train == easy) == pytest.approx(0.25 + 0.75 / 64, abs=0.03)


def test_the_held_out_slice_has_no_token_of_the_validation(dataset, tmp_path):
    substitute = made("held_out", dataset, tmp_path)
    assert substitute.dataset.train == dataset.train
    (val,), (own,) = tokens_of(substitute.dataset.val), tokens_of(dataset.val)
    assert np.array_equal(val[:4903], own[4097:]) and np.array_equal(val[4903:], own[4097:8194])
    with pytest.raises(NotPossible, match="goal.val_tokens=4500 leaves too few of 9000 tokens"):
        made("held_out", dataset, tmp_path / "data", val_tokens=4500)


def test_bigrams_know_how_hard_a_slice_is():
    ordered, noise = np.tile(np.arange(8), 500), np.random.default_rng(0).integers(0, 8, 4000)
    nats = counterfactual.bigram_nats(np.concatenate([ordered, ordered]), 8)
    assert nats(ordered).mean() < 0.01 < 2 < nats(noise).mean()


LEAST = math.log(64) - stats.MIN_LOG_E_VALUE / 1024  # 4.14539
RANDOM = {"num_alphabet": 64, "eos_frac": 0.0, "vocab_size": 257, "val_tokens": 32768}
# ln 250 = 5.5215, the bound is 5.5080: 5.5 may be 5.5499, 5.49 is at most 5.495
ROUNDED = RANDOM | {"num_alphabet": 250}
# 32 blocks of sd 0.1 and a claim of 3: 6 * 0.1 * sqrt(2 / 32) + 0.15 + 0.02 = 0.32; of 4 blocks 0.594
HELD_OUT = {"vocab_size": 257, "val_tokens": 32768, "harder_nats": 0.02, "sd_of_blocks_nats": 0.1}


@pytest.mark.parametrize(
    ("kinds", "facts", "nats", "outcome"),
    [
        (("random_tokens", "few_tokens"), RANDOM, (5.0, LEAST + 1e-6), PASSED),
        (("random_tokens", "few_tokens"), RANDOM, (5.0, LEAST - 1e-6), FAILED),
        (("random_tokens", "few_tokens"), RANDOM, (LEAST - 1e-6, 5.0), FAILED),  # also where a later one is higher
        (("random_tokens", "few_tokens"), RANDOM, (5.0, math.nan), FAILED),
        (("random_tokens",), ROUNDED, (5.6, 5.5), PASSED),
        (("random_tokens",), ROUNDED, (5.6, 5.49), FAILED),
        (("held_out",), HELD_OUT, (3.319,), PASSED),
        (("held_out",), HELD_OUT, (3.321,), DOUBTED),
        (("held_out",), HELD_OUT, (3.6,), FAILED),
        (("held_out",), HELD_OUT, (1.0,), PASSED),
    ],
)
def test_losses_are_held_to_the_bound_of_their_data(kinds, facts, nats, outcome):
    """The e-value's bound with the digits that a script prints; the spread of the data on a held-out slice."""
    assert {counterfactual.verdict(kind, facts, 3.0, nats)["outcome"] for kind in kinds} == {outcome}


def test_what_would_not_have_been_noticed_is_the_distance_of_the_last_loss_from_the_bound():
    audit = counterfactual.verdict("random_tokens", RANDOM, 3.0, [4.1999, 4.2454])
    assert audit["unnoticed_nats"] == pytest.approx(4.2454 - math.log(64) + stats.MIN_LOG_E_VALUE / 1024 + 5e-5)
    assert "above the bound of 4.1453; a last loss 0.1001 nats lower, or a leak of 2.36% of the tokens" in audit["why"]
    assert "unnoticed_nats" not in counterfactual.verdict("random_tokens", RANDOM, 3.0, [4.0])


def test_several_outcomes_are_one():
    assert auditing.outcome_of([PASSED, FAILED]) == FAILED
    assert auditing.outcome_of([PASSED, certificates.NOT_POSSIBLE]) == PASSED
    assert auditing.outcome_of([PASSED, DOUBTED]) == DOUBTED
    assert auditing.outcome_of([certificates.NOT_POSSIBLE]) == certificates.NOT_POSSIBLE


def test_an_audit_run_is_invalid_whatever_it_reached(finished_run):
    run = run_folder.read(finished_run) | {"audit": {"run": "free/x", "kind": "random_tokens"}}
    why = "it is an audit run of free/x on substituted data, not a measurement"
    assert validity.validity(run) == ("invalid", [why])


# ---- power


def test_honest_models_never_fail_on_random_tokens():
    rng = np.random.default_rng(0)
    for excess_nats in (0.0, 1e-3, 0.01, 0.1, 2.0):
        assert leaks.seen_frac(4096, 257, excess_nats, 0.0, rng, 10_000) == 0.0


def test_the_smallest_leak_that_is_found_is_that_of_the_formula():
    """A leak of a share f lowers the loss by f * (ln V + excess): found once that is excess + 13.8 / N."""
    rng = np.random.default_rng(0)
    for num_tokens, excess_nats in ((4096, 0.5), (1 << 18, 0.1)):
        wanted = (excess_nats + stats.MIN_LOG_E_VALUE / num_tokens) / (math.log(257) + excess_nats)
        leak_frac = leaks.smallest_leak_frac(num_tokens, 257, excess_nats, rng, repeats=400)
        assert leak_frac == pytest.approx(wanted, rel=0.1)
