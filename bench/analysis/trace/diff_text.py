"""The difference of two traces (bench/analysis/trace/diff.py) -> words for a terminal."""

from bench.analysis.trace.text import NUM_LINES, decimals, plain, short, table

CHANGE, MS, COUNT = "{:+.3f}".format, decimals(3), decimals(1)
TIMES = (("A ms", "a_ms", MS), ("B ms", "b_ms", MS))


def as_text(difference: dict, a: str, b: str, form: str = "simple") -> str:
    """difference: diff.compare() with "by", kernel or operator; a, b: the names of the two traces; form: of tables."""
    parts = []
    if difference["change_ms"] is not None:
        a_ms, b_ms = difference[difference["of"]]
        what = "a step" if difference["of"] == "step_ms" else "the span"
        pair = f"{a_ms:.3f} ms in {plain(a, 80)}, {b_ms:.3f} ms in {plain(b, 80)}"
        parts.append(
            f"{what}: {pair}: {difference['change_ms']:+.3f} ms\n"
            f"  {difference['explained_ms']:+.3f} ms in {difference['by']}s, the lines below\n"
            f"  {difference['idle_change_ms']:+.3f} ms in which none of them ran\n"
            f"  {-difference['overlap_change_ms']:+.3f} ms by running more or less of them at once"
        )
    change = ("ms a step", "change_ms", CHANGE)
    if difference["categories"]:
        columns = (change, *TIMES, ("category of kernels", "category", str))
        parts.append("\n" + table(difference["categories"], columns, form))
    changed = [line for line in difference["lines"] if line["status"] != "same"]
    shown, others = changed[: 3 * NUM_LINES], changed[3 * NUM_LINES :]
    if shown:
        counts = (("A count", "a_count", COUNT), ("B count", "b_count", COUNT))
        what = ("what", "what", lambda name: short(name, 80))
        parts.append("\n" + table(shown, (change, ("", "status", str), *TIMES, *counts, what), form))
    if others:
        parts.append(f"and {len(others)} more: {sum(line['change_ms'] for line in others):+.3f} ms; --json has all")
    return "\n".join(parts)


def as_markdown(difference: dict, a: str, b: str) -> str:
    """The same in Markdown, for a file."""
    return f"# Difference of two traces\n\n{as_text(difference, a, b, 'github')}\n"
