"""The files of one run folder for the rules on it (verification.py): each is read when a rule asks, and once."""

import functools
from pathlib import Path

from bench.config import schema
from bench.record import step_files


class RunFiles:
    """folder: of the run.  Reading what is missing or damaged raises in every rule that asks for it."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    @functools.cached_property
    def config(self) -> schema.Config:
        """config.yaml.  ValueError as schema.read()."""
        return schema.read(self.folder)

    @functools.cached_property
    def steps(self) -> list[dict]:
        """Rows of steps.csv, [] without one.  ValueError as step_files.read()."""
        return step_files.read(self.folder)
