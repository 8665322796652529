"""Where there is no GPU: the resident set of a process at the marks of a recording -> a page.

The file, NAME_rankN.rss.json: {"what", "rank", "marks": [[time_us, "forward"], ...], "rss_bytes": [one for each mark]}.
It says what the whole process held, the interpreter and its libraries included; who asked for it is not known.
"""

from pathlib import Path
from typing import TypedDict

from bench.base.reading import json_file, plain_file
from bench.base.units import MIB, format_bytes
from bench.web.chart import chart, mark_of, series_of
from bench.web.page import figure, page, section, soft, table, tag

SUFFIX = ".rss.json"
WHAT = "resident set of the process: without a GPU, torch keeps no history of allocations"


class Samples(TypedDict):
    marks: list[tuple[int | float, str]]
    rss_bytes: list[int]


def load(path: Path) -> dict:
    """The samples as a dict.  ValueError for a file without any."""
    samples = json_file.read(path, Samples, plain_file.MAX_LINES_BYTES)
    if not len(samples["marks"]) == len(samples["rss_bytes"]) > 0:
        raise ValueError(f"{path}: holds no samples of a process: as many rss_bytes as marks, at least one")
    return samples


def facts(samples: dict) -> dict:
    """Samples as load() gives them -> {"what", "num_samples", "peak_bytes", "end_bytes"}."""
    rss_bytes = samples["rss_bytes"]
    return {"what": WHAT, "num_samples": len(rss_bytes), "peak_bytes": max(rss_bytes), "end_bytes": rss_bytes[-1]}


def chart_of(samples: dict, id: str = "rss") -> dict:
    """Samples as load() gives them -> a chart spec."""
    marks, rss_bytes, x_ms = samples["marks"], samples["rss_bytes"], _ms(samples["marks"])
    series = [series_of("resident set", [size / MIB for size in rss_bytes], "line")]
    lines = [mark_of(where, name, "validation") for where, (_, name) in zip(x_ms, marks) if name.startswith("step")]
    caption = f"largest {format_bytes(max(rss_bytes))}, at the end {format_bytes(rss_bytes[-1])}"
    return chart(id, "Resident set", caption, "ms since the first mark", "MiB", x_ms, series, lines)


def of_samples(samples: dict, title: str) -> str:
    """Samples as load() gives them -> html."""
    drawn, columns = chart_of(samples), (samples["marks"], _ms(samples["marks"]), samples["rss_bytes"])
    rows = [[name, round(where, 3), round(size / MIB, 2)] for (_, name), where, size in zip(*columns)]
    marks = section("Marks", table(("mark", "ms", "resident set, MiB"), rows))
    return page(title, tag("h1", title), soft(WHAT + "."), figure(drawn), marks, data={"charts": [drawn]})


def _ms(marks):
    return [(time_us - marks[0][0]) / 1e3 for time_us, _ in marks]
