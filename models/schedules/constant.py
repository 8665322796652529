"""A schedule that is constant after the warm-up."""

from models.schedules import Config

__all__ = ["Config"]
