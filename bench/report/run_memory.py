"""The memory of a run: what its snapshots say of who held how much when, as a part of the run's page."""

import re

from bench.memory import rss
from bench.memory.snapshot import page, pickles, snapshot_files
from bench.web.page import figure, join, section, tag

MAX_SHOWN = 3  # snapshots; each brings some 200 KB of charts


def of_run(folder):
    """Run folder -> (chart specs, html of its section); ([], "") without snapshots.  A damaged one is a sentence."""
    paths = sorted(snapshot_files.in_folder(folder), key=_rank)
    charts, parts = [], []
    for num, path in enumerate(paths[:MAX_SHOWN]):
        drawn, part = _of_file(path, f"memory-{num}")
        charts += drawn
        parts += [tag("h3", path.name), part]
    if len(paths) > MAX_SHOWN:
        parts.append(tag("p", f"Not shown: {len(paths) - MAX_SHOWN} more in the folder.", class_="soft"))
    if not parts:
        return [], ""
    return charts, section(
        "Memory",
        *parts,
        tag("p", "./run.sh memory RUN gives each snapshot a page of its own, with stacks and segments.", class_="soft"),
    )


def _rank(path):
    found = re.search(r"rank(\d+)", path.name)
    return int(found[1]) if found else 0


def _of_file(path, id):
    try:
        if path.name.endswith(rss.SUFFIX):
            samples = rss.load(path)
            drawn = rss.chart_of(samples, id)
            return [drawn], join([tag("p", rss.WHAT + ".", class_="soft"), figure(drawn)])
        return page.summary(pickles.load(path), id)
    except (OSError, ValueError) as error:
        return [], tag("p", f"It cannot be read: {str(error).replace(str(path), path.name)}", class_="soft")
