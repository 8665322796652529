"""The memory of a run: what its snapshots say of who held how much when, as a part of the run's page."""

import re

from bench.analysis.memory import page, pickles
from bench.web.page import figure, join, section, soft, tag

MAX_SHOWN = 3  # snapshots; each brings some 200 KB of charts


def of_run(folder):
    """Run folder -> (chart specs, html of its section); ([], "") without snapshots.  A damaged one is a sentence."""
    paths = sorted(pickles.in_folder(folder), key=_rank)
    if not paths:
        return [], ""
    charts, parts = [], []
    for num, path in enumerate(paths[:MAX_SHOWN]):
        drawn, part = _of_file(path, f"memory-{num}")
        charts += drawn
        parts += [tag("h3", path.name), part]
    if len(paths) > MAX_SHOWN:
        parts.append(soft(f"Not shown: {len(paths) - MAX_SHOWN} more in the folder."))
    parts.append(soft("./run.sh memory RUN gives each snapshot a page of its own, with stacks and segments."))
    return charts, section("Memory", *parts)


def _rank(path):
    result = re.search(r"rank(\d+)", path.name)
    return int(result[1]) if result else 0


def _of_file(path, id):
    try:
        if path.name.endswith(pickles.RSS_SUFFIX):
            samples = pickles.load_rss(path)
            drawn = pickles.rss_chart(samples, id)
            return [drawn], join([soft(pickles.WHAT + "."), figure(drawn)])
        return page.summary(pickles.load(path), id)
    except (OSError, ValueError) as error:
        return [], soft(f"It cannot be read: {str(error).replace(str(path), path.name)}")
