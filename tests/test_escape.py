"""Foreign text in each medium, and standard output that is closed, full or no longer read."""

import csv
import io
import os
import pty
import subprocess
import sys

import pytest

from bench.base import escape
from bench.base.paths import REPO
from bench.cli import main

EVIL = "a\x1b[2J\x1b]8;;http://evil\x07b\r\n\u202ec\udcff"


def program(arguments, **options):
    return subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=REPO, stdin=subprocess.DEVNULL, **options)


def test_a_line_shows_what_a_terminal_would_obey():
    assert escape.line(EVIL) == "a\\x1b[2J\\x1b]8;;http://evil\\x07b \\u202ec\\udcff"
    assert escape.line("naïve 日本\xa0x\ty") == "naïve 日本\xa0x y"


def test_markdown_begins_nothing_and_mentions_nobody():
    assert escape.markdown("a|b `c` [d](e) <f> &#64;") == "a\\|b \\`c\\` \\[d\\](e) \\<f\\> \\&#&#8203;64;"
    kept = "@&#8203;me #&#8203;12 o/r#&#8203;3 GH-&#8203;4 a@&#8203;b.org"
    assert escape.markdown("@me #12 o/r#3 GH-4 a@b.org") == kept
    assert escape.markdown("https://x.org www.x.org") == "https:&#8203;//x.org www&#8203;.x.org"
    assert escape.markdown("# 5 @ 3 GHz, 10:30, awww") == "# 5 @ 3 GHz, 10:30, awww"


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+cmd|' /C calc'!A0", "'-2+cmd|' /C calc'!A0"),
        ("\t=1", " =1"),
        ("-0.5 %", "-0.5 %"),
        ("+1e-05", "+1e-05"),
        ("-0.0707 to +0.0110 nats", "-0.0707 to +0.0110 nats"),
        ("-1 to =2", "'-1 to =2"),
        ("a=b", "a=b"),
        (-0.5, "-0.5"),
        (None, ""),
        (EVIL, escape.line(EVIL)),
    ],
)
def test_no_cell_of_a_csv_is_a_formula(cell, written):
    assert list(csv.reader(io.StringIO(escape.csv_text([[cell, 1]])))) == [[written, "1"]]


def test_latex_takes_every_character_literally():
    assert escape.latex("50 % of_x\\y~^") == r"50 \% of\_x\textbackslash{}y\textasciitilde{}\textasciicircum{}"


def test_whatever_is_printed_passes_the_door(capsys):
    with escape.doors():
        print(EVIL, "\x1b[32mgreen\x1b[0m", end="")
        print("\x1b[2J", file=sys.stderr)
    out, err = capsys.readouterr()
    assert out == f"{EVIL[:1]}\\x1b[2J\\x1b]8;;http://evil\\x07b\\r\n\\u202ec\\udcff \\x1b[32mgreen\\x1b[0m"
    assert err == "\\x1b[2J\n"


def test_a_terminal_gets_our_colours_and_nothing_else_also_below_a_bar():
    code = """
from bench.base import escape
from bench.launch import console
with escape.doors(), console.Bars() as bars:
    bars.draw("run", 1, 2, "x")
    console.say("run", "\\x1b[32mgreen\\x1b[0m \\x1b]8;;http://evil\\x07link \\x1b[2Jgone", always=True)
"""
    main, end = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=end, env=os.environ | {"TERM": "xterm"})
    os.close(end)
    seen = b""
    while True:
        try:
            seen += os.read(main, 1 << 16)
        except OSError:
            break
    assert child.wait() == 0
    assert b"\\x1b]8;;http://evil\\x07link \\x1b[2Jgone" in seen
    assert b"\x1b[32mgreen\x1b[0m" in seen and b"\x1b[2J" not in seen and b"\x1b]8" not in seen


CLOSED = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-"}


@pytest.mark.parametrize("which", CLOSED)
def test_a_closed_output_mutes_a_verb(which, tmp_path):
    command = f'"{sys.executable}" -m bench doctor --help {CLOSED[which]}'
    env = os.environ | {"SPEEDRUN_CWD": str(tmp_path)}
    assert subprocess.run(command, shell=True, cwd=REPO, env=env).returncode == 0


RECORD = next((REPO / "results" / "published").glob("cpu_nano-gpt2-adamw/*/2*"))
ANSWERS = (  # of a command whose output is its work, with its exit code otherwise
    ["help", "race"],
    ["completion", "bash"],
    ["data", "show", "--help"],
    ["run", "--dry-run", "track=free", "experiment=smoke"],
    ["table", str(RECORD)],
    ["verify", str(RECORD), "--json"],
    ["report", str(RECORD), "--md"],
)


@pytest.mark.parametrize("arguments", ANSWERS, ids=" ".join)
def test_what_is_only_printed_fails_on_a_full_disk_and_a_reader_that_left_ends_nothing(arguments):
    with open("/dev/full", "w") as full:
        ended = program(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("standard output: No space left on device: the rest was not printed\n")
    reader, writer = os.pipe()
    os.close(reader)
    ended = program(arguments, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ended.returncode == 0 and "standard output" not in ended.stderr


@pytest.mark.parametrize(("arguments", "is_printed"), [(["race", "--look", "R"], True), (["race", "--resume"], False)])
def test_the_look_at_a_race_is_all_that_it_is_for(arguments, is_printed):
    assert main._only_answers(arguments) is is_printed


def test_what_a_command_leaves_behind_is_done_whether_or_not_its_output_is_written(tmp_path):
    with open("/dev/full", "w") as full:
        ended = program(["init"], stdout=full, env=os.environ | {"SPEEDRUN_CWD": str(tmp_path)})
    assert ended.returncode == 0 and any(tmp_path.iterdir())
