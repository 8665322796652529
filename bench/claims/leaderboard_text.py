"""The leaderboard in words, for a terminal or in Markdown.  ./run.sh table --leaderboard"""

from collections.abc import Callable, Iterable

from bench import stats, text_table
from bench.claims import uncounted
from bench.claims.leaderboard import boards
from bench.paths import results_root
from bench.record import index, named

MAX_ENTRIES = 20  # shown of a track
COLUMNS = ("entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", "device", "commit", "last run")
RECORDS = ("record", "since", "entry", "config_id", "train_s", "change", "measured", "n", "device", "commit")


def text(folders: Iterable[str] = (), form: str = "github", on_error: Callable[[str], None] | None = None) -> str:
    """The leaderboard of results/, or of these folders, in Markdown (github) or for a terminal (simple).

    folders: words of the user.  A run that cannot be read is skipped and reported to on_error(message).
    """
    paths = [named.folder(word) for word in folders] or [results_root()]
    found = list(index.read_rows([path for path in paths if path.is_dir()], on_error))
    parts = []
    for board in boards(found, paths):
        parts += [_heading(board, form), _standing(board.entries, form), _records(board.records, form)]
    return "\n\n".join(parts) or uncounted.words([row for _, row in found], paths)


def _heading(board, form):
    about = f"{board.track_rules.about}. {board.needed}"
    return f"### {board.track}\n\n{about}" if form == "github" else f"{board.track}: {about.replace('`', '')}"


def _standing(ordered, form):
    more = len(ordered) - MAX_ENTRIES
    cells = [
        [
            entry.first["name"],
            entry.first["config_id"],
            f"{len(entry.rows)}" + (f", {entry.num_lost} lost" if entry.num_lost else ""),
            _number(entry.train_s, ",.3f"),
            _number(stats.sd(entry.times_s), ".3f"),
            _number(entry.losses["mean"], ".4f"),
            _number(entry.losses["p"], ".2g"),
            entry.status,
            *_origin(entry),
            entry.last_run[:10],
        ]
        for entry in ordered[:MAX_ENTRIES]
    ]
    shown = text_table.render(COLUMNS, cells, [one in ("n", "train_s", "sd", "val_loss", "p") for one in COLUMNS], form)
    return shown + (f"\n\nand {more} slower ones: ./run.sh table --group" if more > 0 else "")


def _records(records, form):
    if not records:
        return "No record yet."
    cells = [
        [
            str(entry.number),
            entry.since[:10],
            entry.first["name"],
            entry.first["config_id"],
            _number(entry.train_s, ",.3f"),
            _number(against["change_pct"], "+.2f", " %"),
            against["measured"],
            str(len(entry.rows)),
            *_origin(entry),
        ]
        for entry, _, against in records
    ]
    return text_table.render(RECORDS, cells, [name in ("record", "train_s", "change", "n") for name in RECORDS], form)


def _number(value, form, unit=""):
    return "" if value is None else f"{value:{form}}{unit}"


def _origin(entry):
    return entry.first["device"] or "", (entry.first["commit"] or "")[:8]
