"""./run.sh pr: pull requests of planted logs, each with one thing wrong, and what it answers."""

import functools
import json
import re
from types import SimpleNamespace

import pytest
import real_runs

from bench.claims.rules import pull_requests, source_flags
from bench.cli import pr
from bench.record import clock_lines
from bench.record.importers import modded_nanogpt

SCRIPT = """import time, torch
import torch._dynamo.config
torch._dynamo.config.recompile_limit = 64

class Args:
    train_files: str = "data/train_*.bin"
    lr: float = 0.1

def table(width):
    rows = [width * n for n in range(5)]
    return rows

def batch(train_files):
    return open(train_files)

model = table(3)
train_loader = batch(Args.train_files)
seed = 1
training_time_ms = 0
t0 = time.perf_counter()
for step in range(11):
    if step == 10:
        training_time_ms += 1000 * (time.perf_counter() - t0)
        val_loss = sum(model)
        t0 = time.perf_counter()
        break
    model[0] += 1
    approx_ms = training_time_ms + 1000 * (time.perf_counter() - t0)
print("done")
"""
SMI = "| {n}  NVIDIA H100 80GB HBM3          On  |"
FASTER, SLOWER = [70.1, 70.2, 70.0, 70.15, 70.05], [71.1, 71.2, 71.0, 71.15, 71.05]
FIRST, SECOND = "2026-01-01_First", "2026-02-02_Second"  # records of a clone
LOSSES = [3.2770, 3.2781, 3.2775, 3.2768, 3.2779]


def log(source, time_s, loss, minute, num_gpus=8):
    """A log as train_gpt.py writes it."""
    smi = "\n".join(SMI.format(n=n) for n in range(num_gpus))
    start_nats = next((nats for mark, nats in (("# trained", 3.9), ("# wide", 16.0)) if mark in source), 10.8)
    losses = [(0, start_nats), (5, 4 + time_s % 1), (10, loss)]["# late" in source and minute == 13 :]
    lines = [f"step:{step}/10 val_loss:{value:.4f} train_time:{1000 * time_s * step / 10:.0f}ms step_avg:1ms"
             for step, value in losses]  # fmt: skip
    head = f"Running PyTorch 2.10.0 compiled for CUDA 12.8\nMon Feb  2 03:{minute:02}:00 2026\n{smi}"
    head = f"Using seed=7\n{head}" if "# prints its seed" in source else head
    if not source:
        return "\n".join([head, *lines, ""])
    return "\n".join([source, "=" * 100, head, "=" * 100, *lines, ""])


@pytest.fixture
def planted(tmp_path):
    def plant(candidate=CHANGED, baseline=SCRIPT, times=FASTER, losses=LOSSES, folders=("baseline", "this_pr"), gpus=8):
        sides = [(folders[0], baseline, SLOWER, LOSSES)] * bool(baseline) + [(folders[1], candidate, times, losses)]
        for number, (name, source, times_s, side_losses) in enumerate(sides):
            for run, (time_s, loss) in enumerate(zip(times_s, side_losses, strict=False)):
                path = tmp_path / "pull" / name / f"{run}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                source_of_run = source.replace("seed = 1", f"seed = {run}")
                path.write_text(log(source_of_run, time_s, loss + number / 1e4, 10 * number + run, gpus))
        return tmp_path / "pull"

    return plant


def answers(folder, capsys, *options):
    code = pr.main([str(folder), "--json", *options])
    report = json.loads(capsys.readouterr().out)
    return code, {name: row[0] for name, row in report["answers"].items()}, report


CHANGED = SCRIPT.replace("model[0] += 1", "model[0] += 2")
CHANGED_SEED = f"{CHANGED}# prints its seed\n"


def test_runs_of_the_candidates_code_on_other_gpus_are_left_to_a_reader(planted, capsys):
    """They may be the bad ones."""
    planted(CHANGED)
    folder = planted(CHANGED, baseline=None, losses=[loss + 0.02 for loss in LOSSES], folders=("", "old"), gpus=7)
    _, grades, report = answers(folder, capsys)
    assert (report["candidate"], grades["mean_loss"]) == ("this_pr", "reader")
    assert "old has its code too, on other GPUs or with another torch" in report["answers"]["mean_loss"][1]


def test_a_pull_request_with_its_baseline_meets_the_rules(planted, capsys):
    code, grades, report = answers(planted(CHANGED), capsys)
    assert code == 0 and report["candidate"] == "this_pr" and report["baseline"] == "baseline"
    assert grades == {
        **dict.fromkeys(("streams", "mean_loss", "systems_waiver", "same_hardware", "loss_buffer"), "pass"),
        **dict.fromkeys(("flags", "diff_size"), "reader"),
    }
    assert report["answers"]["diff_size"][1].startswith("+1 -1 lines for 1.00 s")
    assert report["compared"]["time"]["change_pct"] == pytest.approx(100 * (70.1 / 71.1 - 1), abs=0.001)
    failed = [rule["rule"] for rule in report["judge"] if rule["passed"] is False]
    assert failed == ["there are enough runs"]


@pytest.mark.parametrize("apart", ["old", "this_pr/failed", "drafts"])
def test_bad_runs_of_its_own_code_are_its_own_wherever_they_lie(planted, capsys, apart):
    bad = [3.2770, 3.2781, 3.2775, 3.295, 3.296]
    folder = planted(CHANGED, losses=bad)
    together = answers(folder, capsys)
    (folder / apart).mkdir()
    for number in (3, 4):
        (folder / f"this_pr/{number}.txt").rename(folder / f"{apart}/{number}.txt")
    _, grades, report = answers(folder, capsys)
    assert grades["mean_loss"] == together[1]["mean_loss"] != "pass" and report["baseline"] == "baseline"
    assert f"{apart} has the candidate's code: its runs are counted as such" in report["choice"]


def test_flags_of_the_baseline_with_other_values_are_shown_to_a_reader(planted, capsys):
    set_flag = SCRIPT + "torch._inductor.config.max_autotune = False\n"
    folder = planted(set_flag.replace("autotune = False", "autotune = True"), baseline=set_flag)
    _, grades, report = answers(folder, capsys)
    kept = "no other flag is found in its source; inductor.max_autotune as the baseline does"
    shown = f"{kept}; not in the baseline: torch._inductor.config.max_autotune = True (line 30); a rerun"
    assert grades["flags"] == "reader" and report["answers"]["flags"][1].startswith(shown)


@pytest.mark.parametrize("part", ["x = 0x" + "f" * 9000, "if a == 0:\n    pass\n" + "elif a == 1:\n    pass\n" * 2500])
def test_a_source_that_cannot_be_read_whole_is_left_to_a_reader(planted, capsys, part):
    code, grades, _ = answers(planted(f"{CHANGED}{part}\n"), capsys)
    assert code in (0, 1) and grades["flags"] in ("pass", "reader")


def test_logs_without_code_beside_the_candidates_are_left_to_a_reader(planted, capsys):
    folder = planted(CHANGED)
    for number in (7, 8):
        (folder / f"this_pr/{number}.txt").write_text(log("", 9.0, 3.31, 30 + number))
    _, grades, report = answers(folder, capsys)
    assert grades["mean_loss"] == "reader"
    assert "in its folder, embeds no code: whose runs are these?" in report["answers"]["mean_loss"][1]


def test_runs_that_count_as_one_by_their_training_losses_are_left_to_a_reader(planted, capsys):
    """They may be the bad ones, which weigh less then."""
    folder = planted(CHANGED)
    for number in (0, 1):
        path = folder / f"this_pr/{number}.txt"
        lines = "".join(f"step:{step}/10 train_loss:5.0 train_time:{step}ms step_avg:1ms\n" for step in range(1, 10))
        path.write_text(re.sub("(?=step:10/10)", lines, path.read_text()))
    _, grades, report = answers(folder, capsys)
    assert grades["mean_loss"] == "reader"
    assert re.search("5 runs count as 4, as some have equal training losses", report["answers"]["mean_loss"][1])


@pytest.mark.parametrize("planted_end", ["nan", "cut", "another total"])
def test_a_run_of_its_code_that_did_not_end_is_left_to_a_reader(planted, capsys, planted_end):
    folder = planted(CHANGED)
    path = folder / "this_pr/3.txt"
    text = path.read_text()
    ends = {"nan": re.sub(r"(step:10/10 val_loss:)[\d.]+", r"\1nan", text)}
    ends["another total"] = text.replace("/10 ", "/11 ")
    path.write_text(ends.get(planted_end, text.partition("step:10/10")[0]))
    code, grades, report = answers(folder, capsys)
    assert code == 0 and grades["mean_loss"] == "reader"
    assert "1 run of its code did not end, or not with a number: why?" in report["answers"]["mean_loss"][1]


@pytest.mark.parametrize(
    "source",
    [
        "c = torch._inductor.config; c.x = True",
        "import torch._inductor as ti; ti.config.x = True",
        "from torch import _inductor\n_inductor.config.x |= True",
        "torch._inductor.config.x, y = True, 1",
        "torch._inductor.config.x: bool = True",
        "torch._inductor.config.patch(x=True)",
        "torch._inductor.config.patch({'x': True})",
        "setattr(torch._inductor.config, 'x', True)",
        "torch._inductor.config.__dict__['x'] = True",
        "a = '#'; torch._inductor.config.x = True",
        "torch._inductor.config.__setattr__('x', True)",
        "del torch._inductor.config.x",
        "from torch._inductor.utils import config as c\nc.x = True",
        "a = b\nb = c\nc = d\nd = torch._inductor.config\na.x = True",
        "with (inner := torch._inductor.config).patch(**{'x': 1}):\n    pass",
    ],
)
def test_a_flag_is_found_however_its_source_names_it(source):
    assert list(source_flags.flags_of({"a.py": f"import torch\n{source}"}).flags) == ["inductor.x"]


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("os.environ |= {'TORCHINDUCTOR_A': '1'}", "env.TORCHINDUCTOR_A"),
        ("os.putenv('TORCHINDUCTOR_A', '1')", "env.TORCHINDUCTOR_A"),
        ("os.environ.update({'B': '1', 'TORCHINDUCTOR_A': '1'})", "env.TORCHINDUCTOR_A"),
        ("os.environ.update(TORCHINDUCTOR_A='1')", "env.TORCHINDUCTOR_A"),
        ("os.environ.setdefault('TORCHINDUCTOR_A', '1')", "env.TORCHINDUCTOR_A"),
        ("from os import environ as e\ne['TORCHINDUCTOR_A'] = '1'", "env.TORCHINDUCTOR_A"),
        ("from torch import compile as tc; tc(f, mode='max')", "compile.mode"),
        ("torch.compile(f, **{'mode': 'max'})", "compile.mode"),
        ("model.compile(mode='max')", "compile.mode"),
        ("c: object = torch._inductor.config; c.x = True", "inductor.x"),
        ("a, c = 1, torch._inductor.config\ndef f():\n    c.x = True", "inductor.x"),
        ("torch._dynamo.optimize('inductor')", "dynamo.optimize"),
        ("os.environb[b'TORCHINDUCTOR_A'] = b'1'", "env.TORCHINDUCTOR_A"),
        ("import functools; functools.partial(torch.compile, mode='max')", "compile.mode"),
    ],
)
def test_a_variable_and_an_option_are_found_too(source, flag):
    assert list(source_flags.flags_of({"a.py": f"import os, torch\n{source}"}).flags) == [flag]


@pytest.mark.parametrize(
    "source",
    [
        "x = inductor.config.x == 1\nprint(torch._inductor.config.x)",
        "print(os.environ.get('TORCHINDUCTOR_A'), os.environ['TORCHINDUCTOR_A'])\nos.environ.pop('TORCHINDUCTOR_A')",
        "from torch._inductor import config\ndef f(config):\n    config.lr = 3",
        "from torch._inductor import config\ndef f():\n    config = Args()\n    config.lr = 3",
        "import re\nc = re.compile\nc('a')",
        "@torch.compiler.disable\ndef f(compiled):\n    return compiled(1) if torch.compiler.is_compiling() else 2",
        "torch._dynamo.mark_dynamic(x, 0)\nmodel.compile(dynamic=False)",
        "re.compile('a')\nos.environ['HOME'] = 'x'\nprint('torch._inductor', f'{torch._inductor.config.x}')",
        "@torch.compile\ndef f(): pass\nm = torch.compile(m, dynamic=False)",
        "import logging\nlogging.getLogger('torch._dynamo').setLevel(1)\nassert 'TORCHINDUCTOR_A' not in os.environ",
        "getattr(torch._inductor.config, 'x')",
    ],
)
def test_what_reads_flags_or_only_looks_alike_sets_none(source):
    assert source_flags.flags_of({"a.py": f"import os, torch\n{source}"}).flags == {}


@pytest.mark.parametrize(
    ("source", "look"),
    [
        ("compiled = model.compile\ncompiled(mode='max')", "compiled = model.compile (line"),
        ("os.execve('a', [], {**os.environ, 'TORCHINDUCTOR_A': '1'})", "os.execve('a', [], {**os.environ,"),
        ("def setup(t):\n    t._inductor.config.x = True\nsetup(torch)", "t._inductor.config.x = True (line"),
        ("@torch._dynamo.patch_dynamo_config(recompile_limit=1)\ndef f(): pass", "@torch._dynamo.patch_dynamo_config("),
        ("re.compile('a')\nos.environ['TORCH' + 'INDUCTOR_A'] = '1'", ""),
        ("x = 1", ""),
    ],
)
def test_that_no_flag_is_found_is_left_to_a_reader_with_the_statements_to_look_at(planted, capsys, source, look):
    _, grades, report = answers(planted(f"{CHANGED}{source}"), capsys)
    grade, evidence = report["answers"]["flags"]
    assert grade == "reader" and evidence.startswith("no other flag is found in its source") and look in evidence
    assert ("; not in the baseline: " in evidence) == bool(look) and evidence.endswith("; a rerun shows what is set")


def test_the_verdict_is_the_first_line_below_the_title_and_what_is_missing_has_a_command(planted, printed, monkeypatch):
    folder = planted(CHANGED)
    monkeypatch.setenv("HOME", str(folder.parent))
    title, _, verdict, *rest = printed(pr, folder).splitlines()
    assert title == "# pull: judged from its logs"
    assert verdict.startswith("verdict: **MEETS THE RULES**  5 runs of this_pr, 1.00 s faster than baseline")
    assert any("./run.sh pr ~/pull --rerun FOLDER" in line for line in rest)  # no home folder in a public thread
    assert '- judge would refuse it: "there are enough runs" does not hold: 5 valid of 5 runs, the' in "\n".join(rest)


def test_a_log_that_validates_its_last_step_again_is_one_run(planted, printed):
    folder = planted(CHANGED)
    for path in folder.glob("*/*.txt"):
        text = path.read_text()
        last = text.splitlines()[-1]
        path.write_text("".join([text, *(last.replace("loss:3.2", f"loss:3.{n}") + "\n" for n in (0, 1))]))
    assert "verdict: **MEETS THE RULES**  5 runs of this_pr, 1.00 s faster than baseline" in printed(pr, folder)


@pytest.mark.parametrize(
    ("what", "planted_as", "rule", "mark", "evidence"),
    [
        ("slower", {"times": [72.1, 72.2, 72.0, 72.15, 72.05]}, "same_hardware", "FAIL", "slower than its baseline"),
        ("no faster", {"times": SLOWER}, "same_hardware", "not shown", "71.10 s to 71.10 s, +0.00 %"),
        ("no baseline", {"baseline": ""}, "same_hardware", "not shown", "no logs of a baseline"),
        ("one GPU", {"gpus": 1}, "same_hardware", "reader", "; but 1 GPU and 1 rank instead of 8"),
        ("one run", {"losses": LOSSES[:1]}, "mean_loss", "not shown", "one run has no spread"),
        ("one seed, printed", {"candidate": CHANGED_SEED}, "mean_loss", "not shown", "5 runs count as 1 by their seed"),
        ("nothing can reach it", {"losses": [0.27]}, "mean_loss", "FAIL", "val_loss 0.27010 is below 2.5, which no"),
        ("over the target", {"losses": [3.281, 3.2812, 3.2809, 3.2811, 3.281]}, "loss_buffer", "reader", "ABOVE 3.28"),
        ("above the target", {"losses": [3.284, 3.2841, 3.2842]}, "mean_loss", "FAIL", "3.2842 (n=3) is above"),
        ("another stream", {"candidate": SCRIPT.replace("/train_", "/easy_")}, "streams", "reader", "data/easy_*.bin'"),
        ("another batch", {"candidate": SCRIPT.replace("open(t", "iter(t")}, "streams", "reader", "return iter("),
        ("a flag", {"candidate": SCRIPT + "torch._inductor.config.x = 1"}, "flags", "FAIL", "inductor.x"),
        ("trained before", {"candidate": f"{SCRIPT}# trained"}, "mean_loss", "FAIL", "loss at step 0 is already 3.900"),
        ("a baseline of wider weights", {"baseline": f"{SCRIPT}# wide"}, "mean_loss", "pass", "below the target"),
        ("one log begins later", {"candidate": f"{CHANGED}# late"}, "mean_loss", "reader", "a log has no val_loss of"),
        ("no waiver covers that", {"candidate": f"{CHANGED}# late"}, "systems_waiver", "pass", "not needed"),
        ("alias", {"candidate": f"{SCRIPT}from torch._inductor import config as c\nc.x = 1"}, "flags", "FAIL", "x"),
        ("a mode", {"candidate": SCRIPT + "torch.compile(table, mode='max')"}, "flags", "FAIL", "compile.mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_one_thing_wrong_is_found(planted, capsys, what, planted_as, rule, mark, evidence):
    code, grades, report = answers(planted(**planted_as), capsys)
    assert grades[rule] == mark and evidence in report["answers"][rule][1], report["answers"]
    assert code == (1 if mark in ("FAIL", "not shown") else code)


def test_the_waiver_needs_equal_steps_and_losses_that_are_no_higher(planted, tmp_path, capsys):
    higher = [3.2800, 3.2812, 3.2805, 3.2801, 3.2809]
    _, grades, report = answers(planted(CHANGED, losses=higher), capsys)
    assert grades["mean_loss"] == "not shown" and "systems_waiver" not in grades
    assert pr.main([str(tmp_path / "pull")]) == 1
    assert "val_loss: the mean is above the target" in capsys.readouterr().out
    close = [3.2799, 3.2781, 3.2799, 3.2768, 3.2799]
    _, grades, report = answers(planted(CHANGED, losses=close), capsys)
    assert grades["systems_waiver"] == grades["mean_loss"] == "reader", report["answers"]
    assert "a person must say" in report["answers"]["systems_waiver"][1]


def test_what_moves_out_of_the_timed_region_is_named_with_its_line(planted, capsys):
    base = SCRIPT.replace("    model[0] += 1", "    rows = table(9)\n    model[0] += 1")
    moved = SCRIPT.replace("t0 = time.perf_counter()\nfor", "rows = table(9)\nt0 = time.perf_counter()\nfor")
    folder = planted(moved, base)
    pr.main([str(folder)])
    text = capsys.readouterr().out
    assert f"pr {folder.parent.name}/pull --rerun" in text and str(folder) not in text  # it is read by others
    number = 1 + moved.splitlines().index("rows = table(9)")
    row = next(line for line in text.splitlines() if "rows = table(9)" in line)
    assert "3 statements that the baseline does not have there; it has 3 inside its clock" in text  # two in table()
    assert [cell.strip() for cell in row.split("|")[1:5]] == [
        str(number), "before the clock starts", "MOVED out of the timed region", ""]  # fmt: skip


def test_the_baseline_may_be_named_and_what_fits_no_glob_is_refused(planted, capsys):
    folder = planted(CHANGED, folders=("one", "two"))
    code, grades, report = answers(folder, capsys, "--baseline", "one/*")
    assert (code, report["candidate"], report["baseline"]) == (0, "two", "one/*")
    code, grades, report = answers(folder, capsys, "--candidate", "*/*")
    assert (code, grades["mean_loss"]) == (1, "not shown") and "no repeats" in report["answers"]["mean_loss"][1]
    with pytest.raises(ValueError, match="three/.*: no complete log of the pull request fits it"):
        pr.main([str(folder), "--baseline", "three/*"])
    with pytest.raises(ValueError, match="it holds no log of a complete run|it holds no log"):
        (folder / "empty").mkdir()
        pr.main([str(folder / "empty")])
    for path in folder.iterdir():
        path.rename(folder / {"one": "baseline", "two": "master"}.get(path.name, path.name))
    with pytest.raises(ValueError, match=r"every log is a baseline's \(baseline is named like one, master is named"):
        pr.main([str(folder)])


@pytest.mark.parametrize(
    ("names", "mark", "evidence"),
    [
        (("baseline", "prior"), "reader", "; but slower than prior; the logs do not say which"),
        (("control", "prior"), "not shown", "slower than prior, 69.60 s to 70.10 s"),
        (("prior", ""), "FAIL", "it is slower than its baseline"),
        (("baseline", "old"), "pass", "sessions alone differ by up to 1.8 %"),  # old has fewer steps
    ],
)
def test_of_two_baselines_that_disagree_none_refuses_a_record(planted, capsys, names, mark, evidence):
    """Record 74 has its record before as baseline/ and a step of its own development as prior/, with more logs."""
    folder = planted(CHANGED, baseline="" if mark == "FAIL" else SCRIPT, folders=(names[0], "this_pr"), times=FASTER)
    prior = folder / (names[1] or names[0])
    prior.mkdir()
    for run, time_s in enumerate([69.6, 69.7, 69.5, 69.65, 69.55, 69.62]):  # one log more than the other baseline
        text = log(SCRIPT.replace("+= 1", "+= 3"), time_s, LOSSES[run % 5], 30 + run)
        text = text.replace("step:10/", "step:9/").replace("/10 ", "/9 ") if names[1] == "old" else text
        (prior / f"{run}.txt").write_text(text)
    code, grades, report = answers(folder, capsys)
    assert grades["same_hardware"] == mark and evidence in report["answers"]["same_hardware"][1], report["answers"]
    assert code == (0 if mark in ("reader", "pass") else 1)
    recorded = SimpleNamespace(baseline=SimpleNamespace(known_as="an earlier record"))
    assert pull_requests._other_baselines(recorded) == ([], [])  # its code is that record's, so no other comes before


def test_the_pull_requests_script_decides_between_groups_of_logs_and_the_others_are_named(planted, capsys):
    folder = planted(CHANGED, folders=("one", "two"))  # names that do not say whose the logs are
    (folder / "one").rename(folder / "one²")  # a digit that is no number
    assert answers(folder, capsys)[2]["candidate"] == "two"
    (folder / "one²").rename(folder / "one")
    _, _, report = answers(folder, capsys)
    why = "nothing but the order of the names, and --candidate one judges another."
    assert (report["candidate"], report["choice"]) == (
        "two", f"2 groups of logs could be the candidate: two was chosen by {why}")  # fmt: skip
    _, _, report = answers(folder, capsys, "--candidate", "one")
    assert (report["candidate"], report["choice"]) == ("one", None)
    (folder / "one" / "6.txt").write_text(log(SCRIPT, 71.0, LOSSES[0], 40))
    assert "one was chosen by its number of runs" in answers(folder, capsys)[2]["choice"]
    (folder / "one" / "6.txt").unlink()
    (folder / "train_gpt.py").write_text(SCRIPT.replace("seed = 1", "seed = 8"))
    pr.main([str(folder)])
    text = capsys.readouterr().out
    assert "verdict: **NOT SHOWN**  5 runs of one" in text
    assert "one was chosen by the code of the pull request's script, and --candidate two judges another." in text
    pr.main([str(folder), "--baseline", "two", "--candidate", "one", "--rerun", str(folder / "race")])
    assert capsys.readouterr().err == ""


def test_a_script_beside_logs_without_code_is_taken_and_called_unproven_and_of_several_one_is_asked_for(
    planted, capsys, tmp_path
):
    folder = planted("", "")
    (folder / "baseline").mkdir()
    for run, time_s in enumerate(SLOWER):
        (folder / "baseline" / f"{run}.txt").write_text(log("", time_s, LOSSES[run], 20 + run))
    (folder / "baseline/train.py").write_text(SCRIPT)
    (folder / "this_pr/train.py").write_text(f"import kernels\n{CHANGED}")
    code, grades, report = answers(folder, capsys)
    assert (code, report["script"], grades["streams"], grades["flags"]) == (0, "this_pr/train.py", "reader", "reader")
    assert report["answers"]["diff_size"][1].startswith("+2 -1 lines for 1.00 s")
    pr.main([str(folder), "--rerun", str(tmp_path / "race")])
    assert (tmp_path / "race/candidate/train_gpt.py").read_text() == f"import kernels\n{CHANGED}"
    (folder / "this_pr/kernels.py").write_text("")
    pr.main([str(folder)])
    assert "embed no code, and 2 scripts lie beside them: --script this_pr/kernels.py or --script this_pr/train.py" in (
        capsys.readouterr().out)  # fmt: skip
    pr.main([str(folder), "--script", "this_pr/train.py"])
    why = "source is taken from this_pr/train.py beside them: the logs do not prove that this script made them."
    assert why in capsys.readouterr().out
    with pytest.raises(ValueError, match="--script other.py: no such file, neither below"):
        pr.main([str(folder), "--script", "other.py"])


@pytest.mark.parametrize("name", ["train_gpt.py", "kernels.py", "5.txt", "inner"])
def test_a_link_out_of_the_folder_is_refused_and_one_within_it_is_followed(planted, capsys, tmp_path, name):
    folder, private = planted(""), tmp_path / "private"
    private.mkdir()
    (private / "swordfish.py").write_text(CHANGED)
    (folder / "sources").mkdir()
    (folder / "sources/train.py").write_text(CHANGED)
    (folder / "this_pr/train_gpt.py").symlink_to("../sources/train.py")
    _, _, report = answers(folder, capsys)
    assert report["script"] == "this_pr/train_gpt.py"
    link = folder / "this_pr" / name
    link.unlink(missing_ok=True)
    link.symlink_to(private / "swordfish.py" if "." in name else private)
    with pytest.raises(ValueError, match=f"this_pr/{name}: is a link, but not to a file of its folder: remove it"):
        pr.main([str(folder), "--rerun", str(tmp_path / "race")])
    assert not (tmp_path / "race").exists() and "swordfish" not in capsys.readouterr().out


def test_the_rerun_writes_both_sources_and_the_race(planted, printed, tmp_path):
    command = printed(pr, str(planted(CHANGED)), "--rerun", tmp_path / "race", "--", "n=3").split()
    assert command[:3] == ["./run.sh", "race", f"Baseline=script={tmp_path}/race/baseline/train_gpt.py"]
    assert command[-3:] == ["n=3", "track=gpt2_small", "script.sandbox=true"]  # it is somebody else's
    command = printed(pr, str(planted(CHANGED)), "--rerun", tmp_path / "race", "--", "n=3", "track=free").split()
    assert command[-3:] == ["n=3", "track=free", "script.sandbox=true"]
    written = (tmp_path / "race/candidate/train_gpt.py").read_text()
    assert written.strip() == CHANGED.replace("seed = 1", "seed = 0").strip()
    with pytest.raises(ValueError, match="embed no source|there is no baseline"):
        pr.main([str(planted(CHANGED, "")), "--candidate", "*/*", "--rerun", str(tmp_path / "race")])


@pytest.fixture
def clone(planted, tmp_path):
    """A clone with one record, and a pull request that brings another and no baseline's logs."""
    where = tmp_path / "clone"
    home = where / "records" / "track_1_short"

    git = functools.partial(real_runs.git, where)
    home.mkdir(parents=True)
    git("init", "-q", "-b", "master")
    planted(SCRIPT, "", SLOWER, folders=("", FIRST)).joinpath(FIRST).rename(home / FIRST)
    git("add", "."), git("commit", "-qm", "first")
    planted(CHANGED, "", folders=("", SECOND)).joinpath(SECOND).rename(home / SECOND)
    for minute in (50, 51):  # logs of another code
        (home / SECOND / f"z{minute}.txt").write_text(log(f"{SCRIPT}x = 1\n", 60 + minute, 3.3, minute))
    (where / "train_gpt.py").write_text(CHANGED)
    for command in ("add .", "commit -qm second", "update-ref refs/pull/7/head HEAD", "reset -q --hard HEAD~1"):
        git(*command.split())
    return where


def test_a_records_code_that_is_submitted_once_more_beside_a_baseline_is_the_candidate(clone, planted, capsys):
    home = clone / "records/track_1_short"
    pull = planted(SCRIPT, CHANGED, folders=("baseline", "again"))
    for path in (pull / "baseline").iterdir():  # of another torch: its times are not compared
        path.write_text(path.read_text().replace("PyTorch 2.10.0", "PyTorch 2.9.0"))
    code, _, report = answers(pull.rename(home / "2026-03-03_Again"), capsys)
    assert (code, report["candidate"], report["baseline"]) == (1, "again", "baseline")
    assert report["choice"] == f"again has the code of record {FIRST}."
    pr.main([str(home / "2026-03-03_Again")])
    assert "interval of time" not in capsys.readouterr().out  # there is none


def test_links_beside_a_record_in_a_clone_are_not_followed(clone, planted, capsys, tmp_path):
    private = planted(CHANGED, "", folders=("", "private")).joinpath("private").rename(tmp_path / "private")
    home = clone / "records/track_1_short"
    pull = planted(CHANGED, "", folders=("", SECOND)).joinpath(SECOND).rename(home / SECOND)
    (home / "2026-02-01_Linked").symlink_to(private)
    (home / FIRST / "0.txt").unlink()
    (home / FIRST / "0.txt").symlink_to(private / "0.txt")
    (private / "train_gpt.py").write_text(CHANGED)
    (clone / "train_gpt.py").symlink_to(private / "train_gpt.py")
    assert [path.name for path, _ in pr._earlier(pull)] == [FIRST]
    assert pr._own_sources(pull, tmp_path / "scratch")[0] == {}
    with pytest.raises(ValueError, match=f"{FIRST}/0.txt: is a link, but not to a file of its folder"):
        pr.main([str(pull)])
    capsys.readouterr()


def test_a_number_is_taken_from_a_clone_and_the_record_before_is_no_baseline_of_the_same_node(clone, capsys):
    code, _, report = answers("7", capsys, "--clone", str(clone))
    assert (code, report["candidate"], report["baseline"]) == (1, "0", FIRST)
    assert "0 was chosen by the code of the pull request's script, and --candidate z50" in report["choice"]
    mark, evidence = report["answers"]["same_hardware"]
    assert mark == "not shown" and "71.10 s to 70.10 s" in evidence
    for number, why in (("8", "has no #8: git fetch origin pull/8/head"), ("9", "fetch origin pull/9/head")):
        with pytest.raises(ValueError, match=why):
            pr.main([number, "--clone", str(clone)])
    with pytest.raises(ValueError, match="--clone DIR names a clone"):
        pr.main(["7"])


def test_a_record_whose_name_is_not_ascii_is_found_in_a_clone(clone, capsys):
    real_runs.git(clone, "checkout", "-q", "refs/pull/7/head")
    real_runs.git(clone, "mv", f"records/track_1_short/{SECOND}", f"records/track_1_short/{SECOND} für ü")
    real_runs.git(clone, "commit", "-qm", "a name")
    real_runs.git(clone, "update-ref", "refs/pull/9/head", "HEAD")
    real_runs.git(clone, "checkout", "-q", "master")
    code, _, report = answers("9", capsys, "--clone", str(clone))
    assert (code, report["candidate"], report["baseline"]) == (1, "0", FIRST)


def test_all_commits_of_a_pull_request_count_after_it_was_merged_and_track_3_has_other_rules(
    clone, capsys, monkeypatch
):
    def git(*commands):
        for command in commands:
            real_runs.git(clone, *command.split())

    git("checkout -q refs/pull/7/head", "commit -q --allow-empty -m words", "update-ref refs/pull/7/head HEAD")
    git("checkout -q master", "commit -q --allow-empty -m other", "merge -q --no-ff refs/pull/7/head -m m")
    code, _, report = answers("7", capsys, "--clone", str(clone))
    assert (code, report["candidate"], report["baseline"]) == (1, "0", FIRST)
    git("checkout -q -b third", f"mv records/track_1_short/{SECOND} other", "commit -qm away")
    third = "records/track_3_optimization"
    (clone / third).mkdir()
    git(f"mv other {third}/results", "commit -qm 3", "update-ref refs/pull/8/head HEAD", "checkout -q master")
    exported = []
    monkeypatch.setattr(pr, "_write_tree", lambda clone, commit, paths, into: exported.extend(paths))
    with pytest.raises(ValueError, match="steps: it has no rules for pull requests: ./run.sh judge --track st"):
        pr.main(["8", "--clone", str(clone)])
    assert exported and f"{third}/results" not in exported  # not all of upstream's results


# ---- lines outside the clock, and code that is one


@pytest.mark.parametrize(
    ("clock", "is_timed"),
    [
        ("t0 = time.time()\nwork()\nt1 = time.time()\ndt = t1 - t0\nmore()", True),
        ("t0 = time.perf_counter_ns()\nwork()\nms = time.perf_counter_ns() - t0\nmore()", True),
        ("t0 = time.time()\nmore()\nt1 = time.time()\ndt = t1 - t0\nwork()", False),
    ],
    ids=["a difference of two names", "of a reading and a name", "after it"],
)  # fmt: skip
def test_the_phase_of_a_line_follows_the_scripts_own_clock(clock, is_timed):
    lines = clock_lines.lines_of(f"import time\ndef work():\n    return 1\ndef more():\n    return 2\n{clock}\n")
    phases = {line.definition: line.phase for line in lines if line.definition}
    assert (phases["work"] == clock_lines.TIMED) == is_timed and phases["more"] != phases["work"]


def test_a_script_without_a_clock_or_without_python_has_no_phases():
    assert clock_lines.lines_of("x = 1\n") is None and clock_lines.lines_of("x = = 1") is None


def test_one_code_is_known_by_its_statements_not_by_its_comments_or_its_seed():
    keys = {
        modded_nanogpt.code_key({"train_gpt.py": text})
        for text in (SCRIPT, SCRIPT + "# more\n", SCRIPT.replace("seed = 1", "seed = 2"))
    }
    assert len(keys) == 1 and modded_nanogpt.code_key({"train_gpt.py": CHANGED}) not in keys


def test_every_file_that_a_log_embeds_is_a_source():
    both = f"{SCRIPT}\n{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n\nkernel = 1\n"
    files = modded_nanogpt.sources(log(both, 70, 3.27, 1).encode())
    assert list(files) == ["train_gpt.py", "triton_kernels.py"] and files["triton_kernels.py"].strip() == "kernel = 1"
    decoy = f"{both}\n{'-' * 40}\n# train_gpt.py\n{'-' * 40}\n\nharmless = 1\n"  # a cheat: rules would judge this one
    assert modded_nanogpt.sources(log(decoy, 70, 3.27, 1).encode())["train_gpt.py"] == files["train_gpt.py"]
