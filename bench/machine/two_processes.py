"""Many files by two processes, where that is quicker."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def started(work: Callable[[Any], Any], jobs: Sequence[Any], are_many: bool) -> Iterator[Iterator[Any]]:
    """with started(...) as results: ...   results: work(job) of each, in the order in which they are done.

    By two processes beside the block where there are many; else, and where a fork is not safe, as they are asked for.
    """
    if not are_many or threading.active_count() > 1 or not hasattr(os, "fork"):
        yield map(work, jobs)
        return
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        yield pool.imap_unordered(work, jobs)
