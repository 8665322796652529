"""A race that has ended -> race.md and race.html beside its race.json, and its verdict for a terminal."""

from pathlib import Path

from bench.base import atomic, text_table
from bench.compare import text as compare_text
from bench.record import race_folder


def write(folder: Path | str, race: race_folder.Race) -> None:
    """race: bench.record.race_folder.Race."""
    folder = Path(folder)
    atomic.write_text(folder / "race.md", text(race, "md", why=True) + "\n")
    from bench.report import race_page

    race_page.write_run_pages(folder)
    atomic.write_text(folder / "race.html", race_page.html(folder))


def text(race: dict, form: str = "terminal", why: bool = False) -> str:
    """What was raced, how it went, and the verdict of each candidate.  why: with where the time went."""
    is_md = form == "md"
    lines = [f"# Race {race['race_id']}" if is_md else f"race {race['race_id']}", ""]
    lines += [f"{'-' if is_md else ' '} {text_table.line(words, is_md)}" for words in _facts(race)]
    if race["result"] is None:
        verdict = last_words(race)
    else:
        verdict = verdicts(race["result"], form, why=why, hint=f"./run.sh compare {race['race_id']} --why")
    return "\n".join([*lines, "", verdict])


def last_words(race: dict) -> str:
    """The verdict of each candidate alone, a line each, for a terminal."""
    if race["result"] is None:
        return text_table.printable(f"no verdict: {race['why']}")
    return "\n".join(compare_text.verdict(one) for one in race["result"]["against"].values())


def _facts(race):
    for name, arm in race["arms"].items():
        commit = f"commit {arm['commit'][:8]}" if arm["commit"] else "no commit"
        commit += ", changed" * bool(arm["dirty"])
        yield f"{name}: {race_folder.what(arm)} (config {arm['config_id']}, {commit})"
    known = race["plan"]
    started = ", ".join(f"{len(arm['runs'])} {name}" for name, arm in race["arms"].items())
    names = [one["arm"] for one in race["order"] if not one["discarded"]]
    order = "".join(name if len(name) == 1 else f" {name}" for name in names).strip()
    planned = f"planned {known['n']} runs an arm on track {race['track']}, started {started}"
    yield f"{planned}; order {order} after a warm-up each"
    looks, status = ", ".join(map(str, known["looks"])), race["status"].replace("_", " ")
    yield f"plan {race['plan_sha256'][:12]}, alpha {known['alpha']:g}, looks at {looks}; {status}"
    if race["why"]:
        yield race["why"]
    interrupted = [run for arm in race["arms"].values() for run in arm["interrupted_runs"]]
    if interrupted:
        yield f"interrupted and run again: {', '.join(interrupted)}"
    if race["unplanned_look"]:
        yield f"unplanned look: {compare_text.FLAGS['unplanned-look']}"


def verdicts(result: dict, form: str = "terminal", why: bool = False, hint: str = "") -> str:
    """Each candidate against the baseline, the verdicts last.

    result: of runner.result_of(); why, hint: of bench.compare.text.render().
    """
    return compare_text.report(list(result["against"].values()), form, why=why, hint=hint)
