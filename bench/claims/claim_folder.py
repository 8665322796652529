"""A claim as a folder that can be sent, committed and judged anywhere: it is a results folder with a claim in it.

claim.yaml     track, n, races: what is claimed            README.md     a generated table, and what its author says
<track>/<run_id>/ ...   every run of the claim and of its races       races/<race_id>/ ...       ledger.jsonl   the whole
"""

from pathlib import Path

import yaml

from bench import stats, text_table
from bench.claims import claim as claims
from bench.claims import publication
from bench.record import rows as rows_of_runs
from bench.record import run_folder
from bench.report import markdown_blocks

FILE = "claim.yaml"
COMMAND = "judge --claim"  # what wrote the block of the README
COLUMNS = ("run_id", "validity", "seed", "val_loss", "train_s", "step_avg_ms")


def is_one(folder):
    return (Path(folder) / FILE).is_file()


def was_one(folder):
    """Whether the folder has a claim's README and lacks the claim."""
    try:
        return COMMAND in markdown_blocks.commands((Path(folder) / "README.md").read_text()) and not is_one(folder)
    except (OSError, UnicodeDecodeError):
        return False


def read(folder):
    """A claim folder -> Claim.  ValueError: it has no readable claim.yaml, or no run."""
    folder = Path(folder).absolute()
    try:
        told = yaml.safe_load((folder / FILE).read_text())
        track, n, races, arm = told["track"], told["n"], told["races"], told["arm"]
        assert type(n) is int and isinstance(races, list) and isinstance(track, str)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{folder / FILE}: is no claim ({error!r}): it needs track, n, races and arm") from None
    runs = [path for path in run_folder.find_runs([folder]) if _is_of(path, track, arm)]
    if not runs:
        raise ValueError(f"{folder}: it holds no run that is claimed on track {track}")
    claim = claims.of_folders(runs, results=folder)
    claim.claimed_n, claim.is_folder = n, True
    lost = set(races) - {race.race_id for race in claim.races}
    claim.missing += sorted(f"races/{race_id}" for race_id in lost)
    claim.table_fault = _table_fault(folder, claim)
    return claim


def _is_of(path, track, arm):
    """Whether the run is claimed, not raced against and no warm-up.  One that cannot be read is: the rules will say so."""
    run = run_folder.read(path)
    race = run.get("race") or {}
    return run["track"] == track and not race.get("discarded") and (not race or race["arm"] == arm)


def write(folder, claim, results):
    """Make the claim's folder, or its README's table again.  Raises ValueError where something else is in the way."""
    folder = Path(folder).absolute()
    if folder.is_relative_to(Path(results).absolute()):
        raise ValueError(
            f"--claim {folder}: it lies in {results}, where the copies would be counted as runs: name a folder outside"
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--claim {folder}: it is not empty: name a new folder, or remove it")
    arms = {race.arm for race in claim.races}
    if len(arms) > 1 or (arms and any(run.race_id is None for run in claim.runs)):
        raise ValueError("a claim is of one arm, or of runs outside any race: these runs are mixed")
    races = [race.race_id for race in claim.races]
    claimed = {"track": claim.track, "n": len(claim.runs), "races": races, "arm": next(iter(arms), None)}
    text = f"# Claim on {claim.track}\n\nWhat was changed, and why it is faster: (to be written)\n\n{markdown_blocks.block(COMMAND, summary(claim))}\n"
    texts = {FILE: yaml.safe_dump(claimed, sort_keys=False), "README.md": text}
    runs = [run.name for run in claim.all_runs]
    publication.copy(publication.Content(Path(results), runs, races, folder.name), folder, lambda copied: texts)


def located(word):
    """What a user calls a claim's folder -> the folder, or None if it is none."""
    try:
        folder = Path(run_folder.locate(word))
    except ValueError:
        return None
    return folder if is_one(folder) else None


def content(folder):
    """A claim's folder -> what is in it, to be published as it stands."""
    try:
        texts = {name: (folder / name).read_text() for name in (FILE, "README.md")}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder}: {FILE} or README.md cannot be read ({error}): ./run.sh judge says what is missing"
        ) from None
    runs = [path.relative_to(folder).as_posix() for path in run_folder.find_runs([folder])]
    races = [path.name for path in sorted(folder.glob("races/*")) if path.is_dir()]
    return publication.Content(folder, runs, races, folder.resolve().name, texts)


def summary(claim):
    """The generated block: every run with its numbers, means, and what it was raced against."""
    parts = []
    for part, runs in (("claimed", claim.runs), ("raced against", claim.others)):
        rows = sorted(
            (rows_of_runs.row_of(run.record) for run in runs), key=lambda row: (row["started_at"], row["run_id"])
        )
        if rows:
            cells = [[_cell(row[column]) for column in COLUMNS] for row in rows]
            parts += [
                f"{part}, {len(rows)} runs: {_means(rows)}",
                text_table.render(COLUMNS, cells, [False, False] + [True] * 4, "github"),
            ]
    for race in claim.races:
        for name, found in ((race.result or {}).get("result") or {"against": {}})["against"].items():
            if name == race.arm:
                parts.append(text_table.line(f"{race.race_id}: {found['words']}", True))
    return "\n\n".join(parts)


def _cell(value):
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _means(rows):
    words = []
    for column, unit in (("train_s", " s"), ("val_loss", "")):
        values = [row[column] for row in rows if row[column] is not None]
        if values:
            sd = stats.sd(values)
            words.append(f"{column} {stats.mean(values):.4f}{unit}" + ("" if sd is None else f" (sd {sd:.4f})"))
    return ", ".join(words) or "no numbers"


def _table_fault(folder, claim):
    try:
        text = (folder / "README.md").read_text()
    except OSError as error:
        return f"README.md cannot be read ({error.strerror})"
    if COMMAND not in markdown_blocks.commands(text):
        return "README.md has no generated table"
    return (
        "README.md's table is stale: it is not what the runs say"
        if markdown_blocks.stale(text, lambda command: summary(claim))
        else None
    )
