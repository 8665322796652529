"""The configs of a sweep, as Hydra's sweepers and launchers ask for them: its loader, with our checks and types.

Hydra composes the groups and its own settings; each run's settings are put over that by compose.py, which refuses what
is wrong in a sentence.  It is pickled into the processes that a launcher starts.
"""

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict, read_write

from bench.config import compose, schema
from bench.config.overrides import is_of_hydra, plain


class SweepLoader(ConfigLoaderImpl):
    """machine: chooses the track where none is named; None: as on a CPU."""

    def __init__(self, machine, config_search_path):
        super().__init__(config_search_path)
        self.machine = machine

    def load_configuration(self, config_name, overrides, run_mode, from_shell=True, validate_sweep_overrides=True):
        """As Hydra's.  In a sweep's own config the settings of its runs are only words; in a run's they are values."""
        words = [word for word in overrides if not is_of_hydra(word)]
        of_hydra = [word for word in overrides if is_of_hydra(word)]
        choices = compose.group_words([word for word in words if plain(word)], self.machine)
        config = super().load_configuration(config_name, [*of_hydra, *choices], run_mode, from_shell)
        with read_write(config), open_dict(config):
            config.hydra.overrides.task = words
            how = config.hydra.job.config.override_dirname
            config.hydra.job.override_dirname = get_overrides_dirname(
                OverridesParser.create().parse_overrides(words), how.exclude_keys, how.item_sep, how.kv_sep
            )
            if run_mode == RunMode.RUN:
                for key in [key for key in config if key != "hydra"]:  # what Hydra alone made of the run's groups
                    del config[key]
                config.merge_with(OmegaConf.create(schema.to_dict(compose.compose(words, self.machine))))
        return config
