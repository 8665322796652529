"""What a run changes of the things that its track fixes."""

from bench.config import schema, stages
from bench.config.compose import of_track
from bench.config.typed import leaves

UNFIXED = ("data.vocab_size", "track.repeats")  # derived from the data; how often a run is made changes no run


def deviations_of(config: schema.Config) -> list[str]:
    """What a run changes of the things its track fixes, as 'key: value instead of value'."""
    track = config.track
    if not track.fixed:
        return []
    rules, result = dict(leaves(of_track(track.name))), []
    for key, value in leaves(schema.to_dict(config)):
        is_fixed = any(_is_in(key, fixed) for fixed in [*track.fixed, "track"])
        if is_fixed and rules.get(key) != value and key not in UNFIXED:
            result.append(f"{key}: {value} instead of {rules.get(key)}")
    for key, words in stages.changed(config).items():
        if any(_is_in(key, fixed) or _is_in(fixed, key) for fixed in track.fixed):
            result.append(f"{words} in the place of {key}, which the track fixes")
    return result


def _is_in(key, group):
    return f"{key}.".startswith(f"{group}.")
