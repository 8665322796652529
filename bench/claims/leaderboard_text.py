"""The leaderboard in words, for a terminal or in Markdown.  ./run.sh table --leaderboard"""

from collections.abc import Callable, Iterable

from bench import stats
from bench.claims import uncounted
from bench.claims.leaderboard import boards
from bench.paths import results_root
from bench.record import index, named
from bench.terminal import text_table

CERTIFICATE = "certificate"  # a column where something has one
MAX_ENTRIES = 20  # shown of a track
# fmt: off
COLUMNS = (
    "entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", CERTIFICATE, "device", "commit", "last run",
)
RECORDS = (
    "record", "since", "entry", "config_id", "train_s", "change", "measured", "n", CERTIFICATE, "device", "commit",
)
# fmt: on


def text(folders: Iterable[str] = (), form: str = "github", on_error: Callable[[str], None] | None = None) -> str:
    """The leaderboard of results/, or of these folders, in Markdown (github) or for a terminal (simple).

    folders: words of the user.  A run that cannot be read is skipped and reported to on_error(message).
    """
    paths = [named.folder(word) for word in folders] or [results_root()]
    found = list(index.read_rows([path for path in paths if path.is_dir()], on_error))
    parts = []
    for board in boards(found, paths):
        judged = board.track_rules.rules.judged
        parts += [_heading(board, form), _standing(board.entries, judged, form), _records(board.records, judged, form)]
    return "\n\n".join(parts) or uncounted.words([row for _, row in found], paths)


def _heading(board, form):
    about = f"{board.track_rules.about}. {board.needed}"
    return f"### {board.track}\n\n{about}" if form == "github" else f"{board.track}: {about.replace('`', '')}"


def _score(entry):
    return _number(entry.score, "," if entry.judged == "steps" else ",.3f")


def _columns(names, judged):
    return ["steps" if name == "train_s" and judged == "steps" else name for name in names]


def _standing(ordered, judged, form):
    more = len(ordered) - MAX_ENTRIES
    cells = [
        [
            entry.first["name"],
            entry.first["config_id"],
            f"{len(entry.rows)}" + (f", {entry.num_lost} lost" if entry.num_lost else ""),
            _score(entry),
            "" if judged == "steps" else _number(stats.sd(entry.times_s), ".3f"),
            _number(entry.losses["mean"], ".4f"),
            _number(entry.losses["p"], ".2g"),
            entry.status,
            entry.certificate or "",
            *_origin(entry),
            entry.last_run[:10],
        ]
        for entry in ordered[:MAX_ENTRIES]
    ]
    shown = _rendered(COLUMNS, cells, ("n", "train_s", "sd", "val_loss", "p"), judged, form)
    return shown + (f"\n\nand {more} slower ones: ./run.sh table --group" if more > 0 else "")


def _records(records, judged, form):
    if not records:
        return "No record yet."
    cells = [
        [
            str(entry.number),
            entry.since[:10],
            entry.first["name"],
            entry.first["config_id"],
            _score(entry),
            _number(against["change_pct"], "+.2f", " %"),
            against["measured"],
            str(len(entry.rows)),
            entry.certificate or "",
            *_origin(entry),
        ]
        for entry, _, against in records
    ]
    return _rendered(RECORDS, cells, ("record", "train_s", "change", "n"), judged, form)


def _rendered(names, cells, numbers, judged, form):
    place = names.index(CERTIFICATE)
    if not any(line[place] for line in cells):
        names, cells = (*names[:place], *names[place + 1 :]), [line[:place] + line[place + 1 :] for line in cells]
    return text_table.render(_columns(names, judged), cells, [name in numbers for name in names], form)


def _number(value, form, unit=""):
    return "" if value is None else f"{value:{form}}{unit}"


def _origin(entry):
    return entry.first["device"] or "", (entry.first["commit"] or "")[:8]
