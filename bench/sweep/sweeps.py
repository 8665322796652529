"""The folders of sweeps: results/sweeps/ID/, where Hydra, its plugins and a search keep what is theirs."""

import itertools
from datetime import UTC, datetime
from pathlib import Path


def new_folder(results: Path) -> Path:
    """The absolute path of a new sweep's folder, which is not made yet: a refused sweep leaves none."""
    first = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-sweep"
    names = (first if number == 1 else f"{first}-{number}" for number in itertools.count(1))
    return next(path for name in names if not (path := Path(results).absolute() / "sweeps" / name).exists())
