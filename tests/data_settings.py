"""Data settings for tests, and a data root for each test."""

from pathlib import Path

import pytest
import yaml

from bench.config import schema

REPO = Path(__file__).resolve().parent.parent
QUIET = {"say": lambda line: None}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty data root inside the user's working folder."""
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    return tmp_path / "data"


def settings(**values):
    """Returns a DataConfig, with defaults for what a track would set."""
    return schema.build(schema.DataConfig, {"seq_len": 1, "batch_tokens": 1} | values, "data.")


def conf(name, **values):
    """Returns the DataConfig of conf/data/NAME.yaml with changes."""
    return settings(**(yaml.safe_load((REPO / "conf" / "data" / f"{name}.yaml").read_text()) | values))


def small_markov(**values):
    return settings(**({"source": "markov", "train_tokens": 5000, "markov_seed": 0, "markov_lags": [1]} | values))
