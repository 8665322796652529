"""Writes and reads times as records hold them: text in UTC, such as 2026-11-21T03:15:00.123Z."""

from datetime import UTC, datetime, timedelta


def now(before_s: float = 0.0) -> str:
    """Returns the present time as text, or the time before_s seconds ago."""
    return text(datetime.now(UTC) - timedelta(seconds=before_s))


def text(moment: datetime) -> str:
    """Returns a datetime with a time zone as text in UTC, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse(text: str) -> datetime:
    """Parses ISO 8601 into a datetime with a time zone, UTC if it names none.  Raises ValueError for other text."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def seconds(text: str) -> float:
    """Parses ISO 8601 into seconds since 1970.  Raises ValueError for other text."""
    return parse(text).timestamp()
