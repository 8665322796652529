"""Where there is no GPU: the resident set of a process at the marks of a recording -> a page.

The file, NAME_rankN.rss.json: {"what", "rank", "marks": [[time_us, "forward"], ...], "rss_bytes": [one for each mark]}.
It says what the whole process held, the interpreter and its libraries included; who asked for it is not known.
"""

import json

from bench.units import MIB, format_bytes
from bench.web.chart import chart, mark_of, series_of
from bench.web.page import figure, page, section, table, tag

SUFFIX = ".rss.json"
WHAT = "resident set of the process: without a GPU, torch keeps no history of allocations"


def load(path):
    """ValueError for a file that is none."""
    try:
        found = json.loads(path.read_text())
        marks, rss_bytes = found["marks"], found["rss_bytes"]
        plain = len(marks) == len(rss_bytes) and all(isinstance(size, int) for size in rss_bytes)
        plain = plain and all(isinstance(time_us, (int, float)) and isinstance(name, str) for time_us, name in marks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: holds no samples of a process ({error})") from None
    if not plain or not marks:
        raise ValueError(
            f"{path}: holds no samples of a process; it needs as many rss_bytes as marks, and one at least"
        )
    return found


def facts(found):
    rss_bytes = found["rss_bytes"]
    return {"what": WHAT, "num_samples": len(rss_bytes), "peak_bytes": max(rss_bytes), "end_bytes": rss_bytes[-1]}


def chart_of(found, id="rss"):
    """Samples as load() gives them -> a chart spec."""
    marks, rss_bytes = found["marks"], found["rss_bytes"]
    x = _ms(marks)
    series = [series_of("resident set", [size / MIB for size in rss_bytes], "line")]
    lines = [mark_of(where, name, "validation") for where, (_, name) in zip(x, marks) if name.startswith("step")]
    caption = f"largest {format_bytes(max(rss_bytes))}, at the end {format_bytes(rss_bytes[-1])}"
    return chart(id, "Resident set", caption, "ms since the first mark", "MiB", x, series, lines)


def of_samples(found, title):
    """Samples as load() gives them -> html."""
    drawn = chart_of(found)
    rows = [
        [name, round(where, 3), round(size / MIB, 2)]
        for where, (_, name), size in zip(_ms(found["marks"]), found["marks"], found["rss_bytes"])
    ]
    head = ("mark", "ms", "resident set, MiB")
    return page(
        title,
        tag("h1", title),
        tag("p", WHAT + ".", class_="soft"),
        figure(drawn),
        section("Marks", table(head, rows)),
        data={"charts": [drawn]},
    )


def _ms(marks):
    return [(time_us - marks[0][0]) / 1e3 for time_us, _ in marks]
