"""Files that once got through, each real: bombs, damaged records, pipes; and docs/ names the test of each fault."""

import gzip
import os
import re
import resource
import subprocess
import sys

import pytest
import real_runs
from comparing import raced, write

from bench.base.units import MIB
from bench.cli import compare
from bench.cli.main import main as bench

slow = pytest.mark.slow


def _within(cpu_s, memory_bytes):
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


@pytest.mark.parametrize(
    "block",
    [b" " * MIB, pytest.param(b'{"ph":"X","ts":1,"dur":1,"name":"a","pid":1,"tid":1},' * 20_000, marks=slow)],
    ids=["blanks", "events"],
)
def test_a_small_file_that_unpacks_to_gigabytes_is_refused_at_once(tmp_path, block):
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents":[')
        for _ in range(300):
            file.write(block)
        file.write(b"]}")
    command = [sys.executable, "-m", "bench", "analyze", str(path)]
    bounds = {"preexec_fn": lambda: _within(5, 500 * MIB), "env": real_runs.environment(tmp_path)}
    done = subprocess.run(command, cwd=real_runs.REPO, capture_output=True, text=True, **bounds)
    assert done.returncode == 2, done  # neither 5 s of CPU nor 500 MiB
    assert re.search("unpack to more than .* times as many, as no trace does", done.stderr), done.stderr


def test_a_damaged_record_given_to_compare_is_refused_and_its_log_is_no_run(results, capsys):
    folders = [write(results, run) for arm in raced([10.0], [10.5]) for run in arm]
    bad = folders[0]
    (bad / "logs").mkdir()
    lines = "step:1/2 val_loss:5.0 train_time:10ms\nstep:2/2 val_loss:4.0 train_time:20ms\n"
    (bad / "logs" / "rank0.log").write_text(lines)
    (bad / "run.json").write_text("{")
    with pytest.raises(ValueError, match="none of its records can be read"):
        compare.main([str(bad), str(folders[1])])
    assert "run.json" in capsys.readouterr().err


def test_an_export_of_nothing_that_can_be_read_is_wrong_use(tmp_path, capsys):
    bad = tmp_path / "cpu_nano" / "20261122T000001Z-x-48623a63-s1"
    bad.mkdir(parents=True)
    (bad / "run.json").write_text('{"schema_version": 1, "run_id": 7}')
    assert bench(["export", str(bad), "--to", "csv"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "run.json" in err


def test_data_show_waits_for_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.bin")
    done = real_runs.bench(tmp_path, "data", "show", str(tmp_path / "pipe.bin"), timeout_s=60)
    assert done.returncode == 1 and "not a regular file" in done.stdout + done.stderr


# ---- what docs/ promises has a test


def test_every_test_that_the_guarantees_name_is_there():
    names = re.findall(r"`(test_\w+\.py)::(\w+)`", (real_runs.REPO / "docs/reference/guarantees.md").read_text())
    assert len(names) >= 20
    for file, name in names:
        assert f"\ndef {name}(" in (real_runs.REPO / "tests" / file).read_text(), f"{file}::{name}"
