"""The leaderboard in words, for a terminal or in Markdown.  ./run.sh table --leaderboard"""

from collections.abc import Callable, Iterable

from bench.base import stats, text_table
from bench.base.paths import results_root
from bench.claims import uncounted
from bench.claims.leaderboard import boards
from bench.record import index, named

MAX_ENTRIES = 20  # shown of a track
CERTIFICATE = "certificate"  # a column where something has one
# fmt: off
COLUMNS = (
    "entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", CERTIFICATE, "device", "commit", "last run",
)
NUMBERS = ("record", "n", "train_s", "sd", "val_loss", "p", "change")
RECORDS = (
    "record", "since", "entry", "config_id", "train_s", "change", "measured", "n", CERTIFICATE, "device", "commit",
)
# fmt: on


def text(folders: Iterable[str] = (), form: str = "github", on_error: Callable[[str], None] | None = None) -> str:
    """Of these folders, words of the user (none: results/); form: github, or simple for a terminal."""
    paths = [named.folder(word) for word in folders] or [results_root()]
    result = list(index.read_rows([path for path in paths if path.is_dir()], on_error))
    parts = []
    for board in boards(result, paths):
        judged, about = board.track_rules.rules.judged, f"{board.track_rules.about}. {board.needed}"
        is_md = form == "github"
        parts.append(f"### {board.track}\n\n{about}" if is_md else f"{board.track}: {about.replace('`', '')}")
        parts += [_standing(board.entries, judged, form), _records(board.records, judged, form)]
    return "\n\n".join(parts) or uncounted.words([row for _, row in result], paths)


def _standing(ordered, judged, form):
    more = len(ordered) - MAX_ENTRIES
    shown = _table(COLUMNS, [_cells(entry) for entry in ordered[:MAX_ENTRIES]], judged, form)
    return shown + (f"\n\nand {more} slower ones: ./run.sh table --group" if more > 0 else "")


def _records(records, judged, form):
    if not records:
        return "No record yet."
    rows = []
    for entry, _, against in records:
        own = {"record": str(entry.number), "since": entry.since[:10], "n": str(len(entry.rows))}
        change = {"change": _number(against["change_pct"], "+.2f", " %"), "measured": against["measured"]}
        rows.append(_cells(entry) | own | change)
    return _table(RECORDS, rows, judged, form)


def _cells(entry):
    is_steps = entry.judged == "steps"
    return {
        "entry": entry.first["name"],
        "config_id": entry.first["config_id"],
        "n": f"{len(entry.rows)}" + (f", {entry.num_lost} lost" if entry.num_lost else ""),
        "train_s": _number(entry.score, "," if is_steps else ",.3f"),
        "sd": "" if is_steps else _number(stats.sd(entry.times_s), ".3f"),
        "val_loss": _number(entry.losses["mean"], ".4f"),
        "p": _number(entry.losses["p"], ".2g"),
        "status": entry.status,
        CERTIFICATE: entry.certificate or "",
        "device": entry.first["device"] or "",
        "commit": (entry.first["commit"] or "")[:8],
        "last run": entry.last_run[:10],
    }


def _table(columns, rows, judged, form):
    columns = [name for name in columns if name != CERTIFICATE or any(row[CERTIFICATE] for row in rows)]
    names = ["steps" if name == "train_s" and judged == "steps" else name for name in columns]
    cells = [[row[name] for name in columns] for row in rows]
    return text_table.render(names, cells, [name in NUMBERS for name in columns], form)


def _number(value, form, unit=""):
    return "" if value is None else f"{value:{form}}{unit}"
