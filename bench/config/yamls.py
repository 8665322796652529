"""Hydra's repository of yamls, read once by a process: a ladder composes 43 rungs that stand on each other."""

from hydra._internal.config_repository import ConfigRepository

_read = {}


class Yamls(ConfigRepository):
    """As Hydra's own, which reads anew for every composition.  Composing changes nothing of what is read."""

    def load_config(self, config_path):
        key = config_path, *((source.provider, source.path) for source in self.sources)
        if key not in _read:
            _read[key] = super().load_config(config_path)
        return _read[key]
