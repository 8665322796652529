"""Hydra itself: where it looks for yamls, composing, and what it says of itself (--cfg hydra, --info).

Its own parts are used as hydra.main uses them, with our folders on its search path: conf/, then the user's
(bench/config/groups.py), then what hydra.searchpath names.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

from bench.base.paths import CODE, CONF
from bench.config import groups
from bench.config.overrides import one_line

JOB_NAME = "speedrun"
VERSION_BASE = "1.3"
PLUGINS = {  # a choice of Hydra's: what must be installed for it
    "hydra/launcher": {
        "submitit_slurm": "hydra-submitit-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "joblib": "hydra-joblib-launcher",
        "ray": "hydra-ray-launcher",
    },
    "hydra/sweeper": {"optuna": "optuna", "ax": "hydra-ax-sweeper", "nevergrad": "hydra-nevergrad-sweeper"},
}
OURS = str(CODE / "bench" / "plans" / "plugins")  # holds the package hydra_plugins, where Hydra looks
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def app(loader: Callable | None = None):
    """A fresh hydra Hydra of this program.  loader: makes its ConfigLoader of a search path; None: Hydra's own."""
    if OURS not in sys.path:
        sys.path.append(OURS)
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra

    version.setbase(VERSION_BASE)
    searched = create_config_search_path(str(CONF))
    for folder in groups.own_folders():
        searched.prepend("user", f"file://{folder}", anchor="schema")
    GlobalHydra.instance().clear()
    hydra = Hydra(JOB_NAME, (loader or ConfigLoaderImpl)(searched))
    GlobalHydra.instance().initialize(hydra)
    return hydra


def composed(words: list[str], config_name: str):
    """A DictConfig, its hydra node included, of words that choose groups or are of hydra.  Raises ValueError."""
    from hydra.types import RunMode

    with refusals(words):
        return app().compose_config(config_name, list(words), RunMode.RUN, from_shell=False)


@contextlib.contextmanager
def refusals(words: list[str]) -> Iterator[None]:
    """In this block what Hydra cannot do with words is a ValueError in one line."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise _refused(error, words) from None


def _refused(error, words):
    text = one_line(error)
    for group, packages in PLUGINS.items():
        for name, package in packages.items():
            if f"'{group}/{name}'" in text:
                return ValueError(f"{group}={name}: it is not installed here: pip install {package} (docs/SWEEPS.md)")
    if "Could not override 'model/size'" in text:
        text += " A model's yaml needs it: defaults: [size: nano, _self_], as in conf/model/gpt2.yaml"
    return ValueError(f"{' '.join(words)}: {text}" if words else text)
