"""Tables of text."""

from bench import text_table


def test_a_table_for_the_terminal():
    shown = text_table.render(["name", "n"], [["a", "10"], ["long name", "5"]], [False, True])
    assert shown == "name        n\n---------  --\na          10\nlong name   5"


def test_a_table_in_markdown_keeps_its_shape_with_any_text_in_a_cell():
    shown = text_table.render(["name"], [["a|b\n<i>"]], form="github")
    assert shown.splitlines() == ["| name       |", "|------------|", "| a\\|b \\<i\\> |"]


def test_a_table_without_rows_is_its_head():
    assert text_table.render(["a", "b"], []) == "a  b\n-  -"


def test_control_characters_and_writing_direction_marks_are_left_out():
    assert text_table.printable("a\x1b[31mb\u202ec\x00d\te") == "a[31mbcd e"
    assert text_table.printable("naïve 日本") == "naïve 日本"


def test_two_digits_without_an_exponent():
    assert [text_table.two_digits(number) for number in (0.14259, 5.04, 12.6, 612.3, 2_600_000.0)] == [
        "0.14",
        "5",
        "13",
        "612",
        "2600000",
    ]
