"""Times of day, as records hold them: text in UTC, e.g. 2026-11-21T03:15:00.123Z.  Written and read only here."""

from datetime import UTC, datetime, timedelta


def now(before_s: float = 0.0) -> str:
    """The text for so many seconds ago."""
    return text(datetime.now(UTC) - timedelta(seconds=before_s))


def text(moment: datetime) -> str:
    """A datetime with its zone -> text, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse(text: str) -> datetime:
    """ISO 8601 -> datetime with its zone, UTC where it names none.  Raises ValueError for anything else."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def seconds(text: str) -> float:
    """ISO 8601 -> seconds since 1970.  Raises ValueError."""
    return parse(text).timestamp()
