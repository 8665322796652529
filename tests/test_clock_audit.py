"""./run.sh audit --only clock: work that a script moves out of its clock is found, wherever it hides."""

import itertools
import json
import re
import subprocess
import sys
import time

import pytest
import real_runs
import scripted
from cases import slow

from bench.record import off_clock
from bench.record.clock_lines import AFTER, BEFORE, PAUSE, TIMED

SCRIPT = scripted.SCRIPTS / "clock" / "train.py"
SAMPLER = real_runs.REPO / "bench" / "training" / "line_sampler.py"
TABLE = "rows = table(0.3)"
TEXT = SCRIPT.read_text()
WITHOUT = TEXT.replace(f"{TABLE}  # TIMED\n", "")
APART_NS, MOST_TRIES = 40_000_000, 5  # of CPU time between two samples
DRIVER = """
import os, runpy, sys
samples, sampler, script = sys.argv[1:]
end = runpy.run_path(sampler)["start"](samples, os.path.dirname(script), os.getppid())
sys.argv[:] = [script]
runpy.run_path(script, run_name="__main__")
end()
"""
THREAD = "w = threading.Thread(target=table, args=(0.3,))\nw.start()\nw.join()"
SUBPROCESS = "subprocess.run([sys.executable, '-c', 'sum(range(20_000_000))'])"
OTHER_CLOCK = f"a = time.perf_counter()\n{TABLE}\nspent = time.perf_counter() - a"
DAEMON = """pid = os.fork()
if pid == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    table(0.4)
    os._exit(0)
os.waitpid(pid, 0)
time.sleep(2)"""


def sampled(folder, text):
    """The account of a script that runs under the sampler, by a process that stamps its lines.

    What a script computes between two samples counts where the second one sees it, and a clock is only known by samples
    near its readings.  On a busy machine the sampler waits for a core while the script has one: then it is run again.
    """
    folder.mkdir()
    (folder / "train.py").write_text(text)
    for _ in range(MOST_TRIES):
        samples, account = _sampled_once(folder, text)
        rows = [row for row in map(json.loads, samples) if len(row) == 5 and isinstance(row[0], int)]
        is_dense = all(b[1] - a[1] < APART_NS for a, b in itertools.pairwise(rows))
        if (is_dense or "20_000_000" in text) and not account["doubt"]:  # that one is C, which lets no sampler in
            break
        (folder / "samples").unlink()
    return account


def _sampled_once(folder, text):
    command = [sys.executable, "-c", DRIVER, folder / "samples", SAMPLER, folder / "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [(time.perf_counter_ns(), line) for line in process.stdout]
    assert process.returncode == 0
    stamps_ns = [(t_ns, "val_loss" in line) for t_ns, line in lines]
    train_s = int(re.findall(r"val_loss:\S+ train_time:(\d+)ms", "".join(line for _, line in lines))[-1]) / 1e3
    samples = (folder / "samples").read_text().splitlines()
    return samples, off_clock.account(samples, "train.py", {"train.py": text}, stamps_ns, train_s)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return sampled(tmp_path_factory.mktemp("base") / "run", TEXT)


def test_the_phases_add_up_to_what_the_script_prints(baseline):
    seconds = {used["phase"]: used["cpu_s"] for used in baseline["phases"]}
    assert (baseline["by"], baseline["doubt"]) == ("the source", None)
    assert seconds[TIMED] == pytest.approx(0.38, abs=0.08) and seconds[PAUSE] == pytest.approx(0.09, abs=0.05)
    assert off_clock.beyond(baseline, baseline) == []


@pytest.mark.parametrize(
    ("where", "text", "phase", "line"),
    [
        ("before the start", WITHOUT.replace("# BEFORE", TABLE), BEFORE, TABLE),
        ("in validations", WITHOUT.replace("# PAUSE", "rows = table(0.1)"), PAUSE, "rows = table(0.1)"),
        ("after the last step", WITHOUT.replace("# AFTER", TABLE), AFTER, TABLE),
        ("in a thread", WITHOUT.replace("# BEFORE", THREAD), BEFORE, "w.join()"),
        ("in a subprocess", WITHOUT.replace("# BEFORE", SUBPROCESS), BEFORE, "subprocess.run("),
        ("in C", WITHOUT.replace("# BEFORE", "rows = sum(range(20_000_000))"), BEFORE, "rows = sum("),
        slow("under another clock", WITHOUT.replace("# BEFORE", OTHER_CLOCK), BEFORE, TABLE),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 and " " in value else "",
)
def test_a_table_outside_the_clock_is_found_with_its_line(baseline, tmp_path, where, text, phase, line):
    account = sampled(tmp_path / "run", text)
    (first, *_) = off_clock.beyond(account, baseline)
    number = next(number for number, source in enumerate(text.splitlines(), 1) if source.strip().startswith(line))
    # C holds the interpreter's lock until it returns, so that a sample may fall on one of the next lines
    near = [place for place in range(number, number + 1 + 2 * (where == "in C")) if f"train.py:{place} " in first]
    assert phase in first and near and (near[0] != number or line in first), first
    assert float(first.split()[0]) > 0.1
    assert ("moved out of the timed region" in first) == (line == TABLE), first
    assert (account["by"] == "the printed lines") == (where == "under another clock")


def test_bytes_that_are_read_before_the_clock_are_counted(baseline, tmp_path):
    (tmp_path / "big.bin").write_bytes(bytes(40 * 2**20))
    reads = f"data = open({str(tmp_path / 'big.bin')!r}, 'rb').read()"
    account = sampled(tmp_path / "run", TEXT.replace("# BEFORE", reads))
    sentences = off_clock.beyond(account, baseline)
    assert any("40 MiB read before the clock starts" in sentence for sentence in sentences), sentences


# ---- the account, of made samples

MADE = "import time\nt0 = time.time()\nwork()\ntotal = time.time() - t0\nprint(total)\n"


def made(*places, every_s=0.1):
    """Samples at these lines of MADE, of 0.1 s of wall and CPU time each."""
    numbers = sorted({*places})
    chains = [json.dumps([[]]), *(json.dumps([[["train.py", number, "<module>"]]]) for number in numbers)]
    rows = [[round(1e9 * every_s * n), round(1e9 * every_s * n), 0, 0] for n in range(len(places) + 1)]
    return chains + [
        json.dumps([*row, 0 if n == 0 else 1 + numbers.index(places[n - 1])]) for n, row in enumerate(rows)
    ]


def test_a_clock_that_is_not_the_one_printed_is_no_clock():
    script, stamps_ns = ("train.py", {"train.py": MADE}), [(10**8, False), (3 * 10**8, False)]
    spent = off_clock.account(made(3, 3, 3, 5), *script, stamps_ns, 0.3)
    assert spent["by"] == "the source" and [used["cpu_s"] for used in spent["phases"]] == pytest.approx([0.3, 0.1])
    spent = off_clock.account(made(*[3] * 9), *script, stamps_ns, 0.3)
    assert spent["by"] == "the printed lines" and "took 0.90 s, it prints 0.30 s" in spent["doubt"]
    assert {used["phase"]: round(used["cpu_s"], 1) for used in spent["phases"]} == {BEFORE: 0.1, TIMED: 0.2, AFTER: 0.6}


def test_samples_that_end_before_the_script_does_are_refused():
    for samples, why in ((made(3, 3), "it ended its sampler"), ([], "was not sampled")):
        with pytest.raises(ValueError, match=why):
            off_clock.account(samples, "train.py", {"train.py": MADE}, [(10**10, False)], 0.3)


@pytest.mark.slow
def test_the_audit_of_records_names_the_baseline_first_and_finds_a_daemon(tmp_path):
    folders, texts = [], {"base": TEXT}
    texts |= {"before": WITHOUT.replace("# BEFORE", TABLE), "daemon": WITHOUT.replace("# BEFORE", DAEMON)}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
        folders.append(scripted.run(tmp_path / "results", tmp_path / name / "train.py", "track=free"))
    done = real_runs.bench(tmp_path / "results", "audit", *map(str, folders), "--only", "clock", code=1)
    moved = "moved out of the timed region (now before the clock starts)"
    assert f"s of CPU time {moved}: train.py:19 rows = table(0.3)" in done.stdout
    assert re.search(r"0\.\d\d s more CPU time before the clock starts: train\.py:\d+ time\.sleep\(2\)", done.stdout)
    alone = real_runs.bench(tmp_path / "results", "audit", str(folders[0]), "--only", "clock", "--only", "held_out")
    assert alone.returncode == 2 and "it cannot be combined with other audits" in alone.stderr
