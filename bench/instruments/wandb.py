"""Weights & Biases gets the run once its record is complete (bench/exporters/wandb.py): nothing happens during the race."""

from bench.exporters import dashboards
from bench.instruments.base import Instrument


class Wandb(Instrument):
    """Made only where the package is there; otherwise the record warns, with the command that installs it."""

    def __init__(self, context, **settings):
        super().__init__(context)
        if context.rank == 0:
            dashboards.require("wandb")


INSTRUMENT = Wandb
