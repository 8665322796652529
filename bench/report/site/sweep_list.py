"""The sweeps of a results folder on its site: over what, how many runs, the best config, a link to the page."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from bench.base import atomic
from bench.record import sweep
from bench.record.rows import Row
from bench.report import sweep_page, sweep_results, sweep_text
from bench.web.page import Safe, section, soft, table, tag

HEAD = ("started", "sweep", "over", "runs", "best of those tried")


def sweeps(results: Path | str, runs: Sequence[tuple[str, Row]], out: Path) -> Safe:
    """The section of the sweeps in this results folder, newest first; "" without any.

    runs: (absolute folder, row) of all its runs.  A sweep whose page was never made gets one, in out/sweeps/.
    """
    lines = [_line(folder, runs, out) for folder in sweep.folders(results)]
    if not lines:
        return Safe("")
    lines.sort(key=lambda line: line[0] or "", reverse=True)
    about = soft(
        "Runs over all combinations of some values, newest first.  The best is the best of those tried, no verdict."
    )
    return section("Sweeps", about, table(HEAD, lines, class_="races"), id="sweeps")


def _line(folder, runs, out):
    try:
        result = sweep_results.read(folder, runs)
        link = tag("a", folder.name, href=_page(folder, result, out))
        complete = sum(row["status"] == "complete" for row in result.rows)
        counts = f"{complete} complete" + "".join(
            f", {num} {word}" for num, word in ((len(result.lost), "lost"), (len(result.not_run), "not run")) if num
        )
        over = " × ".join(f"{len(values)} {key}" for key, values in result.axes.items())
        started = result.facts["started_at"][:16].replace("T", " ")
        return started, link, over, counts, sweep_text.best(result).partition("; ")[0]
    except Exception as error:  # whatever is wrong with one sweep, the others are shown
        return (
            None,
            folder.name,
            None,
            tag("span", "damaged", class_="badge bad"),
            f"{type(error).__name__}: {error}"[:300],
        )


def _page(folder, result, out):
    """From the index to the sweep's page."""
    path = folder / sweep_page.NAME
    if not path.exists():
        path = out / "sweeps" / f"{folder.name}.html"
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, sweep_page.html(folder, path.parent, result), durable=False)
    return quote(os.path.relpath(path, out))
