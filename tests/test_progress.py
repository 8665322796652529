"""What a person sees while runs run: some twenty lines in a pipe, bars on a terminal, nothing measured of a race."""

import json
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import real_runs

from bench.base.paths import shown
from bench.cli import main as program
from bench.cli import race
from bench.launch import console, ready, series, summary
from bench.launch.console import Bars
from bench.launch.progress import Progress
from bench.machine.preflight import Check
from bench.plans.race import runner
from bench.training.step_writer import NOTE, step_lines

BUSY = Check("cpu load", "warn", "other programs use 1.95 of 2 cores (limit 0.1)", "end them")


class Screen:
    """In place of Bars: what was drawn."""

    are_live = True

    def __init__(self):
        self.texts = []

    def draw(self, name, num_done, num_all, text):
        self.texts.append(text)


def write_log(folder, num_steps, val_every_steps=None):
    rows = [
        {"step": step, "train_s": 0.1 * step, "val_loss": 3.0 if not step % (val_every_steps or num_steps) else None}
        for step in range(num_steps + 1)
    ]
    (folder / "logs").mkdir(exist_ok=True)
    lines = [f"{NOTE}a note", *(line for row in rows for line in step_lines(row, num_steps)), "a library's own words"]
    (folder / "logs" / "rank0.log").write_text("\n".join(lines) + "\n")


def printed(folder, num_steps, capsys, **how):
    Progress(folder, num_steps, Bars(), **how).show()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("num_steps", "val_every_steps", "num_lines"),
    [
        (6, 3, 1 + 3 + 4),  # a step that has a validation has that line only
        (120, 50, 1 + 4 + 10),  # steps 1, 12, 24, ... 108; of 120 its validation
        (120, 10, 1 + 13 + 9),  # all 13; steps 1, 12, ... 108 but 60
        (5000, 10, 1 + 11 + 1),  # validations 0, 500, ... 5000; step 1
    ],
)
def test_a_pipe_gets_about_ten_lines_of_steps_and_up_to_20_validations_or_about_ten(
    tmp_path, capsys, num_steps, val_every_steps, num_lines
):
    write_log(tmp_path, num_steps, val_every_steps)
    lines = printed(tmp_path, num_steps, capsys)
    assert lines[:2] == ["a note", f"step:0/{num_steps} val_loss:3.0000 train_time:0ms"]
    assert lines[-1].startswith(f"step:{num_steps}/{num_steps} ")
    assert len(lines) == num_lines <= 33


def test_of_a_run_in_a_series_only_validations_are_printed(tmp_path, capsys):
    write_log(tmp_path, 120, 50)
    lines = printed(tmp_path, 120, capsys, brief=True)
    assert [line.split("/")[0] for line in lines[1:]] == ["step:0", "step:50", "step:100"]


def test_the_bar_of_a_race_shows_the_step_and_nothing_that_is_measured(tmp_path, capsys):
    write_log(tmp_path, 40)
    progress = {"step": 12, "num_steps": 40, "step_avg_ms": 123.0, "tokens_per_s": 8192.0, "mfu": 0.4}
    for blind, text in ((True, "step 12/40"), (False, "step 12/40, step_avg 123.00 ms, 8,192 tokens/s, MFU 40.0 %")):
        screen = Screen()
        seen = Progress(tmp_path, None if blind else 40, screen, blind=blind)
        seen.show()
        (tmp_path / ".progress.tmp").write_text(json.dumps(progress))
        seen.show()
        assert screen.texts == ["loading, warming up (0 s)", text]
        assert ("val_loss" in capsys.readouterr().out) is not blind
        (tmp_path / ".progress.tmp").unlink()


def test_the_time_left_worked_by_hand(monkeypatch, capsys):
    """Two configs of two runs each; a is known to take 10 s, of b nothing is known before its first run took 30 s."""
    now_s = 0.0
    monkeypatch.setattr(series.time, "monotonic", lambda: now_s)
    with series.Series(["a", "b", "a", "b"], {"a": 10.0}) as runs:
        runs.begin("seed 0")
        now_s = 4.0
        assert runs.left_s() == 6 + 10 + 10 + 10
        now_s = 12.0
        assert (runs.left_s(), runs.position) == (30, "1 of 4")  # it takes longer than it did before
        assert runs.end() == ", about 36 s to go"  # a: 12 s by now
        runs.begin()
        now_s = 42.0
        assert runs.end() == ", about 42 s to go"  # a 12, b 30
        for _ in range(2):
            runs.begin()
            text = runs.end()
        assert text == ""
    assert capsys.readouterr().out == "    plan  4 runs, about 40 s\n     run  1 of 4: seed 0, about 40 s to go\n"


def test_how_long_is_known_after_the_first_run_where_nothing_was_known(monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr(series.time, "monotonic", lambda: now_s)
    with series.Series(["a"] * 10, {}, num_done=1) as runs:
        runs.begin()
        now_s = 60.0
        assert runs.end() == ", about 8 min to go"
    assert capsys.readouterr().out == "    plan  9 runs, the first run shows how long they take\n"


def test_earlier_runs_of_the_same_config_say_how_long_it_takes(finished_run, monkeypatch):
    run = real_runs.run_json(finished_run)
    monkeypatch.setattr(series, "results_root", lambda: finished_run.parent.parent)
    known_s = series.earlier_s(["free", "nosuch"], [run["config_id"], "00000000"])
    assert known_s == {run["config_id"]: run["measured"]["wall_s"]}


def test_only_the_five_latest_complete_runs_of_a_config_are_read(tmp_path, monkeypatch):
    records = {minute: {"status": "complete", "measured": {"wall_s": float(minute)}} for minute in range(10)}
    records[8]["status"], records[9]["measured"], read = "failed", {}, []  # the newest is an imported log
    records[7]["measured"] = {"wall_s": None}
    monkeypatch.setattr(series.run_folder, "read", lambda folder: records[read.append(folder) or int(folder.name[10])])
    monkeypatch.setattr(series, "results_root", lambda: tmp_path)
    for minute in range(10):
        for config_id in ("aaaaaaaa", "bbbbbbbb"):
            (tmp_path / "free" / f"20261101T0{minute}0000Z-x-{config_id}-s{minute}-m62a798").mkdir(parents=True)
    assert series.earlier_s(["free", "nosuch"], ["aaaaaaaa", "cccccccc"]) == {"aaaaaaaa": 4.0}  # of 6, 5, 4, 3, 2
    assert len(read) == 8


@pytest.mark.parametrize(
    ("checks", "anyway", "reply", "purpose", "goes_on"),
    [
        ([BUSY], False, None, None, True),  # a sweep in a pipe: said, not asked
        ([BUSY], False, None, "the verdict", False),  # a race in a pipe
        ([BUSY], True, None, "the verdict", True),
        ([BUSY], False, True, "the verdict", True),  # at a terminal: y
        ([BUSY], False, False, None, False),
        ([Check("governor", "warn", "powersave", "x")], False, False, "the verdict", True),
        ([Check("cpu load", "ok", "other programs use 0.10 of 2 cores")], False, False, "the verdict", True),
    ],
)
def test_a_busy_machine_is_said_and_asked_about(monkeypatch, capsys, checks, anyway, reply, purpose, goes_on):
    monkeypatch.setattr(ready, "confirmed", lambda question: reply)
    with console.output(quiet=True):
        if goes_on:
            ready.agree(checks, anyway, purpose)
        else:
            with pytest.raises(ValueError, match="use 1.95 of 2 cores .*--anyway"):
                ready.agree(checks, anyway, purpose)
    assert ("warn" in capsys.readouterr().out) == (checks[0].status != "ok")


@pytest.mark.parametrize(
    ("checks", "reply", "exit_code"),
    [([BUSY], None, 75), ([BUSY], False, 2), ([BUSY, Check("disk", "fail", "full", "free space")], None, 2)],
)
def test_only_a_busy_machine_that_nobody_was_asked_about_is_to_be_tried_again(monkeypatch, checks, reply, exit_code):
    monkeypatch.setattr(ready, "confirmed", lambda question: reply)
    monkeypatch.setattr(race, "main", lambda argv: ready.agree(checks, False, "the verdict"))
    assert program.main(["race"]) == exit_code


def test_quiet_says_only_what_matters_and_json_leaves_standard_output_alone(capsys):
    with console.output(quiet=True):
        console.say("run", "one of many")
        console.say("run", "failed", always=True)
    with console.output(as_json=True):
        console.say("run", "complete")
    console.say("run", "as before")
    assert capsys.readouterr() == ("     run  failed\n     run  as before\n", "     run  complete\n")


def test_a_path_is_shown_as_it_can_be_used_from_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    assert shown(tmp_path / "results" / "x") == "results/x"
    assert shown("/elsewhere/results/x") == "/elsewhere/results/x"
    assert shown(tmp_path) == str(tmp_path)
    assert shown(tmp_path.parent / "x.html") == str(tmp_path.parent / "x.html")  # not ../x.html


def test_a_path_is_relative_for_a_user_who_stands_in_a_link_to_the_folder(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("SPEEDRUN_CWD", str(link))
    assert shown(real / "results" / "x") == shown(link / "results" / "x") == "results/x"


def test_a_page_made_from_another_folder_is_named_as_it_can_be_opened_from_there(tmp_path, monkeypatch, printed, repo):
    from bench.cli import report

    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))  # run.sh has changed to the repository's folder
    assert printed(report, str(repo / "results" / "published"), "--out", "site") == "site/index.html\n"


# ---- on a terminal

DRAWS = """
from bench.launch.console import Bars, say
with Bars() as bars:
    bars.draw("runs", 1, 3, "2 of 3, about 20 s to go")
    bars.draw("run", 10, 20, "step 10/20" + 100 * "x")
    say("run", "/a/long/" + 20 * "path/" + "that is copied [bold] as it is")
print("the end")
"""


def on_a_terminal(**env):
    """Runs DRAWS on a pseudo-terminal of 80 columns and returns all that it wrote there."""
    reader, writer = pty.openpty()
    env = os.environ | {"COLUMNS": "80", "TERM": "xterm"} | env
    process = subprocess.Popen([sys.executable, "-c", DRAWS], cwd=real_runs.REPO, stdout=writer, env=env)
    os.close(writer)
    out = b""
    while True:
        try:
            data = os.read(reader, 65536)
        except OSError:  # its other side is closed
            break
        if not data:
            break
        out += data
    os.close(reader)
    assert process.wait() == 0
    return out.decode()


def test_bars_stand_below_what_is_printed_and_are_gone_at_the_end():
    out = on_a_terminal()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    assert re.search(r"    runs  ━{5}.━{10} 2 of 3, about 20 s to go", plain)
    assert re.search(r"     run  ━{8}.━{7} step 10/20x*…", plain)
    assert "     run  /a/long/" + 20 * "path/" + "that is copied [bold] as it is" in plain
    after = out[out.rindex("step 10/20") :]
    assert after.count("\x1b[2K") == 2 and after.endswith("the end\r\n")  # both bars' lines are emptied
    assert out.count("\x1b[?25h") >= out.count("\x1b[?25l") == 1  # the cursor is not left hidden


def test_bars_obey_no_color_and_a_dumb_terminal_gets_none():
    assert not re.search(r"\x1b\[[0-9;]*m", on_a_terminal(NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(TERM="dumb") and "━" not in on_a_terminal(TERM="dumb")


def test_a_pipe_gets_no_bar():
    done = subprocess.run([sys.executable, "-c", DRAWS], cwd=real_runs.REPO, capture_output=True, text=True, check=True)
    assert (done.stdout.count("\n"), "\x1b" in done.stdout, "━" in done.stdout) == (2, False, False)


def last_line(step_avg_ms=100.0, num_flagged_steps=0, **fields):
    metrics = {"val_loss": 3.0, "train_s": 2.0, "num_steps": 20}
    metrics |= {"step_avg_ms": step_avg_ms, "num_flagged_steps": num_flagged_steps}
    run = {"status": "complete", "validity": "valid", "folder": "f", "instruments": {"trace": {}, "regions": {}}}
    return summary.outcome_text(run | {"metrics": metrics} | fields).splitlines()[0]


def test_the_last_line_says_which_steps_its_step_avg_leaves_out():
    assert last_line().endswith("train 2.00 s, step_avg 100.00 ms")
    assert last_line(96.651, 4).endswith("step_avg 96.65 ms without the 4 steps that trace disturbed")
    assert last_line(96.651, 4, instruments={"telemetry": {}}).endswith("the 4 steps whose time holds a validation")
    assert last_line(None, 20).endswith("no step_avg: trace disturbed every step")


@pytest.mark.parametrize(
    ("looks", "last"),
    [
        ([2, 4], "1 of 2 looks: times and losses stay hidden until a look decides: the next is after 4 runs each"),
        ([4], "0 of 1 looks: times and losses stay hidden until the race has ended"),
    ],
)
def test_the_view_of_a_race_counts_the_runs_of_each_arm_and_says_what_may_be_seen_when(looks, last):
    drawn = []
    bars = SimpleNamespace(draw=lambda name, done, num, text: drawn.append(f"{done} of {num} {name}: {text}"))
    done = {("A", True): 1, ("A", False): 3, ("B", True): 0, ("B", False): 2}
    race = SimpleNamespace(
        plan={"n": 4, "looks": looks},
        started=lambda: {"A": 3, "B": 2},
        runs=lambda name, discarded: ["run"] * done[name, discarded],
    )
    runner._draw(race, bars)
    assert drawn == ["3 of 4 A: 3 of 4 runs", "2 of 4 B: 2 of 4 runs, warm-up first", last]
