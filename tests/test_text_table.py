"""Tables as text: for a pipe, for a terminal of any width, with colours, and as Markdown."""

import os
import pty
import subprocess
import sys

import pytest

from bench.base import text_table
from bench.base.paths import REPO

KERNELS = [
    ["void reduce_kernel<128, 4, at::native::ReduceOp<float>>(float)", "1.234", "FAIL"],
    ["Memcpy HtoD (Pinned -> Device) [red]x[/red] :smile: 'a' 12:30", "12,345.678", "slower"],
]
COLUMNS = ["kernel", "MDE (80 % power)", "status"]
RIGHT = [False, True, False]
SHOW = f"from bench.base import text_table; print(text_table.render({COLUMNS!r}, {KERNELS!r}, {RIGHT!r}))"


@pytest.fixture(autouse=True)
def no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def on_a_terminal(code, **environment):
    """What a terminal receives of a Python program."""
    theirs, ours = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    done = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPO, stdout=ours, env=variables | {"TERM": "xterm-256color"} | environment
    )
    os.close(ours)
    received = b""
    try:
        while block := os.read(theirs, 65536):
            received += block
    except OSError:  # how a pty says that its other side is closed
        pass
    os.close(theirs)
    assert done.wait(timeout=60) == 0
    return received.decode().replace("\r\n", "\n").rstrip("\n")


def test_a_table_in_a_pipe_lines_up():
    shown = text_table.render(["name", "n"], [["a", "10"], ["long name", "5"]], [False, True])
    assert shown == "name        n\n---------  --\na          10\nlong name   5"


def test_a_table_in_markdown_keeps_its_shape_with_any_text_in_a_cell():
    shown = text_table.render(["name"], [["a|b\n<i>"]], form="github")
    assert shown.splitlines() == ["| name       |", "|------------|", "| a\\|b \\<i\\> |"]


def test_a_table_without_rows_is_its_head_and_without_a_head_its_rows():
    assert text_table.render(["a", "b"], []) == "a  b\n-  -"
    assert text_table.render((), [["a", "b"], ["cc", "d"]]) == "a   b\ncc  d"
    assert text_table.render((), []) == ""


def test_without_a_terminal_and_without_columns_nothing_is_cut():
    assert text_table.render(["a"], [["x" * 5000]]).splitlines()[-1] == "x" * 5000


def test_names_of_kernels_are_printed_as_they_are():
    names = [name for name, *_ in KERNELS]
    for shown in (text_table.render(COLUMNS, KERNELS, RIGHT), on_a_terminal(SHOW, COLUMNS="200", NO_COLOR="1")):
        assert [line[:70].strip() for line in shown.splitlines()[2:]] == names


def test_a_terminal_with_room_gets_the_same_as_a_pipe():
    assert on_a_terminal(SHOW, COLUMNS="200", NO_COLOR="1") == text_table.render(COLUMNS, KERNELS, RIGHT)


def test_a_narrow_terminal_folds_words_and_never_cuts_a_number(monkeypatch):
    for width in (90, 60, 40, 12):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = text_table.render(COLUMNS, KERNELS, RIGHT)
        assert max(map(len, shown.splitlines())) <= max(width, 40)
        assert "12,345.678" in shown
        assert "…" not in shown
        without_gaps = "".join(line[: shown.splitlines()[0].index("MDE")].strip() for line in shown.splitlines())
        assert "reduce_kernel<128,4,at::native" in without_gaps.replace(" ", "")


def test_wide_characters_take_two_columns_of_a_terminal(monkeypatch):
    rows = [["漢字", "1"], ["e\u0301t\u00e9", "20"]]
    assert text_table.render(["name", "n"], rows, [False, True]).splitlines()[2:] == ["漢字   1", "e\u0301té   20"]
    monkeypatch.setenv("COLUMNS", "18")
    folded = text_table.render(["note", "n"], [["漢字" * 5, "7"]], [False, True]).splitlines()[2:]
    assert folded == ["漢字漢字漢字漢   7", "字漢字"]


def test_colours_are_those_of_a_terminal_alone():
    shown = on_a_terminal(SHOW, COLUMNS="200")
    assert "\x1b[31mFAIL" in shown
    assert "\x1b[31mslower" in shown
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_a_terminal(SHOW, COLUMNS="200", **environment)
    program = "from bench.base.text_table import coloured; print(coloured('FASTER'), coloured('A'))"
    assert on_a_terminal(program) == "\x1b[32mFASTER\x1b[0m A"
    assert on_a_terminal(program, NO_COLOR="1") == "FASTER A"
    assert text_table.coloured("FASTER") == "FASTER"  # into a pipe


def test_no_escape_of_a_foreign_record_reaches_a_terminal():
    render = "from bench.base.text_table import render; print(render(['a'], [['x\\x1b]0;title\\x07\\x1b[2J y']]))"
    assert on_a_terminal(render, NO_COLOR="1").splitlines()[-1] == "x\\x1b]0;title\\x07\\x1b[2J y"


def test_marks_line_up_with_the_lines_of_progress(monkeypatch):
    assert text_table.marked([("pass", "a: b"), ("-", "c")]) == "    pass  a: b\n       -  c"
    monkeypatch.setenv("COLUMNS", "30")
    assert text_table.marked([("FAIL", "one two three four five")]) == "    FAIL  one two three four\n          five"


def test_the_width_is_that_of_columns_before_the_terminals(monkeypatch):
    assert text_table.screen_width() is None
    monkeypatch.setenv("COLUMNS", "70")
    assert text_table.screen_width() == 70
    for wrong in ("", "0", "wide", "-3"):
        monkeypatch.setenv("COLUMNS", wrong)
        assert text_table.screen_width() is None


def test_one_is_no_plural():
    expected = ["0 runs", "1 run", "2 runs", "12,000 runs"]
    assert [text_table.counted(number, "run") for number in (0, 1, 2, 12_000)] == expected


def test_two_digits_without_an_exponent():
    expected = ["0.14", "5", "13", "612", "2600000"]
    assert [text_table.two_digits(number) for number in (0.14259, 5.04, 12.6, 612.3, 2_600_000.0)] == expected


def test_a_long_name_keeps_both_its_ends():
    assert text_table.middle("abcdefghij", 10) == "abcdefghij"
    assert text_table.middle("abcdefghij", 6) == "abc…ij"
