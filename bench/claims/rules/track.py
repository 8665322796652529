"""Rules whose numbers, models and names are the track's: track.rules, track.fixed and the data in conf/."""

from bench.base.text_table import some
from bench.claims.rules.evidence import of_each
from bench.config import schema
from bench.config.resolve import deviations_of
from bench.record import metrics
from bench.record.rows import row_of
from bench.training.instruments import registry

OF_TODAY = ("track.rules.", "track.about:")  # changed since: how a claim is judged is the track's of today


def nothing_that_the_track_fixes_was_changed(claim):
    """No run is in the open division, by its record and by its config."""

    def fault_of(run):
        result = run.record["deviations"] or _deviations(run.config)
        deviations = [deviation for deviation in result if not deviation.startswith(OF_TODAY)]
        return "; ".join(deviations[:3]) or None

    return of_each(claim.runs, fault_of, f"{', '.join(claim.track_rules.fixed) or 'nothing'} as in track {claim.track}")


_known_deviations = {}  # by config_id: composing takes a third of a second, and repeats share it


def _deviations(config):
    config_id = schema.config_id(config)
    if config_id not in _known_deviations:
        _known_deviations[config_id] = deviations_of(config)
    return _known_deviations[config_id]


def the_hardware_is_that_of_the_track(claim):
    """Device, GPU model and number of GPUs are those that the track names."""
    wanted = claim.track_rules.rules

    def fault_of(run):
        gpus = [gpu["name"] for gpu in run.record["environment"]["gpus"]]
        device = run.record["hardware"]["device"]
        if wanted.device not in (None, device):
            return f"it ran on {device}, the track's device is {wanted.device}"
        if wanted.gpu is not None and set(gpus) != {wanted.gpu}:
            return f"it ran on {', '.join(sorted(set(gpus))) or 'no GPU'}, the track's GPU is {wanted.gpu}"
        if wanted.num_gpus is not None and (len(gpus), run.record["world_size"]) != (wanted.num_gpus, wanted.num_gpus):
            return f"{len(gpus)} GPUs and {run.record['world_size']} ranks instead of {wanted.num_gpus}"
        return None

    first = row_of(claim.runs[0].record)
    return of_each(claim.all_runs, fault_of, first["device"] or "CPU")


def the_data_are_those_of_the_track(claim):
    """All runs read the same bytes, with the sha256 that the track's data must have where conf/data/ names one."""
    wanted = {"train": claim.data.train_sha256, "val": claim.data.val_sha256}
    first = _data(claim.runs[0])

    def fault_of(run):
        for split, sha256 in wanted.items():
            if sha256 is not None and _data(run)[split] != [sha256]:
                return f"its {split} data are {_short(_data(run)[split])}, the track's are {sha256[:12]}"
        return None if _data(run) == first else "it read other data than the first run"

    note = "" if all(wanted.values()) else ", the same in all runs; conf/data/ names no hash"
    return of_each(claim.all_runs, fault_of, f"val {_short(first['val'])}{note}")


def _data(run):
    return {split: [file["sha256"] for file in run.record["data"][split]] for split in ("train", "val")}


def _short(hashes):
    return some([sha256[:12] for sha256 in hashes], 2)


def only_what_may_be_untimed_was_untimed(claim):
    """One timing protocol, and it excludes nothing from train_s but what the track allows."""
    allowed, first = claim.track_rules.rules.may_be_untimed, claim.runs[0].record["timing_protocol"]["id"]

    def fault_of(run):
        protocol = run.record["timing_protocol"]
        if protocol["id"] != first:
            return f"timing protocol {protocol['id']}, the first run's is {first}"
        more = [what for what in protocol["excluded"] if allowed is not None and what not in allowed]
        return f"{', '.join(more)} not timed" if more else None

    return of_each(claim.all_runs, fault_of, f"protocol {first}")


def no_forbidden_instrument_ran(claim):
    """No profiler and no other instrument that flags steps, and no step that an instrument disturbed."""

    def fault_of(run):
        result = registry.flagging(run.record["instruments"])
        if result:
            return f"{', '.join(result)} ran"
        disturbed = metrics.num_disturbed_steps(run.record)
        return f"an instrument disturbed {disturbed} steps" if disturbed else None

    return of_each(claim.all_runs, fault_of, f"{', '.join(sorted(claim.runs[0].record['instruments'])) or 'none'} ran")
