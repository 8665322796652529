"""Somebody's own training script as a run: unmodified, timed from outside, its claims held against what was seen."""

import gzip
import json
import mmap
import os
import pickle
import py_compile
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import real_runs
import scripted
import torch
import yaml
from cases import slow

from bench.base import private
from bench.base.paths import REPO
from bench.claims.rules import runs
from bench.cli import main as program
from bench.compare import eligibility
from bench.config import identity
from bench.launch import opened, prepare
from bench.launch.script import work_folder
from bench.launch.script.opened_files import OpenedFiles
from bench.machine import code_state
from bench.plans.race import arm_process, runner
from bench.record import ledger, run_folder, step_files, verification
from bench.record.importers import dialects
from bench.record.rows import MACHINE_INSTRUMENTS, row_of
from bench.training import open_watch

NANO = ["script.raw_data=true", "script.data=data/toy", "script.args=['--seed={seed}','--max_iters=20']"]


def script_doubts(run):
    """What is doubted of the script itself, not of a busy machine."""
    return [doubt["doubt"] for doubt in run["doubts"] if doubt["instrument"] not in MACHINE_INSTRUMENTS]


def faults(folder):
    return [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]


@pytest.fixture(scope="module")
def modded(tmp_path_factory):
    return scripted.run(tmp_path_factory.mktemp("results"), scripted.MODDED, *real_runs.TWO)


def test_a_script_of_modded_nanogpts_habits_runs_unmodified_on_two_ranks(modded):
    run, rows = real_runs.run_json(modded), step_files.read(modded)
    assert (run["status"], run["script"]["dialect"]) == ("complete", "modded-nanogpt")
    assert run["timing_protocol"]["id"] == "script-1"
    assert (run["model"], run["optim"], run["world_size"]) == ({"arch": "train_gpt.py"}, "unknown", 2)
    assert [row["step"] for row in rows] == list(range(21))
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 10, 20]
    last_ms = max(row.get("train_time_at_val_ms") or row["train_time_ms"] for row in rows)
    assert run["metrics"]["train_s"] == last_ms / 1e3
    assert "batch_tokens" not in run["measured"] and run["metrics"]["tokens_per_s"] is None
    assert run["environment"]["torch"] is not None
    assert run["environment"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert script_doubts(run) == []
    assert faults(modded) == []


def test_its_lines_are_timed_from_outside(modded):
    measured, rows = real_runs.run_json(modded)["measured"], step_files.read(modded)
    first, last = rows[0]["val_line_t_ns"], rows[-1]["val_line_t_ns"]
    assert measured["wall_of_lines_s"] == pytest.approx((last - first) / 1e9)
    assert measured["counted_s"] == pytest.approx(
        (rows[-1].get("train_time_at_val_ms") or rows[-1]["train_time_ms"]) / 1e3 - (rows[0]["train_time_ms"]) / 1e3
    )
    assert statistics.median(row["wall_ms"] for row in rows[1:]) >= 20  # each step sleeps 20 ms


def test_its_source_is_kept_and_is_its_identity(modded):
    run = real_runs.run_json(modded)
    assert sorted(run["script"]["sha256_by_file"]) == ["script/helper.py", "script/train_gpt.py"]
    assert {"script/helper.py", "script/train_gpt.py"} < set(run["code"]["files"])
    assert (modded / "code/script/train_gpt.py").read_bytes() == scripted.MODDED.read_bytes()


def test_what_it_wrote_is_kept_and_copies_and_links_are_gone(modded):
    run = real_runs.run_json(modded)
    (written,) = run["script"]["files_written"]
    assert written.startswith("logs/") and (modded / "work" / written).read_text().count("val_loss:") > 3
    assert [path.name for path in (modded / "work").iterdir()] == ["logs"]
    expected = ["work/data/fineweb10B/fineweb_train_000001.bin", "work/data/fineweb10B/fineweb_val_000000.bin"]
    assert run["script"]["opened"] == expected


@pytest.mark.parametrize("overrides", [[], slow(real_runs.TWO)])
def test_a_script_of_nanogpts_habits_runs_unmodified(tmp_path, overrides):
    folder = scripted.run(tmp_path, scripted.NANO, *NANO, *overrides)
    run, rows = real_runs.run_json(folder), step_files.read(folder)
    assert (run["status"], run["script"]["dialect"]) == ("complete", "nanogpt")
    assert [row["step"] for row in rows] == list(range(22))
    assert run["metrics"]["val_loss"] == [row["val_loss"] for row in rows if row["val_loss"] is not None][-1]
    assert run["script"]["files_written"] == ["out/ckpt.pt"]
    row, num_held = row_of(run), sum(row["flags"] == "validation" for row in rows)
    assert (row["num_disturbed_steps"], row["num_validating_steps"]) == (0, num_held) and num_held > 1
    assert "validation" not in run["timing_protocol"]["excluded"]
    assert script_doubts(run) == [] and faults(folder) == []


@pytest.mark.slow
def test_without_a_printed_total_the_wall_time_of_the_lines_counts(tmp_path):
    args = NANO[:2] + ["script.args=['--log_interval=5','--max_iters=20']"]
    folder = scripted.run(tmp_path, scripted.NANO, *args)
    run, rows = real_runs.run_json(folder), step_files.read(folder)
    ends = [row["line_t_ns"] or row["val_line_t_ns"] for row in rows]
    assert run["timing_protocol"]["id"] == "script-wall-1"
    assert run["metrics"]["train_s"] == pytest.approx((ends[-1] - ends[0]) / 1e9)
    assert json.loads(row_of(run)["setting"])["timed_steps"] == "those after step 0"
    assert faults(folder) == []


def test_what_a_script_computes_is_not_counted_as_other_programs_load(tmp_path):
    """Its processes keep all cores busy, so no others can use those besides."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nfor core in os.sched_getaffinity(0):\n"
        "    if os.fork() == 0:\n"
        "        while time.process_time() < 2: pass\n"
        "        os._exit(0)\n"
        "for _ in os.sched_getaffinity(0): os.wait()\n"
        "for step in range(3): print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')\n"
    )
    measured = real_runs.run_json(scripted.run(tmp_path, script, "track=free"))["measured"]
    num_cores = len(os.sched_getaffinity(0))
    assert (num_cores - measured["foreign_cpu_cores"]) * measured["wall_s"] > 1.8 * num_cores


HOGS = {
    "a child that it waits for": "subprocess.run([sys.executable, '-c', 'x = bytearray(300 << 20)'])",
    "its own, with the peak reset": (
        "x = bytearray(300 << 20); time.sleep(3); del x; open('/proc/self/clear_refs', 'w').write('5')"
    ),
    "a child that it kills": (
        "child = subprocess.Popen([sys.executable, '-c', 'x = bytearray(300 << 20); import time; time.sleep(60)']);"
        " time.sleep(5); os.kill(child.pid, 9)"
    ),
}


@pytest.mark.parametrize("what", HOGS)
def test_the_peak_memory_of_a_script_is_that_of_its_largest_process(tmp_path, what):
    prints = "for step in range(3): print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    (tmp_path / "hog.py").write_text(f"import os, subprocess, sys, time\n{prints}\n{HOGS[what]}\n")
    folder = scripted.run(tmp_path / "results", tmp_path / "hog.py", "script.torchrun=false", "track=free")
    (peak_gib,) = real_runs.run_json(folder)["measured"]["peak_mem_gib_by_rank"]["rss"]
    # a fork, which these tests use in place of a new process, has torch's libraries as well
    assert 0.29 < peak_gib < (0.6 if what.startswith("its own") else 0.4)


def test_a_dialect_of_ones_own_is_a_yaml_of_patterns(tmp_path):
    yaml = scripted.ODD.with_name("own_words.yaml")
    run = scripted.odd(tmp_path, "own_words", f"script.dialect={yaml}")
    rows = step_files.read(run["folder"])
    assert [row["train_loss"] for row in rows] == [None, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert [row["val_loss"] for row in rows] == [6.0, None, None, 3.0, None, None, 3.5]
    assert run["metrics"]["train_s"] == 0.36


def test_an_edit_of_a_dialect_of_ones_own_is_another_config_and_its_patterns_are_recorded(tmp_path):
    """Else a run could edit how the numbers of the other arm are read."""
    own = tmp_path / "own.yaml"
    shutil.copy(scripted.ODD.with_name("own_words.yaml"), own)
    setup = [*scripted.TRACK, f"script={scripted.ODD}", f"script.dialect={own}"]

    def config():
        return identity.config_id(prepare.prepare(setup).config)

    job = prepare.prepare(setup)
    assert job.script.dialect == job.config.script.lines == yaml.safe_load(own.read_text())
    before = config()
    own.write_text(f"# the same\n{own.read_text()}")
    assert config() == before
    own.write_text(own.read_text().replace("(?P<val_loss>", "x(?P<val_loss>"))
    assert config() != before
    with pytest.raises(ValueError, match="script.lines describe the lines too: keep one of them"):
        prepare.prepare([*setup, "script.lines={step:'it (?P<step>[0-9]+)'}"])
    lines = ["script.lines={step:'it (?P<step>[0-9]+)',val:'x (?P<step>[0-9]+)'}"]
    with pytest.raises(ValueError, match="goal.metric=val_bpb: lines of script.lines have none"):
        prepare.prepare([*setup[:-1], *lines, "goal.metric=val_bpb"])


@pytest.mark.parametrize("number", ["nan", "5e+307", "n/a", "0,5"])
def test_a_metric_whose_last_value_is_no_number_fails_the_run(tmp_path, number):
    """Else such runs, the bad ones, would not count."""
    prints = "for step in range(3): print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    (tmp_path / "train.py").write_text(f"{prints}\nprint('accuracy {number}')\n")
    goal = ["goal.metric=accuracy", "goal.metric_direction=higher", r"goal.metric_pattern='accuracy (?P<value>\S+)'"]
    alone = ["script.torchrun=false", "track=free", *goal]
    failure = real_runs.run_json(scripted.run(tmp_path / "results", tmp_path / "train.py", *alone, expect=1))["failure"]
    read = number if number == "5e+307" else "nan"
    message = f"the last accuracy that the script printed is {read}, at step 2"
    assert (failure["kind"], failure["message"]) == ("non_finite_loss", message)


def test_a_sweep_over_scripts_has_other_settings_of_scripts(tmp_path):
    paths = [shutil.copytree(scripted.NANO.parent, tmp_path / name) / scripted.NANO.name for name in "ab"]
    swept = f"script.path={','.join(map(str, paths))}"
    real_runs.bench(tmp_path / "results", "run", "-m", *NANO, swept, code=0)
    names = {real_runs.run_json(folder)["name"] for folder in real_runs.folders(tmp_path / "results")}
    assert names == {"a-train", "b-train"}


def test_a_sweep_of_scripts_with_data_of_their_own_goes_on_where_it_was_and_not_with_other_data(tmp_path):
    prints = "for step in range(3): print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    (tmp_path / "mine.bin").write_bytes(b"1")
    (tmp_path / "train.py").write_text(f"open({str(tmp_path / 'mine.bin')!r}, 'rb').read()\n{prints}\n")
    swept = ["track=free", "script.torchrun=false", f"script={tmp_path / 'train.py'}", "seed=1,2"]
    for data, num_runs in ((b"1", 2), (b"1", 2), (b"2", 4)):
        if (tmp_path / "mine.bin").read_bytes() != data:
            (tmp_path / "mine.bin").write_bytes(data)
        real_runs.bench(tmp_path / "results", "run", "-m", *swept, code=0)
        assert len(real_runs.folders(tmp_path / "results")) == num_runs


def test_shards_that_are_touched_while_a_script_runs_accuse_it_of_nothing_and_are_not_copied_again(tmp_path):
    script, data = tmp_path / "train.py", tmp_path / "data"
    lines = ["import glob, os", "for split in ('train', 'val'): open(f'data/{split}.bin', 'rb').read(10)"]
    lines += [f"for shard in glob.glob('{data}/pysource*/*.bin'): os.utime(shard)"]
    lines += ["for step in (1, 2): print(f'step:{step}/2 train_time:{step * 10}ms step_avg:10.0ms')"]
    lines += ["print('step:2/2 val_loss:4.0 train_time:20ms step_avg:10.0ms')"]
    script.write_text("\n".join(lines))
    overrides = ["script.dialect=modded-nanogpt", "script.raw_data=true", "script.data=data"]
    run = real_runs.run_json(scripted.run(tmp_path / "results", script, *overrides, SPEEDRUN_DATA=str(data)))
    assert not any("shards" in doubt or "data" in doubt for doubt in script_doubts(run)), script_doubts(run)
    assert any(doubt.startswith("it prints no val_loss of step 0") for doubt in script_doubts(run))
    assert len(list(data.glob("raw-*.bin"))) == 2


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("trains_on_val_and_claims_less", "it claims less time than its lines took"),
        ("claims_more", "it counts more time than passed: its lines came in 0.0"),
        ("hides_steps", "passed uncounted between lines that are several steps apart"),
        ("trained_before", "its loss at step 0 is already 2.600"),
        ("goes_back", "its lines are of 2 runs"),
        ("stops_early", "its last validation is of step 1, and its last step is 6"),
        ("trains_beyond_its_end", "its last validation is of step 9, and its last step is 9 of 6"),
        ("edits_itself", "script/train.py changed while it ran"),
        ("other_data", "it read a file that is not the track's data"),
        ("other_data", "it never opened the track's val shards"),
        ("trains_on_val_and_claims_less", "it opened the track's validation shards while it trained, at "),
        slow("validates_longer", "its validations take longer once it has trained: 1."),
    ],
)
def test_a_planted_cheat_makes_the_run_suspect_with_the_sentence_why(planted, name, sentence):
    run = planted(name)
    is_implausible = name == "trained_before"  # and its last loss is below the track's bound
    assert (run["status"], run["validity"]) == ("complete", "invalid" if is_implausible else "suspect")
    assert any(sentence in doubt for doubt in script_doubts(run)), script_doubts(run)
    assert any(sentence in reason for reason in run["validity_reasons"])
    assert faults(run["folder"]) == []


WATCH = """
import os, runpy, sys
runpy.run_path(sys.argv[1])["watch"](sys.argv[2])
{text}
"""
READ = "open('{foreign}/w.dat', 'rb').read()"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (READ, "w.dat"),
        ("open('{foreign}/w.bin', 'ab').close(); open('{foreign}/w.bin', 'rb')", "w.bin"),
        ("os.link('{foreign}/w.bin', 'own.bin'); open('own.bin', 'rb')", "w.bin"),
        ("open('own.bin', 'wb').close(); os.replace('{foreign}/w.bin', 'own.bin'); open('own.bin', 'rb')", "w.bin"),
        ("os.rename('{foreign}', 'own'); open('own/w.bin', 'rb')", "foreign"),
        ("os.rename('w.bin', 'own', src_dir_fd=os.open('{foreign}', os.O_RDONLY)); open('own', 'rb')", "w.bin"),
        (
            "open('{foreign}/w.bin', 'wb', opener=lambda *_: os.open('x', 65, 438)); open('{foreign}/w.bin', 'rb')",
            "w.bin",
        ),
        ("open('{foreign}/torchinductor/.triton/w.bin', 'rb')", "w.bin"),
        ("os.system('cat <{foreign}/w.bin >own.bin')", "w.bin"),
        ("import subprocess; subprocess.run(['cp', '{foreign}/w.bin', 'own.bin'])", "w.bin"),
        ("open('{foreign}/a.txt'); open('{foreign}/b'); open('{foreign}/c')", "a.txt"),
        ("open(os.path.join(b'{foreign}', b'not_\\xff.bin'), 'rb')", "not_\\xff.bin"),
        ("sys.path.insert(0, '{foreign}'); import secretmod", "secretmod.py"),
        ("sys.path.insert(0, '{foreign}'); import compiled", "compiled.py"),
        ("open('{foreign}/a.txt'); open('{foreign}/b'); open('/proc/self/maps'); import this", None),
        ("open('own.bin', 'wb').write(b'x'); os.rename('own.bin', 'b.bin'); open('b.bin', 'rb')", None),
        ("os.mkdir('own'); os.system('cp {foreign}/b own/b.bin'); open('own/b.bin', 'rb')", None),
    ],
)
def test_what_a_process_reads_is_foreign_unless_it_made_it(tmp_path, text, expected):
    foreign = tmp_path / "foreign"
    (foreign / "torchinductor/.triton").mkdir(parents=True)
    for name in ("w.bin", "torchinductor/.triton/w.bin", "w.dat", os.fsdecode(b"not_\xff.bin")):
        (foreign / name).write_bytes(bytes(2**17))
    for name in ("a.txt", "b", "c"):
        (foreign / name).write_bytes(bytes(30_000))
    (foreign / "secretmod.py").write_text("x = 1")
    (foreign / "compiled.py").write_text("x = 1")
    py_compile.compile(foreign / "compiled.py")  # which is read in place of its source
    notes = tmp_path / ".rank0.opened.tmp"
    code = WATCH.format(text=text.format(foreign=foreign))
    subprocess.run([sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=tmp_path, check=True)
    data, sources = opened.foreign(opened.noted(tmp_path, 1))
    names = [os.path.basename(path) for path in [*(note["real"] for note in opened.without_small(data)), *sources]]
    assert names[0].startswith(expected) if expected else names == [], names


def test_what_a_process_changes_in_a_folder_that_it_has_open_is_noted(tmp_path):
    """A cheat: a link that the other arm reads is replaced, and no name says where."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a", "c"):
        (other / name).touch()
    change = f"fd = os.open({str(other)!r}, os.O_RDONLY); os.rename('a', 'b', src_dir_fd=fd, dst_dir_fd=fd)"
    code = WATCH.format(text=f"{change}; os.remove('c', dir_fd=fd); os.mkdir('d', dir_fd=fd)")
    notes = tmp_path / ".rank0.opened.tmp"
    subprocess.run([sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=tmp_path, check=True)
    written = {note["path"] for note in opened.noted(tmp_path, 1) if note["writes"]}
    assert {str(other / name) for name in "bcd"} <= written


def _files_of(folder, notes):
    script = SimpleNamespace(sandbox=False, root=folder / "root", sources={})
    config = SimpleNamespace(track=SimpleNamespace(fixed={}))
    job = SimpleNamespace(script=script, dataset=SimpleNamespace(train=[], val=[]), config=config)
    return OpenedFiles(folder / "run", job, notes, {"train": [], "val": []})


def test_a_process_that_looks_for_very_many_files_is_not_one_that_reads_others(tmp_path):
    text = f"for number in range(1200):\n    try: open(f'{tmp_path}/missing' + str(number))\n    except OSError: pass"
    notes = tmp_path / ".rank0.opened.tmp"
    code = WATCH.format(text=text)
    subprocess.run([sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=tmp_path, check=True)
    found = opened.noted(tmp_path, 1)
    assert len(found) == open_watch.MAX_MISSING and all(map(opened.is_missing, found))


def test_what_a_process_looks_for_and_links_that_it_exchanges_are_noted(tmp_path):
    """Cheats: a file is removed before the other arm looks for it, a link to a folder leads to another one."""
    other = tmp_path / "other"
    (other / "v1").mkdir(parents=True)
    (other / "v1" / "conf.txt").write_text("x")
    for name in ("current", "latest"):
        (other / name).symlink_to("v1")
    text = (
        "os.remove('{0}/current'); os.symlink('v2', '{0}/new'); os.rename('{0}/new', '{0}/latest')\n"
        "try: open('{0}/missing.txt')\n"
        "except OSError: open('{0}/v1/conf.txt')\n"
        "open('{0}/made.txt', 'w').close(); open('{0}/made.txt')\n"
        "try: open('{0}/late.txt')\n"
        "except OSError: os.write(os.open('late.txt', os.O_CREAT | os.O_WRONLY, dir_fd=os.open('{0}', 0)), b'x')\n"
        "open('{0}/late.txt')"
    )
    notes = tmp_path / ".rank0.opened.tmp"
    code = WATCH.format(text=text.format(other))
    subprocess.run([sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=tmp_path, check=True)
    found = opened.noted(tmp_path, 1)
    changed = {note["path"] for note in found if note["writes"] or note["hides"]}
    assert {str(other / name) for name in ("current", "latest", "made.txt")} <= changed
    missing = [note["path"] for note in found if opened.is_missing(note)]
    assert missing == [str(other / "missing.txt"), str(other / "late.txt")]
    read = [note["path"] for note in opened.foreign(found)[0]]  # what another program made meanwhile, too
    assert read == [str(other / "late.txt"), str(other / "v1" / "conf.txt")]
    states = _files_of(tmp_path, found).elsewhere()
    assert states[str(other / "missing.txt")] == [0, 0] and states[str(other / "v1" / "conf.txt")][0] == 1
    assert str(other / "made.txt") not in states


@pytest.mark.slow
@pytest.mark.parametrize("where", ["beside the script", "in a temporary folder", "and the results folder is a link"])
def test_a_link_to_data_beside_a_script_or_in_a_folder_that_it_removes_ends_no_race(tmp_path, where):
    data = tmp_path / "data.bin"
    data.write_bytes(bytes(2**18))
    temporary = (
        f"import os, tempfile; folder = tempfile.TemporaryDirectory(); os.symlink({str(data)!r}, folder.name + '/x')\n"
    )
    line = "print(f'step:{step}/3 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    for arm in "ab":
        (tmp_path / arm).mkdir()
        (tmp_path / arm / "data.bin").symlink_to(data)
        opens = (
            temporary + "open(folder.name + '/x', 'rb').read()"
            if "temporary" in where
            else "open('data.bin', 'rb').read()"
        )
        (tmp_path / arm / "train.py").write_text(f"{opens}\nfor step in range(4): {line}\n# {arm}\nARM = {arm!r}\n")
    arms = [f"{arm.upper()}=script={tmp_path / arm / 'train.py'}" for arm in "ab"]
    if "results" in where:
        (tmp_path / "real").mkdir()
        (tmp_path / "results").symlink_to("real")
    done = real_runs.bench(tmp_path / "results", "race", *arms, *scripted.TRACK, "n=2", "--anyway")
    (race,) = (tmp_path / "results" / "races").iterdir()
    assert json.loads((race / "race.json").read_text())["why"] is None, done.stdout
    names = {
        name
        for run in real_runs.folders(tmp_path / "results")
        for name in real_runs.run_json(run)["script"]["data_states"]
    }
    assert names == {"work/data.bin"} or "temporary" in where


def test_temporary_files_that_a_run_has_removed_are_not_written_and_a_switch_is(tmp_path):
    """The last is a cheat: an empty file that the other arm looks for is removed, made anew and removed."""
    (tmp_path / "other").mkdir()
    for name in ("there.txt", "switch"):
        (tmp_path / "other" / name).write_text("x" * (name != "switch"))
    (tmp_path / "other" / "touched").write_text("x")
    (tmp_path / "other" / "folder").mkdir()
    text = f"os.chdir({str(tmp_path / 'other')!r})\nos.utime('touched'); open('touched').read()\n"
    text += "os.symlink('folder', 'linked'); os.mkdir('empty')\n"
    text += "for name in ('new.txt', 'there.txt', 'switch'):\n"
    text += "    if name != 'new.txt': os.remove(name)\n    open(name, 'w').write('x')\n    os.remove(name)"
    notes = tmp_path / ".rank0.opened.tmp"
    code = WATCH.format(text=text)
    subprocess.run([sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=tmp_path, check=True)
    files = _files_of(tmp_path, opened.noted(tmp_path, 1))
    assert files.written() == [str(tmp_path / "other" / name) for name in ("linked", "switch", "there.txt", "touched")]
    assert files.elsewhere() == {}  # what it touches itself is its own to change


def test_of_more_files_than_are_listed_the_last_change_is(tmp_path, monkeypatch):
    """A cheat: the other arm writes to a file beyond the end of the list."""
    (tmp_path / "many").mkdir()
    for number in range(30):
        (tmp_path / "many" / f"{number}.txt").write_text("x")
    (tmp_path / "settings.txt").write_text("x")
    text = f"import glob\nfor path in glob.glob({str(tmp_path)!r} + '/**/*.txt', recursive=True): open(path)\n"
    text += f"for number in range(30): open({str(tmp_path)!r} + '/many/out%d' % number, 'w').close()\n"
    text += f"open({str(tmp_path)!r} + '/out', 'w').close()"
    notes = tmp_path / ".rank0.opened.tmp"
    code = WATCH.format(text=text)
    subprocess.run([sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=tmp_path, check=True)
    files = _files_of(tmp_path, opened.noted(tmp_path, 1))
    monkeypatch.setattr(work_folder, "MAX_LISTED", 5)
    states, last_ns = files.elsewhere(), max(path.stat().st_ctime_ns for path in (tmp_path / "many").glob("*.txt"))
    assert states[str(tmp_path / "settings.txt")][0] == 1 and len(states) == 6
    assert states[open_watch.OTHERS] == [26, pytest.approx(last_ns, abs=10**9)]
    assert files.written() == [f"{tmp_path}/many", f"{tmp_path}/out"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("os.symlink('0f3a' * 99, '{other}/w0')", "w0"),  # read back by os.readlink, which no event tells of
        ("open('{other}/x', 'w').close(); os.setxattr('{other}/x', 'user.w', b'0f3a')", "x"),
        ("os.utime('{other}/here', ns=(1, 0x0f3a))", "here"),
        ("os.symlink('0f3a' * 99, 'w0', dir_fd=os.open('{other}', os.O_RDONLY))", "w0"),
        ("[os.mkdir('%03d' % number, dir_fd=os.open('{other}', os.O_RDONLY)) for number in range(300)]", "000"),
        ("os.symlink('x', '{other}/w0'); os.remove('{other}/w0')", None),
        ("os.symlink('x', 'w0')", None),  # in the run's own folder
        ("[os.mkdir('{other}/%03d' % number) for number in range(300)]", "000"),  # weights in their names
        ("[open('{other}/%03d' % number, 'w').close() for number in range(300)]", "000"),
        ("[open('{other}/old%03d' % number, 'a').close() for number in range(300)]", None),  # they were there
        ("[os.mkdir('{other}/%03d' % number) for number in range(9)]", None),
        ("[open('%03d' % number, 'w').close() for number in range(300)]", None),
    ],
)
def test_links_times_and_attributes_that_a_run_leaves_elsewhere_are_doubted(tmp_path, text, name, monkeypatch):
    """A cheat: weights that a later run finds without opening a file."""
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "here").touch()
    for number in range(300):
        (other / f"old{number:03}").write_text("x")
    notes = folder / ".rank0.opened.tmp"
    code = WATCH.format(text=text.format(other=other))
    done = subprocess.run(
        [sys.executable, "-c", code, open_watch.__file__, str(notes)], cwd=folder, stderr=subprocess.PIPE
    )
    if b"Operation not supported" in done.stderr:
        pytest.skip("this file system has no extended attributes")
    assert done.returncode == 0, done.stderr
    job = SimpleNamespace(config=SimpleNamespace(hardware=SimpleNamespace(num_processes=1)))
    monkeypatch.setattr(opened, "fixes_data", lambda job: True)
    doubts = [doubt["doubt"] for doubt in opened.doubts_about_own(folder, job, time.time() + 9)]
    assert [f"/other/{name}" in doubt for doubt in doubts] == [True] * (name is not None)


def test_files_in_shared_memory_that_are_new_and_that_nobody_has_open_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(opened, "MEMORY", str(tmp_path))
    began_s = time.time() - 1
    (tmp_path / "left").write_bytes(bytes(9))
    (tmp_path / "old").write_bytes(bytes(9))
    with open(tmp_path / "held", "wb"), open(tmp_path / "mapped", "wb+") as file:
        file.write(bytes(9))
        file.flush()
        with mmap.mmap(file.fileno(), 9):
            assert opened._left_in_memory(began_s) == [str(tmp_path / "left"), str(tmp_path / "old")]
    assert opened._left_in_memory(time.time() + 9) == []


def test_a_folder_of_pythonpath_is_foreign_whatever_its_name(tmp_path):
    """The cheapest cheat: script.env.PYTHONPATH with a folder that is called site-packages."""
    packages, notes = tmp_path / "site-packages", tmp_path / ".rank0.opened.tmp"
    packages.mkdir()
    (packages / "secretmod.py").write_text("x = 1")
    command = [sys.executable, "-c", WATCH.format(text="import secretmod"), open_watch.__file__, str(notes)]
    subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(packages)})
    assert opened.foreign(opened.noted(tmp_path, 1)) == ([], [str(packages / "secretmod.py")])


def test_a_script_that_writes_below_the_folder_of_another_arm_is_doubted(tmp_path):
    script, other = tmp_path / "mine/train.py", tmp_path / "other"
    script.parent.mkdir()
    other.mkdir()
    line = "print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    writes = f"for path in ({str(script.parent)!r}, {str(other)!r}, '.'): open(path + '/data.bin', 'wb').write(b'x')"
    script.write_text(f"{writes}\nfor step in range(3): {line}\n")
    arms = os.pathsep.join([str(tmp_path), str(script.parent), str(other)])  # the folder of results is an arm's, too
    run = real_runs.run_json(scripted.run(tmp_path / "results", script, "track=free", RACE_ARMS=arms))
    doubts = [doubt for doubt in script_doubts(run) if "arm" in doubt]
    assert doubts == [f"it wrote to a file of another arm of its race: {other}/data.bin"]


@pytest.mark.slow
def test_where_the_track_fixes_no_data_a_script_may_bring_its_own(planted, tmp_path):
    own = tmp_path / "own.bin"
    own.write_bytes(b"own")
    (tmp_path / "own.txt").write_text("small")
    run = scripted.odd(tmp_path / "free", f"own_data,{own}", "track=free")
    assert script_doubts(run) == [] and faults(run["folder"]) == []
    assert run["data"] == {"source": "script", "vocab_size": None, "floor_nats": None, "train": [], "val": []}
    assert run["script"]["opened"][0].endswith("own.bin")
    rows = [row_of(run) | {"run_id": run_id} for run_id in "ab"]
    judgement = eligibility.judge(rows[:1], rows[1:])
    assert judgement.refusals == [] and "data-unknown" in judgement.flags
    states = [run["script"]["elsewhere"][private.redact(str(own.with_suffix(end)), REPO)] for end in (".bin", ".txt")]
    assert [size for size, _ in states] == [3, 5] and len(run["script"]["data_states"]) == 1  # also small ones
    (tmp_path / "own.folder").mkdir()
    moves = scripted.odd(tmp_path / "moves", f"own_data,{own}", "track=free")
    assert {Path(path).name for path in moves["script"]["written"]} == {"own.out", "own.tee", "own.folder"}
    refused = script_doubts(scripted.odd(tmp_path / "nano", f"own_data,{own}"))
    assert any(doubt.startswith("it never opened the track's train shards") for doubt in refused)
    assert any("track=free" in doubt for doubt in refused)


@pytest.mark.parametrize("name", ["good", slow("untimed_first_steps"), "a_child_prints", slow("prints_much")])
def test_an_honest_script_is_not_doubted(planted, name):
    run = planted(name)
    assert run["status"] == "complete" and script_doubts(run) == []
    assert faults(run["folder"]) == []


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    results, ran = tmp_path_factory.mktemp("planted"), {}

    def of(what):
        if what not in ran:
            other = results / "other.bin"
            other.write_bytes(b"other")
            args = f"other_data,{other}" if what == "other_data" else what
            ran[what] = scripted.odd(results, args, f"name={what}")
        return ran[what]

    return of


def test_the_first_steps_that_a_clock_leaves_out_are_in_no_time(planted):
    run = planted("untimed_first_steps")
    assert run["measured"]["num_untimed_steps"] == 10
    assert run["metrics"]["step_avg_ms"] == pytest.approx(30, abs=8)


@pytest.mark.slow
def test_a_script_that_prints_64_mb_fills_no_disk(planted):
    run = planted("prints_much")
    assert run["script"]["num_unkept_lines"] > 50_000
    assert (run["folder"] / "logs" / "rank0.log").stat().st_size < 2 * 2**20
    assert [row["step"] for row in step_files.read(run["folder"])] == list(range(7))


def test_metric_lines_beyond_what_is_read_are_counted_and_doubted(tmp_path):
    """The last validation may be among them."""
    script = tmp_path / "train.py"
    line = "print(f'step:{n}/3000 train_loss:3.0 train_time:{n}ms step_avg:1.00ms')"
    script.write_text(f"for n in range(3000): {line}; print('of no metric')\n")
    changed = {"bench.launch.script.output.MAX_METRIC_BYTES": 100_000, "bench.launch.script.output.HEAD_BYTES": 1000}
    with real_runs.started(
        tmp_path / "results", "run", *scripted.TRACK, f"script={script}", changed=changed
    ) as process:
        process.communicate(timeout=100)
    (folder,) = real_runs.folders(tmp_path / "results")
    doubts = [doubt["doubt"] for doubt in real_runs.run_json(folder)["doubts"]]
    (count,) = re.findall(r"([\d,]+) metric lines after the first .* were not read: print fewer", " ".join(doubts))
    assert 3000 - 100_000 // 50 <= int(count.replace(",", "")) < 3000, doubts


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "exception", "KeyError: 'planted'"),
        ("exits", "exception", "the script ended with exit code 3: no data here: run prepare.py"),
        ("lacks_a_variable", "exception", "KeyError: 'PLANTED_DIR': the script needs this environment variable"),
        ("out_of_memory", "out_of_memory", "MemoryError: planted"),
        slow("asks_for_a_gpu", "no_gpu", "the script asks for a GPU, and torch"),
        ("silent", "no_metric_lines", "the script printed no line that a dialect"),
        ("garbage", "no_metric_lines", "the script printed no line that"),
        ("diverges", "non_finite_loss", "not a number at step 1"),
    ],
)
def test_a_script_that_fails_leaves_a_failed_record_that_says_why(tmp_path, name, kind, message):
    run = scripted.odd(tmp_path, name, expect=1)
    assert (run["status"], run["validity"], run["failure"]["kind"]) == ("failed", "invalid", kind)
    assert message in run["failure"]["message"]
    if name == "raises":
        assert 'raise KeyError("planted")' in (run["folder"] / "logs" / "rank0.log").read_text()
    assert not [path for path in run["folder"].iterdir() if path.name.startswith(".")]


def test_a_line_that_both_patterns_match_ends_a_script_at_once(tmp_path):
    (tmp_path / "two.yaml").write_text("step: 'step:(?P<step>[0-9]+)'\nval: '(?P<step>[0-9]+)/(?P<total>[0-9]+)'\n")
    run = scripted.odd(tmp_path, "hangs", f"script.dialect={tmp_path / 'two.yaml'}", expect=1)
    assert "two.yaml match the line 'step:0/" in run["failure"]["message"]


@pytest.fixture
def removed_after(tmp_path):
    """A folder that rm(1) removes: pytest does not get out of 1,500 folders within each other."""
    yield tmp_path
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_what_no_record_can_hold_is_named_and_the_run_is_complete(removed_after):
    run = scripted.odd(removed_after, "leaves_what_no_record_can_hold")  # 8 TiB to hash, a pipe to write to
    not_kept = run["not_kept"]
    deep = max(not_kept, key=len)
    assert deep == "work" + "/deep" * 63  # 64 folders
    assert set(not_kept) == {"work/holes.bin", "logs/holes.log", "work/not_\\xff.txt", deep}
    assert not_kept["work/holes.bin"] == "it has 4,398,046,511,104 bytes, most of which are a hole"
    assert not_kept["work/not_\\xff.txt"] == "its name is not UTF-8"
    assert not_kept[deep] == "it has more than 64 folders within each other"
    warned = [warning["error"] for warning in run["warnings"] if warning["instrument"] == "launcher"]
    assert [f"{name}: {why}" for name, why in not_kept.items()] == warned
    assert (run["status"], script_doubts(run), faults(run["folder"])) == ("complete", [], [])
    for arguments in (["report", str(run["folder"])], ["table"]):
        done = real_runs.bench(removed_after, *arguments)
        assert done.returncode == 0 and "damaged" not in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_pipe_in_the_place_of_a_records_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match="events.jsonl"):
        step_files.append_event(tmp_path, {"t_ns": 0, "event": "planted"})


def test_the_reading_of_its_files_is_ended_by_a_signal_that_the_record_names(tmp_path):
    arguments = ["run", *scripted.TRACK, f"script={scripted.ODD}", "script.args=[leaves_much]"]
    changed = {"bench.record.run_folder.BLOCK_BYTES": 1, "bench.machine.signals.PATIENCE_S": 0.2}
    process = real_runs.started(tmp_path, *arguments, changed=changed)
    much = real_runs.wait_for(lambda: list(tmp_path.glob("*/*/work/much.bin")))[0]
    real_runs.wait_for(lambda: not (much.parent / "train.py").exists())  # tidied: its files are read next
    process.terminate()
    out, _ = process.communicate(timeout=60)
    run = real_runs.run_json(much.parents[1])
    assert (process.returncode, run["status"], run["failure"]["kind"]) == (1, "aborted", "interrupted"), out
    assert run["failure"]["message"] == "the launcher got SIGTERM while it read the run's files for its record"
    assert run["not_kept"]["work/much.bin"] == "SIGTERM came before it was read"


def test_a_failure_file_of_the_scripts_own_is_no_traceback(tmp_path):
    run = scripted.odd(tmp_path, "lies_of_its_failure", expect=1)
    assert (run["status"], run["failure"]["kind"], run["failure"]["signal"]) == ("failed", "rank_killed", "SIGKILL")


def test_a_script_that_fills_a_gpu_leaves_a_snapshot_of_its_memory(tmp_path):
    run = scripted.odd(tmp_path, "a_gpu_is_full", expect=1)
    assert run["failure"]["kind"] == "out_of_memory"
    with (run["folder"] / "memory" / "oom_rank0.pickle").open("rb") as file:
        assert pickle.load(file)["segments"] == []
    assert "memory/oom_rank0.pickle" in [artifact["path"] for artifact in run["artifacts"]]


def test_a_killed_script_is_named_and_its_children_end(tmp_path):
    with scripted.hanging(tmp_path, *real_runs.TWO) as (launcher, folder):
        workers = [pid for pid in scripted.pids(tmp_path) if scripted.is_worker(pid)]
        os.kill(max(workers), signal.SIGKILL)
        assert launcher.wait(60) == 1
        assert scripted.all_gone(tmp_path)
    run = real_runs.run_json(folder)
    assert (run["status"], run["failure"]["kind"], run["failure"]["signal"]) == ("failed", "rank_killed", "SIGKILL")
    assert len(step_files.read(folder)) > 1  # what it had printed


def test_a_cache_that_is_removed_and_a_link_in_place_of_code_lose_no_run_and_lead_nowhere(tmp_path):
    """Both while it trains: its sources are then those of its own folder, and none is written through the link."""
    results, precious = tmp_path / "results", tmp_path / "precious"
    precious.mkdir()
    script = tmp_path / "train.py"
    at = f"glob.glob({str(results)!r} + '/*/*/code')"
    spoils = f"shutil.rmtree({str(tmp_path / 'cache')!r}, ignore_errors=True)\n"
    links = f"for code in {at}: shutil.rmtree(code); os.symlink({str(precious)!r}, code)\n"
    line = "print(f'step:{step}/3 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms', flush=True)\n"
    for text, code in ((spoils, 0), (links, 1)):
        script.write_text(f"import glob, os, shutil\n{text}for step in range(4): {line}")
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        words = ["track=free", f"name={'ab'[code]}", "script.torchrun=false"]
        folder = scripted.run(results, script, *words, expect=code, **cache)
        if code == 0:
            assert (folder / "code/script/train.py").read_text() == script.read_text()
    assert real_runs.run_json(folder)["failure"]["message"].startswith("[Errno 40] it is a link, through which nothing")
    assert not list(precious.iterdir())


ENDED = [(signal.SIGTERM, True), slow(signal.SIGKILL, True), slow(signal.SIGKILL, False)]


@pytest.mark.parametrize(("number", "has_work"), ENDED)
def test_nothing_remains_of_a_script_whose_launcher_is_ended(tmp_path, number, has_work):
    with scripted.hanging(tmp_path) as (launcher, folder):
        if not has_work:  # the script has removed the folder in which it was started
            shutil.rmtree(folder / "work")
        launcher.send_signal(number)
        launcher.wait(60)
        assert scripted.all_gone(tmp_path)
    shown = run_folder.read(folder)
    assert (shown["status"], shown["validity"]) == ("aborted", "invalid")
    assert shown["failure"]["kind"] == ("interrupted" if number == signal.SIGTERM else "launcher_killed")
    real_runs.wait_for(lambda: run_folder.read_raw(folder)["status"] == "aborted")  # its guard has finished the record
    assert [rule["rule"] for rule in faults(folder)] == ["is complete"]


@pytest.mark.parametrize("how", ["removed", slow("a link"), slow("with all results")])
def test_nothing_is_written_where_a_folder_was_taken_from_its_running_script(tmp_path, how):
    other, results, moved = tmp_path / "other", tmp_path / "results", tmp_path / "moved"
    other.mkdir()
    with scripted.hanging(results) as (launcher, folder):
        (results if how == "with all results" else folder).rename(moved)
        if how == "a link":
            folder.symlink_to(other)
        assert launcher.wait(60) == 1 and scripted.all_gone(results)
    if how == "with all results":
        assert not results.exists() and [line["event"] for line in ledger.read(moved).lines] == ["start"]
        return
    assert folder.is_symlink() == (how == "a link") and folder.exists() == (how == "a link")
    assert list(other.iterdir()) == []
    end = ledger.read(results).lines[-1]
    assert (end["event"], end["failure"], end["run_json_sha256"]) == ("end", "folder_removed", None)


def test_a_race_says_after_a_warm_up_that_a_script_will_not_be_compared(planted, capsys):
    def warned(what):
        run = planted(what)
        attempts = [(f"cpu_nano/{run['folder'].name}", None)]
        runner._warn_of_doubts(SimpleNamespace(arm="B", attempts=attempts), run["folder"].parent.parent)
        return capsys.readouterr().out

    assert warned("good") == ""
    assert "warn  the times of B will not be compared" in (warning := warned("other_data")) and warning.count("\n") == 1


@pytest.mark.slow
def test_two_scripts_race_by_a_plan_to_a_verdict_that_judge_reads(tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(scripted.MODDED.parent, mine)
    faster = (mine / "train_gpt.py").read_text().replace("sleep(0.02)", "sleep(0.01)").replace('"0.3"', '"0.31"')
    (mine / "train_gpt.py").write_text(faster)
    results = tmp_path / "results"
    arguments = [f"A=script={scripted.MODDED}", f"B=script={mine / 'train_gpt.py'}", "n=2", "--json", *scripted.TRACK]
    done = real_runs.bench(results, "race", *arguments, "--anyway", timeout_s=900, code=0)
    against = json.loads(done.stdout)["result"]["against"]["B"]
    assert against["comparable"] and against["time"]["change_pct"] < -10
    (folder,) = (results / "races").iterdir()
    judged = real_runs.bench(results, "judge", str(folder), "--json")
    rules = {rule["rule"]: rule for rule in json.loads(judged.stdout)["rules"]}
    for name in ("every record is internally consistent", "no run was left out", "the plan was made first"):
        assert rules[name]["passed"], rules[name]
    assert not rules["every run has its own seed"]["passed"]  # both draw the seed that stands in the script
    assert "printed the same losses throughout" in rules["every run has its own seed"]["evidence"]
    starts = [line["start"] for line in ledger.read(results).runs.values()]
    assert len({start["source_sha256"] for start in starts}) == 2


@pytest.mark.slow
def test_steps_of_a_script_are_profiled_by_its_printed_lines_and_do_not_count(tmp_path):
    overrides = ["profile=window", "profile.stop_after_window=true", "script.args=[2000]"]  # else it would take minutes
    folder = scripted.run(tmp_path, scripted.MODDED, *overrides, *real_runs.TWO)
    run, rows = real_runs.run_json(folder), step_files.read(folder)
    flagged = [step for step in (5, 6, 7, 8, 9) if step <= rows[-1]["step"]]  # 9 may be printed after the end is asked
    assert [row["step"] for row in rows if row["flags"] == "profiled"] == flagged
    assert run["metrics"]["num_flagged_steps"] == len(flagged) >= 4
    for rank in range(2):  # rank 1 prints nothing: its steps are numbered by rank 0's
        (trace,) = (folder / "traces").glob(f"*_rank{rank}.*")
        names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {"ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"} <= names and "ProfilerStep#9" not in names
        assert any(name and "SGD.step" in name for name in names)
    assert run["instrument_summaries"]["window"]["window"]["status"] == "recorded"
    assert (run["status"], run["failure"]["kind"]) == ("stopped", "stopped") and 8 <= run["failure"]["step"] < 500
    assert [rule["rule"] for rule in faults(folder)] == ["is complete"] and scripted.all_gone(tmp_path)
    real_runs.bench(tmp_path, "analyze", str(folder), code=0)


@pytest.mark.slow
def test_a_schedule_of_torchs_records_a_script_in_cycles(tmp_path):
    schedule = "profile.schedule={wait:1,warmup:1,active:2,repeat:2,skip_first:2}"  # 5 and 6, then 9 and 10
    overrides = [schedule, "profile.stop_after_window=true", "script.args=[2000]"]
    folder = scripted.run(tmp_path, scripted.MODDED, *overrides, *real_runs.TWO)
    for cycle, steps in ((1, (5, 6)), (2, (9, 10))):
        for rank in range(2):
            trace = gzip.decompress((folder / f"traces/trace_cycle{cycle}_rank{rank}.pt.trace.json.gz").read_bytes())
            events = [event.get("name") or "" for event in json.loads(trace)["traceEvents"]]
            assert [name for name in events if name.startswith("ProfilerStep")] == [
                f"ProfilerStep#{step}" for step in steps
            ]
    windows = real_runs.run_json(folder)["instrument_summaries"]["trace"]
    assert {name: window["status"] for name, window in windows.items()} == dict.fromkeys(
        ("trace_cycle1", "trace_cycle2"), "recorded"
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("a cheat", "1 run of B cannot be trusted: it claims less time than its lines took"),
        ("a run of ours", "timing protocol differs: script-1 in A, tp-1 in B"),
    ],
)
def test_a_script_is_compared_neither_with_a_cheat_nor_with_our_own_runs(planted, finished_run, printed, other, why):
    b = planted("trains_on_val_and_claims_less")["folder"] if other == "a cheat" else finished_run
    assert why in " ".join(printed(program, "compare", str(planted("good")["folder"]), b, code=2).split())


def test_two_versions_of_torch_may_race_as_scripts_and_the_answer_says_so(planted):
    a = row_of(planted("good"))
    setting = json.loads(a["setting"]) | {"torch": "2.13"}  # the planted script imports none
    a |= {"setting": json.dumps(setting)}
    b = a | {"run_id": "other", "script_doubt": None}
    others = [b | {"setting": json.dumps(setting | {"torch": "1.13"}), "comparability_id": "f" * 16}]
    judgement = eligibility.judge([a], others)
    assert judgement.refusals == [] and "software-differs" in judgement.flags
    assert any("torch differs: " in remark and remark.endswith("part of what is raced") for remark in judgement.remarks)
    others = [b | {"setting": json.dumps(setting | {"world_size": 2}), "comparability_id": "f" * 16}]
    assert any("world size differs" in refusal for refusal in eligibility.judge([a], others).refusals)


def test_arms_of_scripts_may_have_a_torch_each_and_one_arm_may_not_mix_them(planted):
    good = planted("good")

    def raced(torch, **facts):
        environment = good["environment"] | {"torch": torch}
        record = good | {"environment": environment, "comparability_id": f"of torch {torch}"} | facts
        return SimpleNamespace(record=record)

    def judged(own, others):
        return runs.the_runs_share_one_setting(SimpleNamespace(runs=own, others=others, is_of_logs=False))

    passed, sentence = judged([raced("2.13"), raced("2.13")], [raced("2.12")])
    assert passed and sentence.endswith("; torch differ, part of what is raced")
    assert not judged([raced("2.13"), raced("2.12")], [raced("2.12")])[0]
    assert not judged([raced("2.13")], [raced("2.12", script=None)])[0]
    assert not judged([raced("2.13")], [raced("2.13", comparability_id="of another driver")])[0]


def test_a_file_beside_a_script_that_changes_while_it_runs_is_named(tmp_path):
    """It is reached through a link; torch.save opens it unseen by Python."""
    folder = tmp_path / "mine"
    shutil.copytree(scripted.NANO.parent, folder)
    (folder / "ckpt").mkdir()
    for name in ("model.pt", "ckpt/best.pt", "ckpt/other.pt"):
        (folder / name).write_bytes(b"of two days")
    save = "\nfor name in ('model.pt', 'ckpt/best.pt'):\n    torch.save({}, name)\n"
    with open(folder / "train.py", "a") as script:
        script.write(save)
    run = real_runs.run_json(scripted.run(tmp_path / "results", folder / "train.py", *NANO))
    (warning,) = [warning["error"] for warning in run["warnings"] if warning["instrument"] == "script"]
    changed, _, rest = warning.partition(" beside it ")
    assert sorted(changed.split(", ")) == ["ckpt/best.pt", "model.pt"] and rest.startswith("changed while it ran, ")


def test_an_edit_of_a_source_beside_the_script_is_another_identity_and_what_it_writes_is_none(tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(scripted.MODDED.parent, folder)
    own = [f"{folder / 'train_gpt.py'}:__main__"]

    def identity():
        code_state._sha256_of.cache_clear()
        return arm_process.source_sha256(real_runs.REPO, own)

    before = identity()
    (folder / "logs").mkdir()
    (folder / "logs" / "old.py").write_text("1")
    (folder / "weights.pt").write_bytes(b"1")
    killed = folder / "mine" / "free" / "run" / "work"  # in a results folder, by its ledger
    killed.mkdir(parents=True)
    (killed / "copy.py").write_text("1")
    (folder / "mine" / "ledger.jsonl").touch()
    assert identity() == before
    (folder / "helper.py").write_text((folder / "helper.py").read_text() + "\nx = 1\n")
    edited = identity()
    assert edited != before
    (folder / "settings.json").write_text("{}")
    assert identity() not in (before, edited)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["script=nothing.py"], "script=nothing.py: there is no such file"),
        (["script=/dev/null"], "script=/dev/null: is not a regular file"),
        (["script=ODD", "model=modern"], "model=modern: script="),
        (["script=ODD", "optim.lr=1"], "has its own model and optimizer, and saves its weights: remove it"),
        (["script=ODD", "instruments=[regions]"], "a script is measured from outside"),
        (["script=ODD", "profile=stages"], "use modded or null or window"),
        (["script.args=[3]"], "there is no script"),
        (["script=ODD", "script.python=no-python"], "there is no such interpreter"),
        (["script=ODD", "script.data=/tmp/data"], "use a folder below the script's own"),
        (["script=ODD", "script.env={TOY_TOKEN: null}"], "it looks like a secret"),
        (["script=ODD", "script.dialect=nothing.yaml"], "cannot be read"),
        (["script=ODD", "script.env={TOY_LATIN: null}"], "script.env.TOY_LATIN=null: its value is not UTF-8"),
        (["script=ODD", "script.args=[M\udcfcller]"], "M\\xfcller]: has bytes that are not UTF-8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(results, capsys, overrides, message, monkeypatch):
    monkeypatch.setenv("TOY_LATIN", "M\udcfcller")
    overrides = [override.replace("ODD", str(scripted.ODD)) for override in overrides]
    assert program.main(["run", *scripted.TRACK, *overrides]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert real_runs.folders(results) == []


def test_a_script_gets_the_variables_that_the_record_names_and_no_others(tmp_path):
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    names = ("TOY", "HIDDEN", "RANK", "OMP_NUM_THREADS")
    script.write_text(f"import os\nprint({{name: os.environ.get(name) for name in {names}}})\n")
    folder = scripted.run(tmp_path / "r", script, "script.env={TOY: 3}", expect=1, HIDDEN="1")
    printed = (folder / "logs" / "rank0.log").read_text()
    assert "'TOY': '3', 'HIDDEN': None, 'RANK': '0'" in printed
    assert real_runs.run_json(folder)["script"]["env"] == {"TOY": "3"}


LLM_C_ROW = {"step": 7, "total": 9, "train_loss": 9.5, "grad_norm": 1.5, "lr": 2e-6, "step_ms": 812.5}


@pytest.mark.parametrize(
    ("name", "line", "row"),
    [
        ("modded-nanogpt", "step:3/9 train_time:12ms step_avg:4.0ms", {"step": 3, "total": 9, "train_time_ms": 12.0}),
        (
            "modded-nanogpt",
            "step:125/3250 val_loss:4.56789 train_time:0.500s step_avg:4.00ms",
            {"step": 125, "total": 3250, "val_loss": 4.56789, "train_time_ms": 500.0},
        ),
        ("modded-nanogpt", "s:7 tel:3.5", {"step": 7, "val_loss": 3.5}),
        ("nanogpt", "iter 10: loss 5.5, time 2.50ms, mfu 1.0%", {"step": 11, "train_loss": 5.5, "step_ms": 2.5}),
        ("nanogpt", "step 20: train loss 4.1, val loss 4.2", {"step": 20, "val_loss": 4.2}),
        ("llm.c", "step    7/9 | train loss 9.5 | norm 1.5 | lr 2.00e-06 | (812.5 ms | 645280 tok/s)", LLM_C_ROW),
        ("llm.c", "step    7/9 | loss 9.5 (+nanz)| norm 1.5 (-0.53z)| lr 2.00e-06 | 812.5 ms | 31.9% bf16", LLM_C_ROW),
        ("llm.c", "val loss 9.25", {"step": 0, "val_loss": 9.25}),
        ("modded-nanogpt", "iter 10: loss 5.5, time 2.50ms, mfu 1.0%", None),
        ("nanogpt", "step:3/9 train_time:12ms step_avg:4.0ms", None),
    ],
)
def test_a_line_reads_as_its_dialect_has_it(name, line, row):
    assert dialects.reader_of(name).row(line) == row
    assert row is None or dialects.detect([line, "other words"]) == name
