"""A record run again from itself alone: what the certificate says of a true one, a changed one, an incomplete one."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import real_runs
import scripted
import torch

from bench import atomic
from bench.compare import comparison, selection, text
from bench.machine import code_state, environment
from bench.record import certificates, listing, step_files
from bench.replay import environments, outcomes, repeats
from bench.report import run_page, table_groups


def replayed(results, *words, expect=0, **env):
    """./run.sh replay WORDS --json -> (the certificates, what it said)."""
    done = real_runs.bench(results, "replay", *map(str, words), "--json", **env)
    assert done.returncode == expect, done.stdout + done.stderr + real_runs.logs(results)
    return json.loads(done.stdout or "null"), done.stderr


def change(folder, name, edit):
    """A file of a record, changed by somebody who mends its hash in run.json as well."""
    path = folder / name
    path.write_text(edit(path.read_text()))
    run = json.loads((folder / "run.json").read_text())
    for listed in run["artifacts"]:
        if listed["path"] == name:
            content = path.read_bytes()
            listed.update(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))
    atomic.write_json(folder / "run.json", run)


# ---- losses


def rows(*train, val=4.0):
    """Rows 0 to n of steps.csv with these training losses, validated at the end."""
    found = [{"step": 0, "train_loss": None, "val_loss": None}]
    found += [{"step": step, "train_loss": loss, "val_loss": None} for step, loss in enumerate(train, 1)]
    found[-1]["val_loss"] = val
    return found


RECORDED = rows(5.0, 4.5, 4.25, 4.125, 4.0625)


@pytest.mark.parametrize(
    ("losses", "word", "num_equal", "words"),
    [
        (rows(5.0, 4.5, 4.25, 4.125, 4.0625), "identical", 6, "all 6 losses are the same"),
        (rows(5.0, 4.50001, 4.251, 4.13, 4.07, val=4.01), "equal within rounding", 1, "train_loss of step 2"),
        (rows(5.0, 4.50001, 4.251, 4.13, 4.07, val=4.02), "not reproduced", 1, "0.0200 nats away"),
        (rows(5.0, 4.501, 4.251, 4.13, 4.07), "not reproduced", 1, "more than rounding explains; every loss before"),
        (rows(5.0, 4.50001, 4.25, 4.125, 4.0625), "not reproduced", 1, "no training does that"),
        (rows(5.0, 4.5, 4.25, 4.125, 4.0625, val=4.1), "not reproduced", 5, "val_loss of step 5"),
        (rows(5.0, 4.5, 4.25, 4.125), "not reproduced", 4, "train_loss of step 5 is missing"),
        (rows(5.0, 4.5, float("nan"), 4.125, 4.0625), "not reproduced", 2, "is nan"),
    ],
)
def test_losses_are_judged_from_the_first_that_differs(losses, word, num_equal, words):
    if len(losses) < len(RECORDED):
        losses[-1]["val_loss"] = None
    found = outcomes.of_losses(RECORDED, losses, "float32")
    assert (found.word, found.num_equal_losses, found.num_losses) == (word, num_equal, 6)
    assert words in found.why


def test_bfloat16_rounds_more():
    coarse = rows(5.0, 4.51, 4.26, 4.13, 4.07, val=4.01)
    assert outcomes.of_losses(RECORDED, coarse, "bfloat16").word == "equal within rounding"
    assert outcomes.of_losses(RECORDED, coarse, "float32").word == "not reproduced"


def test_one_more_value_lies_in_the_prediction_interval_of_a_textbook():
    low, high = repeats.prediction_interval([1.0, 2.0, 3.0], 0.95)
    assert (low, high) == pytest.approx((2 - 4.30265 * (4 / 3) ** 0.5, 2 + 4.30265 * (4 / 3) ** 0.5), abs=1e-4)


def test_fresh_seeds_must_reach_the_target_that_the_record_reached():
    assert repeats.judged(3.0, [2.99, 3.0, 3.01], None, 0.01, None)[0] == "statistically reproduced"
    assert repeats.judged(4.0, [2.99, 3.0, 3.01], None, 0.01, None)[0] == "not reproduced"
    word, why, facts = repeats.judged(3.0, [2.99, 3.0, 3.01], 3.1, 0.01, True)
    assert word == "statistically reproduced" and facts["p"] < 0.01 and "below 3.1" in why
    word, why, _ = repeats.judged(3.0, [2.99, 3.0, 3.01], 3.005, 0.01, True)
    assert word == "not reproduced" and "not shown to be below 3.005" in why
    assert repeats.judged(3.0, [2.99, 3.0, 3.01], 2.9, 0.01, False)[0] == "statistically reproduced"


def test_the_likeliest_cause_is_named():
    old = {"torch": "2.13.0", "cpu_model": "A", "num_threads": 2, "gpus": [], "os": "one"}
    here = old | {"cpu_capability": "AVX512"}
    assert environments.cause([], environments.unsaid(old, here), False).endswith("the record does not say")
    fields = environments.differences(old, here | {"torch": "2.12.0", "num_threads": 4, "os": "two"})
    assert [field.name for field in fields] == ["torch", "num_threads", "os"]
    assert environments.cause(fields, [], False) == "another torch"
    assert environments.cause(fields[2:], [], False).endswith("hardware.deterministic is off")
    assert environments.kind(old, here | {"torch": "2.12.0"}, ("a", "b")) == "other torch"
    assert environments.kind(old, here | {"cpu_model": "B"}, ("a", "b")) == "other machine"


def test_numerical_libraries_are_named_with_their_versions():
    text = "- Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 2024\n- Intel(R) MKL-DNN v3.12.0 (Git"
    assert environment.numerical_libraries(text) == ["MKL 2024.2", "oneDNN v3.12.0"]


# ---- as its user starts it


def test_a_record_replays_identical_and_both_hold_the_certificate(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    ((found,), said) = replayed(tmp_path / "results", folder)
    assert (found["outcome"], found["machine"]) == ("identical", "same session"), found["why"]
    assert found["num_equal_losses"] == found["num_losses"] == 6 + 3  # six steps, validated at 0, 3 and 6
    assert "2 shards with the record's sha256" in said
    (replay,) = (tmp_path / "results" / "replays").glob("*/*/run.json")
    assert certificates.read(replay.parent) is not None
    assert step_files.read_columns(folder, ["train_loss"]) == step_files.read_columns(replay.parent, ["train_loss"])
    assert real_runs.bench(tmp_path / "results", "verify", str(folder)).returncode == 0
    page = run_page.html(folder, at=tmp_path)
    assert f'href="results/free/{folder.name}/certificate.json">identical (same session)' in page
    assert [path.parent for path in (tmp_path / "results").glob("*/*/run.json")] == [folder]  # no repeat of its config


def test_what_is_missing_is_said_before_any_work(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    change(folder, "steps.csv", lambda text: text)
    run = json.loads((folder / "run.json").read_text())
    run["code"]["commit"] = "0" * 40
    run["data"]["train"][0]["sha256"] = "0" * 64
    run["hardware"]["num_processes"] = 8
    atomic.write_json(folder / "run.json", run)
    (found,), said = replayed(tmp_path / "results", folder, "--trust", expect=2)
    assert found["outcome"] == "impossible here"
    assert "commit: 000000000000 is not in this repository" in found["why"] and "sha256" in found["why"]
    assert not (tmp_path / "results" / "replays").exists()
    change(folder, "steps.csv", lambda text: text)
    (folder / "steps.csv").write_text("step\n")
    (found,), said = replayed(tmp_path / "results", folder, "--check", expect=2)
    assert "steps.csv" in found["why"]


@pytest.mark.slow
def test_a_changed_loss_is_not_reproduced_and_changed_code_is_refused(finished_run, tmp_path):
    folder = real_runs.copy_of(finished_run, tmp_path / "a")

    def better(text):
        *lines, last = text.rstrip("\n").split("\n")
        cells, at = last.split(","), lines[0].split(",").index("val_loss")
        cells[at] = repr(float(cells[at]) - 0.01)
        return "\n".join([*lines, ",".join(cells)]) + "\n"

    change(folder, "steps.csv", better)
    (found,), _ = replayed(tmp_path / "a", folder, "--trust", expect=1)
    assert found["outcome"] == "not reproduced" and "val_loss of step 6" in found["why"]
    assert found["num_equal_losses"] == found["num_losses"] - 1
    folder = real_runs.copy_of(finished_run, tmp_path / "b")
    run = json.loads((folder / "run.json").read_text())
    run["code"]["source_sha256"] = "1" * 64  # of code that the record does not hold
    atomic.write_json(folder / "run.json", run)
    (found,), _ = replayed(tmp_path / "b", folder, "--trust", expect=2)
    assert found["outcome"] == "impossible here" and "the record was changed, or lacks a part" in found["why"]


def test_a_strangers_code_runs_only_when_it_is_trusted_and_gets_no_tokens(finished_run, tmp_path):
    """A patch of bench/, its hash put right, that writes to a file which tokens it sees."""
    folder = real_runs.copy_of(finished_run, tmp_path / "theirs")
    commit = real_runs.run_json(folder)["code"]["commit"]
    worktree, spied = tmp_path / "worktree", tmp_path / "spied"
    git = ["git", "-C", str(worktree)]
    subprocess.run(["git", "worktree", "add", "-q", "--detach", worktree, commit], cwd=real_runs.REPO, check=True)
    try:
        init = worktree / "bench/__init__.py"
        spy = f"import os\nopen({str(spied)!r}, 'a').write(str([n for n in os.environ if 'TOKEN' in n]))\n"
        init.write_text(init.read_text() + spy)
        patch = subprocess.run([*git, "diff", "--binary"], check=True, capture_output=True, text=True).stdout
        known = code_state.state(worktree)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", worktree], cwd=real_runs.REPO, check=True)

    def with_code(text):
        run = json.loads(text)
        run["code"] = run["code"] | known | {"copy": run["code"]["copy"]}
        return json.dumps(run)

    change(folder, "code/diff.patch", lambda text: patch)
    (folder / "run.json").write_text(with_code((folder / "run.json").read_text()))
    refused = real_runs.bench(tmp_path / "results", "replay", str(folder), HF_TOKEN="secret")
    assert refused.returncode == 2 and "code/diff.patch" in refused.stderr and "--trust" in refused.stderr
    assert not spied.exists() and not (folder / "certificate.json").exists()
    (found,), _ = replayed(tmp_path / "results", folder, "--trust", HF_TOKEN="secret")
    assert found["outcome"] == "identical" and set(spied.read_text()) == set("[]")
    spied.unlink()
    change(folder, "code/diff.patch", lambda text: text.replace("import os", "import os, sys"))
    patched = (folder / "code/diff.patch").read_bytes()
    run = json.loads((folder / "run.json").read_text())
    run["code"]["diff_sha256"] = hashlib.sha256(patched).hexdigest()
    atomic.write_json(folder / "run.json", run)
    (found,), _ = replayed(tmp_path / "results", folder, "--trust", expect=2)
    assert "bench/__init__.py, as the record holds it, is not the file" in found["why"] and not spied.exists()


@pytest.mark.slow
def test_another_instruction_set_is_another_machine(finished_run, tmp_path):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this process has the least instruction set already")
    folder = real_runs.copy_of(finished_run, tmp_path / "results")
    other = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    (found,), _ = replayed(tmp_path / "results", folder, "--keep-env", **other)
    assert found["outcome"] == "equal within rounding"
    assert found["cause"] == "another instruction set of the CPU"


@pytest.mark.slow
def test_a_script_replays_from_the_sources_that_its_record_keeps(tmp_path):
    script = tmp_path / "mine" / "train_gpt.py"
    script.parent.mkdir()
    for path in scripted.MODDED.parent.glob("*.py"):
        (script.parent / path.name).write_bytes(path.read_bytes())
    script.write_text(script.read_text() + "\nimport tempfile\n\ntempfile.mkdtemp()  # as torch's agent did, a run\n")
    temp = real_runs.temp_in(tmp_path)
    folder = scripted.run(tmp_path / "results", script, TMPDIR=str(temp))
    left = set(temp.iterdir())
    for path in script.parent.iterdir():
        path.unlink()
    (found,), _ = replayed(tmp_path / "results", folder, TMPDIR=str(temp))
    assert found["outcome"] == "identical", found["why"]
    assert left and set(temp.iterdir()) == left, "the replay's temporary files are removed with its checkout"


@pytest.mark.slow
def test_code_that_git_does_not_know_is_replayed_too(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(real_runs.REPO), str(clone)], check=True)
    base = clone / "models" / "base.py"
    base.write_text(base.read_text() + "\nADDED = 1\n")
    (clone / "models" / "ladder" / "own.py").write_text("ADDED = 1\n")

    def bench(*words):
        done = subprocess.run(
            [sys.executable, "-m", "bench", *words],
            cwd=clone,
            env=real_runs.environment(tmp_path / "results"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    bench("run", *real_runs.SHORT)
    subprocess.run(["git", "checkout", "-q", "."], cwd=clone, check=True)
    (clone / "models" / "ladder" / "own.py").unlink()
    (folder,) = real_runs.folders(tmp_path / "results")
    (found,) = json.loads(bench("replay", str(folder), "--json"))
    assert found["outcome"] == "identical", found["why"]


def test_a_judge_may_demand_that_each_run_was_run_again(tmp_path):
    published = real_runs.REPO / "results" / "published" / "cpu_nano-gpt2-adamw"
    for demand, accepted in (([], True), (["--replayed"], True)):
        done = real_runs.bench(tmp_path, "judge", str(published), "--json", *demand)
        assert json.loads(done.stdout)["accepted"] == accepted, done.stdout
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    min(copy.glob("cpu_nano/*/certificate.json")).unlink()
    done = real_runs.bench(tmp_path, "judge", str(copy), "--json", "--replayed")
    (failed,) = [rule for rule in json.loads(done.stdout)["rules"] if rule["passed"] is False]
    assert failed["rule"] == "every run came out again" and "./run.sh replay" in failed["evidence"]
    _lists_certificates(tmp_path, published, copy)


def _lists_certificates(results, published, copy):
    """published: three runs with certificates; copy: the first one's is gone."""
    table = real_runs.bench(results, "table", str(copy), "--json", "--columns", "run_id,certificate").stdout
    assert [row["certificate"] for row in json.loads(table)] == [None, *["equal within rounding"] * 2]
    head, *_ = real_runs.bench(results, "table", str(copy)).stdout.splitlines()
    assert head.split()[-1] == "certificate"
    for folder, words in ((copy, "2 of 3 equal within rounding"), (published, "  3 equal within rounding")):
        assert words in real_runs.bench(results, "table", "--leaderboard", str(folder)).stdout
        (row,) = table_groups.groups(listing.read_rows([str(folder)]))
        assert row["certificate"] == words.strip()
    one, *others = map(str, sorted(published.glob("cpu_nano/*")))
    ((_, compared),) = comparison.of_arms(selection.of_words([one, "vs", *others]))
    assert compared["certificates"] == ["1 equal within rounding", "2 equal within rounding"]
    assert "(2 runs, 120 steps; replayed: 2 equal within rounding)" in text.render(compared)
    for path in copy.glob("cpu_nano/*/certificate.json"):
        path.unlink()
    assert "certificate" not in real_runs.bench(results, "table", str(copy)).stdout
    assert "certificate" not in real_runs.bench(results, "table", "--leaderboard", str(copy)).stdout


def test_repeats_are_certified_together():
    assert certificates.of_several([None, None]) is None
    assert certificates.of_several(["identical"] * 3) == "3 identical"
    found = certificates.of_several(["identical", None, "identical", "not reproduced"])
    assert found == "2 of 4 identical, 1 of 4 not reproduced"
