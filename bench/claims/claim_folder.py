"""A claim as a folder that can be sent, committed and judged anywhere: a results folder with a claim.yaml.

claim.yaml              track, n, races, arm
README.md               a generated table and its author's text
<track>/<run_id>/ ...   every run of the claim and of its races    races/<race_id>/ ...    ledger.jsonl  (complete)
"""

from pathlib import Path
from typing import Literal, TypedDict

import yaml

from bench.base import escape, stats, text_table
from bench.base.paths import user_path
from bench.base.reading import json_file, plain_file, yaml_file
from bench.base.reading.damage import Damaged
from bench.claims import claim as claims
from bench.claims import publication
from bench.compare import wording
from bench.record import ledger, race_folder, run_folder
from bench.record.named import CLAIM
from bench.record.rows import Row, row_of
from bench.report import markdown_blocks

Column = Literal["run_id", "validity", "seed", "val_loss", "train_s", "step_avg_ms"]
COMMAND = "judge --claim"  # the command that generates the block of the README
COLUMNS: tuple[Column, ...] = ("run_id", "validity", "seed", "val_loss", "train_s", "step_avg_ms")


class Claimed(TypedDict):
    """The content of claim.yaml."""

    track: str
    n: int
    races: list[str]
    arm: str | None


def lacks_claim(folder: Path) -> bool:
    """Returns whether the folder has a claim's README but no claim.yaml."""
    is_claims = COMMAND in markdown_blocks.commands(plain_file.text_or_empty(folder / "README.md"))
    return is_claims and not (folder / CLAIM).is_file()


def read(folder: str | Path) -> claims.Claim:
    """Reads a claim folder.  Raises ValueError if it has no readable claim.yaml, or no run."""
    folder = Path(folder).absolute()
    claimed: Claimed = json_file.check_kind(yaml_file.read(folder / CLAIM), Claimed, folder / CLAIM)
    runs = [path for path in run_folder.find_runs([folder]) if _is_claimed(path, claimed)]
    if not runs:
        raise ValueError(f"{folder}: it holds no run that is claimed on track {claimed['track']}: restore its runs")
    claim = claims.from_folders(runs, ledger.read(folder))
    claim.claimed_n, claim.is_folder = claimed["n"], True
    missing = set(claimed["races"]) - {race.race_id for race in claim.races}
    claim.missing += sorted(f"races/{race_id}" for race_id in missing)
    claim.table_fault = _table_fault(folder, claim)
    return claim


def _is_claimed(path: Path, claimed: Claimed) -> bool:
    """Returns whether the run is on the claim's track, in its arm if it was raced, and no warm-up run."""
    run = run_folder.read(path)
    race = run.get("race") or {}
    is_of_arm = not race or (race["arm"] == claimed["arm"] and not race.get("discarded"))
    return run["track"] == claimed["track"] and is_of_arm


def write(folder: str | Path, claim: claims.Claim, gated: publication.Gated | None = None) -> None:
    """Writes the claim's folder.  Raises ValueError if it is not new, or the claim or a file may not be published."""
    folder, results = user_path(folder).absolute(), claim.ledger.results.absolute()
    if folder.is_relative_to(results):
        raise ValueError(f"--claim {folder}: inside {results} its copies would be counted as runs: name one outside")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--claim {folder}: it is not empty: name a new folder, or remove it")
    arms = {race.arm for race in claim.races}
    if len(arms) > 1:
        raise ValueError(f"--claim: the runs are of the arms {', '.join(sorted(arms))}: race it again under one name")
    races = [race.race_id for race in claim.races]
    claimed = {"track": claim.track, "n": len(claim.runs), "races": races, "arm": next(iter(arms), None)}
    unwritten = publication.UNWRITTEN
    head = f"# Claim on {claim.track}\n\nWhat was changed, and why it is faster: {unwritten}\n\nBy: {unwritten}"
    runs = [run.name for run in claim.all_runs]
    links = "\n".join(publication.certificate_links(results, runs))
    readme = "\n\n".join(filter(None, [head, markdown_blocks.block(COMMAND, summary(claim)), links])) + "\n"
    texts = {CLAIM: yaml.safe_dump(claimed, sort_keys=False), "README.md": readme}
    content = publication.Content(claim.ledger, runs, races, folder.name)
    publication.copy(content, folder, lambda copied: texts, gated or publication.Gated())


def content(folder: Path) -> publication.Content:
    """Returns a claim folder's content, to be published unchanged.  Raises ValueError if its texts cannot be read."""
    try:
        if any((folder / name).is_symlink() for name in (CLAIM, "README.md")):
            raise Damaged("one is a link, which is not published")
        texts = {name: plain_file.text(folder / name) for name in (CLAIM, "README.md")}
    except Damaged as error:
        why = f"{CLAIM} or README.md cannot be read ({error})"
        raise ValueError(f"{folder}: {why}: ./run.sh judge says what is missing") from None
    runs = [path.relative_to(folder).as_posix() for path in run_folder.find_runs([folder])]
    races = [path.name for path in sorted(folder.glob("races/*")) if path.is_dir()]
    return publication.Content(ledger.read(folder), runs, races, folder.resolve().name, texts)


def summary(claim: claims.Claim, times_of_all: bool = False) -> str:
    """Returns the README's generated block: all runs with their numbers and means, and the verdicts of the races.

    times_of_all: the mean time is of all runs, as 0.2.0 wrote it, and not of the valid ones.
    """
    parts = []
    for part, runs in (("claimed", claim.runs), *_others(claim)):
        rows = sorted((row_of(run.record) for run in runs), key=lambda row: (row["started_at"], row["run_id"]))
        if rows:
            cells = [[_cell(row[column]) for column in COLUMNS] for row in rows]
            table = text_table.render(COLUMNS, cells, [False, False] + [True] * 4, "github")
            parts += [f"{escape.markdown(part)}, {len(rows)} runs: {_means(rows, times_of_all)}", table]
    for race in claim.races:
        against = race_folder.verdicts_of(race.race_json or {})
        if race.arm in against:
            parts.append(escape.markdown(f"{race.race_id}: {wording.standalone_verdict(against[race.arm])}"))
    return "\n\n".join(parts)


def _cell(value: float | str | None) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _others(claim: claims.Claim) -> list[tuple[str, list[claims.Run]]]:
    """Returns (heading, runs) of each other arm of the claim's races, the baseline first."""
    by_arm: dict[str, list[claims.Run]] = {}
    plans = [race.state.plan for race in claim.races if race.state]
    for run in claim.others:
        by_arm.setdefault(run.arm, []).append(run)
    if len(by_arm) < 2:
        return [("raced against", runs) for runs in by_arm.values()]
    baselines = {plan["baseline"] for plan in plans}
    about = {name: description for plan in plans for name, description in race_folder.about(plan["arms"]).items()}
    ordered = sorted(by_arm.items(), key=lambda item: (item[0] not in baselines, item[0]))
    heads = {True: "raced against", False: "another arm of the race"}
    return [(f"{heads[name in baselines]}, {name}: {about.get(name, '')}", runs) for name, runs in ordered]


def _means(rows: list[Row], times_of_all: bool) -> str:
    means, valid = [], [row for row in rows if row["validity"] == "valid" or times_of_all]
    units: dict[Literal["train_s", "val_loss"], str] = {"train_s": " s", "val_loss": ""}
    for column, unit in units.items():
        of = valid if column == "train_s" else rows
        if values := [value for row in of if (value := row[column]) is not None]:
            sd, which = stats.sd(values), f" of the {len(of)} valid" * (len(of) < len(rows))
            means.append(f"{column} {stats.mean(values):.4f}{unit}" + ("" if sd is None else f" (sd {sd:.4f})") + which)
    return ", ".join(means) or "no numbers"


def _table_fault(folder: Path, claim: claims.Claim) -> str | None:
    try:
        text = plain_file.text(folder / "README.md")
    except Damaged as error:
        return str(error).removeprefix(f"{folder}/")
    if COMMAND not in markdown_blocks.commands(text):
        return "README.md has no generated table"
    is_current = not markdown_blocks.stale(text, lambda command: summary(claim))
    stale = not is_current and markdown_blocks.stale(text, lambda command: summary(claim, times_of_all=True))
    return "README.md's table is stale: it is not what the runs say" if stale else None
