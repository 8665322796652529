"""The races of a results folder on its site: who raced whom, the verdict, the size of the change, a link."""

import os
from pathlib import Path
from urllib.parse import quote

from bench.base import atomic
from bench.record import race_folder
from bench.report import race_page
from bench.web.page import Safe, join, section, soft, table, tag

HEAD = ("started", "race", "arm", "verdict", "train time against the baseline")


def races(results: Path | str, out: Path) -> Safe:
    """The section of the races in this results folder, or in its folders where it holds publications; "" without any.

    Newest first.  A race whose page was never made gets one, in out/races/.
    """
    paths = [*Path(results).glob("races/*/race.json"), *Path(results).glob("*/races/*/race.json")]
    result = {}
    for path in sorted(paths):
        result.setdefault(path.parent.name, path.parent)  # the same race may lie in two publications
    read = [_read(folder, out) for folder in result.values()]
    lines = [line for _, lines in sorted(read, key=lambda one: one[0], reverse=True) for line in lines]
    if not lines:
        return Safe("")
    about = soft("Each arm of a race against its baseline, newest first; the intervals are of 95 %.")
    return section("Races", about, table(HEAD, lines, class_="races"), id="races")


def _read(folder, out):
    """(start, a line for each arm); a race that cannot be read says why."""
    try:
        race = race_folder.read(folder)
        started = str(race["started_at"])
        link = join([tag("a", race["race_id"], href=_page(folder, out)), race_page.staircase(folder, out, race)])
        return started, _lines(race, started[:16].replace("T", " "), link)
    except Exception as error:  # whatever is wrong with one race, the others are shown
        words = f"{type(error).__name__}: {error}"[:300]
        return folder.name, [(None, folder.name, None, _badge("damaged", "bad"), words)]


def _lines(race, started, link):
    against = (race.get("result") or {}).get("against") or {}
    if not against:
        return [(started, link, None, _badge(str(race["status"]), "soft"), race.get("why"))]
    lines = []
    for name, one in against.items():
        badge = _badge(str(one.get("verdict")), race_page.COLOUR.get(one.get("verdict"), "soft"))
        arms = f"{name} against {race['baseline']}"
        lines.append((started, link, arms, badge, _change(one)))
    return lines


def _change(one):
    """E.g. -0.50 % [-0.73, -0.27], over its sentence."""
    time = one.get("time") or {}
    if time.get("change_pct") is None or not one.get("comparable", True):
        return one.get("words")
    interval = time.get("ci95_pct")
    size = f"{time['change_pct']:+.2f} %" + (f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else "")
    return tag("div", tag("b", size), tag("div", one.get("words"), class_="soft"))


def _badge(word, colour):
    return tag("span", word.replace("_", " "), class_=f"badge {colour}")


def _page(folder, out):
    """From the index to the race's page."""
    path = folder / "race.html"
    if not path.exists():
        path = out / "races" / f"{folder.name}.html"
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, race_page.html(folder, at=path.parent), durable=False)
    return quote(os.path.relpath(path, out))
