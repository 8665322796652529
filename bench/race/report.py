"""A race that is over -> race.md and race.html beside its race.json, and its verdict for a terminal."""

from pathlib import Path

from bench import atomic, text_table
from bench.compare import text as compare_text


def write(folder, race):
    """race: as bench/race/state.py makes it."""
    folder = Path(folder)
    atomic.write_text(folder / "race.md", text(race, "md") + "\n")
    from bench.report import race_page

    atomic.write_text(folder / "race.html", race_page.html(folder))


def text(race, form="terminal"):
    """What was raced, how it went, and the verdict of each candidate."""
    is_md = form == "md"
    lines = [f"# Race {race['race_id']}" if is_md else f"race {race['race_id']}", ""]
    lines += [_bullet(words, is_md) for words in _facts(race)]
    if race["result"] is None:
        lines += ["", text_table.printable(f"no verdict: {race['why']}")]
        return "\n".join(lines)
    return "\n".join([*lines, "", verdicts(race["result"], form)])


def _bullet(words, is_md):
    return f"{'-' if is_md else ' '} {text_table.line(words, is_md)}"


def _facts(race):
    for name, arm in race["arms"].items():
        what = " ".join(arm["overrides"]) or "the default"
        rev = "" if arm["rev"] is None else f" at {arm['rev']}"
        commit = f"commit {arm['commit'][:8]}" if arm["commit"] else "no commit"
        yield f"{name}: {what}{rev} (config {arm['config_id']}, {commit}{', changed' if arm['dirty'] else ''})"
    known = race["plan"]
    started = ", ".join(f"{len(arm['runs'])} {name}" for name, arm in race["arms"].items())
    order = "".join(
        one["arm"] if len(one["arm"]) == 1 else f" {one['arm']}" for one in race["order"] if not one["discarded"]
    )
    yield f"planned {known['n']} runs an arm on track {race['track']}, started {started}; order {order.strip()} after a warm-up each"
    yield f"plan {race['plan_sha256'][:12]}, alpha {known['alpha']:g}, looks at {', '.join(map(str, known['looks']))}; {race['status'].replace('_', ' ')}"
    if race["why"]:
        yield race["why"]
    interrupted = [run for arm in race["arms"].values() for run in arm["interrupted_runs"]]
    if interrupted:
        yield f"interrupted and raced again: {', '.join(interrupted)}"
    if race["peeked"]:
        yield "peeked: somebody looked at the interim state when no look was planned, so that the verdict is no evidence"


def verdicts(result, form="terminal"):
    """Each candidate against the baseline."""
    parts = [compare_text.render(one, (result["baseline"], name), form) for name, one in result["against"].items()]
    return "\n\n".join(parts)
