"""Errors for files that cannot be used; a message is one sentence with the path, what is wrong and what to try."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

BAD = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class Damaged(ValueError):
    """The file cannot be used; the message names it."""


class Missing(Damaged):
    """The file does not exist."""


@contextlib.contextmanager
def reading_record(where: object) -> Iterator[None]:
    """with reading_record(folder): ...   Turns errors that a damaged record causes in the block into Damaged.

    Use it where a record becomes a row, a page or a line, so that the next record is still shown.  It catches what the
    checks of the fields' types let pass; the message names the line of code that failed, as it may also be a bug.
    """
    try:
        yield
    except Damaged:
        raise
    except BAD as error:
        why = str(error)
        if type(error) is ValueError:
            raise Damaged(why if str(where) in why else f"{where}: {why}") from None
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(last.filename).name}:{last.lineno}"
        raise Damaged(f"{where}: the record lacks something or is damaged ({error!r:.200}, {at})") from None
