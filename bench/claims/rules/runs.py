"""Rules about the claimed runs: repeats of one config and code, enough of them, none omitted, as the track requires.

The numbers and names come from the track: track.rules, track.fixed and the data in conf/.
"""

import collections
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from bench.base import stats
from bench.base.metric import ARTIFACT_BYTES, VAL_LOSS
from bench.base.text_table import counted, some
from bench.claims.claim import NOT_KNOWN, Claim, Judged, Kind, Run, has_target, standard
from bench.claims.rules.records import judge_each
from bench.compare import eligibility, target
from bench.config import identity, schema
from bench.config.resolve import deviations_of
from bench.machine import code_state
from bench.record import metrics, step_files
from bench.record.rows import metric_of, row_of
from bench.record.shape import world_sizes
from bench.training.instruments import registry

MAX_FILES = 8  # most differing files named for each other code
MAX_RUNS, MAX_OTHERS = 8, 2  # most runs named, also of those that need not be claimed
NUMBERS = re.compile(r"\d.*", re.S)  # what follows in a reason differs among those of one kind
OF_TODAY = ("track.rules.", "track.about:")  # ignored as deviations: a claim is judged by the track's current rules
_known_deviations: dict[str, list[str]] = {}  # by config_id: composing takes 1/3 s, and repeats share it


def the_runs_share_config_and_code(claim: Claim) -> Judged:
    """All runs have one config and one code, which is in git, in the run's folder or embedded in the log."""
    if claim.is_of_logs:
        return _logs_share_code(claim)
    if len(claim.kinds) > 1:
        versions = {code_state.identity_version(run.record["code"]) for run in claim.runs}
        kinds = [f"config {config} with code {str(source)[:12]}" for config, source in sorted(claim.kinds, key=str)]
        if len(versions) > 1:
            kinds.append(f"identity versions {_numbers(versions)}: whether the code is the same is unknown")
        return False, "; ".join(kinds)
    hidden = sorted({name for run in claim.runs for name in run.record.get("redacted") or ()})
    if hidden:
        return False, f"{', '.join(hidden)}: its value is not recorded, so whether the runs share it is unknown"
    code = claim.runs[0].record["code"]
    commit = f"commit {code['commit'][:8]}" if code["commit"] else "no commit: commit what was raced, and race again"
    commit += " and the difference in code/" * bool(code["commit"] and code["dirty"])
    return code["commit"] is not None, f"config {claim.runs[0].record['config_id']}, {commit}"


def _logs_share_code(claim: Claim) -> Judged:
    """Judges whether logs embed the same code, ignoring a literal seed and the run's name."""
    logs = [run.record["imported"] or {} for run in claim.runs]
    names = [log.get("code_id") or run.record["code"]["source_sha256"] for log, run in zip(logs, claim.runs)]
    counts = collections.Counter(name for name in names if name)
    listed = some([f"{num} of code {name[:12]}" for name, num in counts.most_common()], 4)
    if len(counts) > 1:
        return False, f"{listed}: the logs embed {len(counts)} codes, so they are not repeats of one"
    if None in names:
        return None, f"{NOT_KNOWN}: {names.count(None)} of {counted(len(names), 'log')} embed no code"
    return True, f"{listed}, but for its seed; {NOT_KNOWN} whether its arguments were the same"


def the_runs_share_one_setting(claim: Claim) -> Judged:
    """All runs have one comparability_id: hardware, driver, torch, timing protocol, data, world size.

    Scripts that were raced with another interpreter each may differ in what that holds, from arm to arm.
    """
    if claim.is_of_logs:
        if not (differing := eligibility.differing_settings(claim.rows)):
            return None, NOT_KNOWN
        timed = claim.track_rules.rules.judged == "time"
        return not timed and None, f"{', '.join(differing)} differ" + "; the track judges no times" * (not timed)
    own, others = ([run for run in runs if run.record["status"] == "complete"] for runs in (claim.runs, claim.others))
    settings = {run.record["comparability_id"] for run in own + others}
    evidence = f"comparability_id {', '.join(sorted(map(str, settings)))}"
    if len(settings) == 1 or None in settings:
        return None not in settings, evidence
    keys = eligibility.differing_settings([row_of(run.record) for run in own + others])
    own_choice = {*eligibility.OF_A_SCRIPT, *eligibility.OF_ANY}
    are_scripts = all(run.record.get("script") for run in own + others) and set(keys) <= own_choice
    is_one_arm = len({run.record["comparability_id"] for run in own}) == 1
    passed = is_one_arm and are_scripts and bool(keys)
    return passed, f"{evidence}; {', '.join(keys) or 'nothing known'} differ" + ", part of what is raced" * passed


def every_run_has_its_own_seed(claim: Claim) -> Judged:
    """Each run has its own seed and its own training losses; two runs that share either are one run."""
    by_seed: dict[int | None, list[str]] = {}
    by_losses: dict[str, list[str]] = {}
    for run in claim.runs:
        if run.record["seed"] is not None or not run.is_log:
            by_seed.setdefault(run.record["seed"], []).append(run.name)
        by_losses.setdefault(step_files.losses_id_of(run.folder) or run.name, []).append(run.name)
    twice = [f"seed {seed}: {', '.join(names)}" for seed, names in by_seed.items() if len(names) > 1]
    evidence = f"seeds {_numbers(by_seed)}, no two runs with the same losses"
    if claim.is_of_logs:
        printed = _numbers(by_seed) or "none"
        evidence = f"no two of {counted(len(claim.runs), 'log')} have the same losses; seeds printed: {printed}"
        evidence += f"; copies of these, not counted: {some(claim.copies, 3)}" if claim.copies else ""
    same = "have bit-identical training losses: they are one run, whatever their seeds"
    if any(run.record.get("script") for run in claim.runs):
        labels = "which are labels: a script draws its own"
        evidence = f"seeds {_numbers(by_seed)}, {labels}; no two runs printed the same losses"
        same = "printed the same losses throughout, as one seed gives them (script.args=['--seed={seed}'] may set it)"
    twice += [f"{', '.join(names)} {same}" for names in by_losses.values() if len(names) > 1]
    return not twice, "; ".join(twice) or evidence


def _numbers(values: Iterable[int | None]) -> str:
    return ", ".join(map(str, sorted(value for value in values if value is not None)))


def there_are_enough_runs(claim: Claim) -> Judged:
    """As many runs as the track's repeats are eligible; a suspect one only where steps are judged, not time.

    One that ran beside others of its sweep never counts.
    """
    wanted, judged = claim.track_rules.repeats, claim.track_rules.rules.judged
    if not has_target(claim.track):
        return None, f"track {claim.track} keeps no records, so it asks for no number of runs"
    count = ("valid", "suspect") if judged == "steps" else ("valid",)
    num_valid = sum(run.record["validity"] in count and not run.record.get("beside") for run in claim.runs)
    if claim.may_end_early:
        num_valid = len(claim.runs)
    runs = counted(len(claim.runs), "run")
    evidence = f"{num_valid} {' or '.join(count)} of {runs}, the track needs {wanted}"
    reasons = [run.record["validity_reasons"] for run in claim.runs if run.record["validity"] == "suspect"]
    kinds = collections.Counter(kind for own in reasons for kind in {NUMBERS.sub("", text) for text in own})
    for kind, num_runs in kinds.most_common(1):
        evidence += f"; suspect: {next(text for own in reasons for text in own if text.startswith(kind))}"
        evidence += f" ({num_runs} of {len(reasons)} suspect runs have such a reason)" * (num_runs < len(reasons))
    more = "; make more with fresh seeds, and judge them together with these"
    return num_valid >= wanted, evidence + more * (num_valid < wanted and not claim.is_of_logs)


def all_claimed_runs_are_present(claim: Claim) -> Judged:
    """The number of runs that is claimed is the number of run folders, and none of the plan's is missing."""
    if claim.missing:
        return False, f"missing: {', '.join(sorted(claim.missing)[:3])}"
    if claim.claimed_n is None:
        return True, counted(len(claim.runs), "run")
    return claim.claimed_n == len(claim.runs), f"{claim.claimed_n} claimed, {len(claim.runs)} there"


def no_run_was_left_out(claim: Claim) -> Judged:
    """Every started run of this config and raced code is claimed, unless a plan excluded it from the claim beforehand.

    Warm-up runs are discarded by plan; a run that was interrupted in its race was run again; of the runs outside the
    claim's races, which are no part of their plans, none or all are claimed.  Runs of another race in which this was a
    candidate must be claimed too.  Runs of the claim's days whose settings differ by less than 1 % count as runs of
    this config.  The evidence names what is not claimed, also runs of the same config and other code, and the files
    that differ.
    """
    others = claim.unclaimed()
    close = f"with settings less than {100 * identity.NEAR_FRAC:g} % from the claim's"
    names_by_kind = {
        "started and not claimed": others.dropped,
        f"started {close}, and not claimed": others.near,
        "others, which need not be claimed": others.excused,
        "of this code and day, with settings that are no longer known": others.unknown,
    }
    evidence = [
        f"{kind}: {_listed(claim, names, MAX_RUNS if 'started' in kind else MAX_OTHERS)}"
        for kind, names in names_by_kind.items()
        if names
    ]
    if others.dropped:
        evidence.append(f"claim them too: ./run.sh judge {' '.join(claim.together_with(others.dropped))}")
    evidence = evidence or ["the ledger has no other run of this config and code"]
    for kind, names in others.other_code.items():
        evidence.append(f"{_other_code(claim, kind, names)}: {_listed(claim, names, MAX_OTHERS)}")
    return not others.dropped + others.near, "; ".join(evidence)


def _listed(claim: Claim, names: list[str], num_shown: int) -> str:
    """Lists the first runs with their ends and races, and counts the rest."""
    shown = []
    for name in names:
        start, end = claim.ledger.runs[name]["start"], claim.ledger.runs[name]["end"]
        race = f", in race {start['race']['race_id']}" if start["race"] else ""
        shown.append(f"{name} ({end['status'] if end else 'no end'}{race})")
    return some(shown, num_shown)


def _other_code(claim: Claim, kind: Kind, names: list[str]) -> str:
    """Describes how the code of these runs differs from that of the claimed runs, as far as their folders show."""
    config, source = kind
    version = claim.ledger.runs[names[0]]["start"].get("identity_version", 1)
    claimed = next(run.record["code"] for run in claim.runs if run.record["config_id"] == config)
    which = f"of the same config under code {str(source)[:12]}"
    if version != code_state.identity_version(claimed):
        return f"{which} of identity version {version} (whether it is the same code is unknown)"
    files = code_state.differing_files(claimed, claim.code_of(source, names) or {"identity_version": version})
    if not files:
        return f"{which} (no folder says which files differ)"
    return f"{which} (differing: {some(files, MAX_FILES)})"


def the_target_is_reached(claim: Claim) -> Judged:
    """The mean val_loss is below the track's target, by the statistic that it names; or every run reached it.

    No run is below track.rules.implausible_val_loss; logs of other programs are not checked for that earlier.
    """
    least, losses = claim.track_rules.rules.implausible_val_loss, [row["val_loss"] for row in claim.rows]
    measured = [loss for loss in losses if loss is not None]
    if least is not None and measured and min(measured) < least:
        reason = f"val_loss {min(measured):.5f} is below {least:g}, which nothing trained on this track can reach"
        return False, f"{reason}: the targets leak into the validation"
    return claim.decision["passed"], claim.decision["words"]


def every_run_has_a_score_within_its_budget(claim: Claim) -> Judged:
    """Where the track has a budget, each run was validated within it."""
    if not (budget := standard(claim.track).goal.budget):
        return None, f"track {claim.track} has no budget"
    limits = ", ".join(f"{amount:g} {unit.replace('time_', '')}" for unit, amount in budget.items())

    def fault_of(run: Run) -> str | None:
        return None if row_of(run.record)["score"] is not None else f"it was not validated within {limits}"

    scores = [f"{row['score']:.5f}" for row in claim.rows if row["score"] is not None]
    return judge_each(claim.runs, fault_of, f"{metric_of(claim.rows).name} {some(scores, MAX_RUNS)} within {limits}")


def the_artifact_is_small_enough(claim: Claim) -> Judged:
    """The model and its code, as the runs print their size, are within the track's bytes."""
    if (most := claim.track_rules.rules.max_artifact_bytes) is None:
        return None, f"track {claim.track} limits no artifact"
    sizes = {run.name: step_files.validations(run.folder, ARTIFACT_BYTES.name) for run in claim.runs}
    last = {name: max(bytes_by_step.values()) for name, bytes_by_step in sizes.items() if bytes_by_step}

    def fault_of(run: Run) -> str | None:
        size = last.get(run.name)
        return "it prints no size" if size is None else f"{size:,.0f} bytes" if size > most else None

    return judge_each(claim.runs, fault_of, f"at most {max(last.values(), default=0):,.0f} of {most:,} bytes")


def _gain(claim: Claim, other: Claim, min_gain_nats: float) -> Judged:
    """Tests (one-sided Welch) that the metric is better by min_gain_nats, or by as many bits per byte of val_bpb.

    The ratio of the claim's val_bpb to its val_loss converts nats per token to bits per byte of its tokenizer.
    """
    metric, p_value = metric_of(claim.rows), claim.track_rules.p_value
    old, new = (target.mean_losses(target.independent(side.rows)) for side in (other, claim))
    losses = [row["val_loss"] for row in claim.rows if row["val_loss"] is not None]
    if not old or not new or (metric != VAL_LOSS and not losses):
        return False, "one of both results has no score"
    margin = min_gain_nats if metric == VAL_LOSS else min_gain_nats * stats.mean(new) / stats.mean(losses)
    test = stats.welch([metric.sign * score for score in old], [metric.sign * score for score in new])
    p = stats.non_inferiority_p(test, -margin)
    numbers = f"mean {metric.name} {stats.mean(new):.5f} (n={len(new)}) against {stats.mean(old):.5f} (n={len(old)})"
    needed = f"{min_gain_nats:g} nats per token" + f", {margin:.5f} {metric.unit} here," * (metric != VAL_LOSS)
    if p is None:
        needed = f"needed are {needed} at p < {p_value}"
        return False, f"{numbers}: without a spread on both sides nothing is shown; {needed}"
    return p < p_value, f"{numbers}: p = {p:.2g} that it is better by {needed} needed p < {p_value}"


def it_is_better_than_the_other(claim: Claim) -> Judged:
    """With --against: the track's rule for two results.

    modded-nanogpt's pairwise rule, a saved step being worth as many nats as the track says; or min_gain_nats.
    """
    rules, steps = claim.track_rules.rules, []
    if rules.min_gain_nats is not None and claim.against is not None:
        return _gain(claim, claim.against, rules.min_gain_nats)
    if rules.statistic != "z" or claim.against is None:
        return False, f"track {claim.track} has no rule for two results: race them, ./run.sh race A=... B=..."
    for name, decision in (("this", claim.decision), ("the other", claim.against.decision)):
        if decision["step"] is None or decision["mean"] is None:
            return False, f"{name} result does not reach the target: {decision['words']}"
        steps.append(target.StepMean(decision["step"], decision["n"], decision["mean"]))
    new, old = steps
    margin_nats = target.pairwise_margin_nats(new, old, rules.nats_per_100_steps)
    return target.is_enough(margin_nats, rules.z_margin_nats), (
        f"step {new.step} (mean {new.mean:.5f}, n={new.n}) against step {old.step} (mean {old.mean:.5f}, n={old.n}): "
        f"(loss saved + {rules.nats_per_100_steps:g} nats per 100 steps saved) / sqrt(1/n + 1/n) = {margin_nats:.5f}, "
        f"needed {rules.z_margin_nats:g}; p = {target.z_p(margin_nats, rules.z_sd_nats):.2g}"
    )


def nothing_that_the_track_fixes_was_changed(claim: Claim) -> Judged:
    """No run is in the open division, by its record and by its config."""

    def fault_of(run: Run) -> str | None:
        all_deviations = run.record["deviations"] or _deviations(run.config)
        deviations = [deviation for deviation in all_deviations if not deviation.startswith(OF_TODAY)]
        return "; ".join(deviations[:3]) or None

    fixed = ", ".join(claim.track_rules.fixed) or "nothing"
    return judge_each(claim.runs, fault_of, f"{fixed} as in track {claim.track}")


def _deviations(config: schema.Config) -> list[str]:
    config_id = identity.config_id(config)
    if config_id not in _known_deviations:
        _known_deviations[config_id] = deviations_of(config)
    return _known_deviations[config_id]


def the_hardware_is_that_of_the_track(claim: Claim) -> Judged:
    """Device, GPU model and number of GPUs are those that the track names."""
    wanted = claim.track_rules.rules

    def fault_of(run: Run) -> str | None:
        gpus = [gpu["name"] for gpu in run.record["environment"]["gpus"]]
        device = (run.record["hardware"] or {})["device"]
        if wanted.device not in (None, device):
            return f"it ran on {device}, the track's device is {wanted.device}"
        if wanted.gpu is not None and set(gpus) != {wanted.gpu}:
            return f"it ran on {', '.join(sorted(set(gpus))) or 'no GPU'}, the track's GPU is {wanted.gpu}"
        sizes = [size for size in world_sizes(run.record) if size]  # a log may omit it
        num_ranks = min(sizes, default=len(gpus) if run.is_log else None)
        if wanted.num_gpus is not None and (len(gpus), num_ranks) != (wanted.num_gpus, wanted.num_gpus):
            by = "unknown ranks" if num_ranks is None else counted(num_ranks, "rank")
            return f"{counted(len(gpus), 'GPU')} and {by} instead of {wanted.num_gpus}"
        return None

    first = row_of(claim.runs[0].record)
    printing = [run for run in claim.all_runs if run.record["environment"]["gpus"] or not run.is_log]
    passed, evidence = judge_each(printing, fault_of, first["device"] or "CPU")
    if passed and len(printing) < len(claim.all_runs):
        return None, f"{NOT_KNOWN}: {len(claim.all_runs) - len(printing)} of them do not print their GPUs"
    return passed, evidence


def the_data_are_those_of_the_track(claim: Claim) -> Judged:
    """All runs read the same bytes, with the sha256 that the track's data must have where conf/data/ names one."""
    if not any(name.split(".")[0] == "data" for name in claim.track_rules.fixed):
        return None, f"track {claim.track} fixes no data"
    data = standard(claim.track).data
    wanted = {"train": data.train_sha256, "val": data.val_sha256}
    first = _data(claim.runs[0])

    def fault_of(run: Run) -> str | None:
        for split, sha256 in wanted.items():
            if sha256 is not None and _data(run)[split] != [sha256]:
                return f"its {split} data are {_short(_data(run)[split])}, the track's are {sha256[:12]}"
        return None if _data(run) == first else "it read other data than the first run"

    note = "" if all(wanted.values()) else ", the same in all runs; conf/data/ names no hash"
    return judge_each(claim.all_runs, fault_of, f"val {_short(first['val'])}{note}")


def _data(run: Run) -> dict[str, list[str]]:
    return {split: [file["sha256"] for file in run.record["data"][split]] for split in ("train", "val")}


def _short(hashes: list[str]) -> str:
    return some([sha256[:12] for sha256 in hashes], 2)


def only_what_may_be_untimed_was_untimed(claim: Claim) -> Judged:
    """All runs have one timing protocol, which excludes from train_s only what the track allows."""
    allowed, first = claim.track_rules.rules.may_be_untimed, claim.runs[0].record["timing_protocol"]["id"]
    if claim.is_of_logs:
        return None, NOT_KNOWN if claim.track_rules.rules.judged == "time" else "the track judges no times"

    def fault_of(run: Run) -> str | None:
        protocol = run.record["timing_protocol"]
        if protocol["id"] != first:
            return f"timing protocol {protocol['id']}, the first run's is {first}"
        not_allowed = [part for part in protocol["excluded"] if allowed is not None and part not in allowed]
        return f"{', '.join(not_allowed)} not timed" if not_allowed else None

    return judge_each(claim.all_runs, fault_of, f"protocol {first}")


def no_forbidden_instrument_ran(claim: Claim) -> Judged:
    """No run used a profiler or another instrument that flags steps, and no instrument disturbed a step."""

    def fault_of(run: Run) -> str | None:
        if flagging := registry.flagging(run.record["instruments"]):
            return f"{', '.join(flagging)} ran"
        disturbed, _ = metrics.flagged_steps(run.record)
        return f"an instrument disturbed {disturbed} steps" if disturbed else None

    ran = ", ".join(sorted(claim.runs[0].record["instruments"])) or "none"
    return judge_each(claim.all_runs, fault_of, f"{ran} ran")


def only_allowed_flags_of_torch_compile_were_set(claim: Claim) -> Judged:
    """modded-nanogpt's rule 3: no run sets a flag of inductor or torch.compile that the track does not allow."""
    allowed = claim.track_rules.rules.compile_flags
    if allowed is None:
        return None, f"track {claim.track} allows any"
    flags_by_run = {run.name: run.record["measured"].get("compile_flags") for run in claim.runs}
    unknown = [name for name, flags in flags_by_run.items() if flags is None]

    def fault_of(run: Run) -> str | None:
        set_flags = (flags_by_run[run.name] or {}).items()
        not_allowed = [f"{name}={value}" for name, value in set_flags if not any(fnmatchcase(name, a) for a in allowed)]
        return f"it set {some(not_allowed, 4)}" if not_allowed else None

    passed, evidence = judge_each(claim.runs, fault_of, "none set" if not any(flags_by_run.values()) else "all allowed")
    if passed and unknown:
        return None, f"{NOT_KNOWN}: {counted(len(unknown), 'record')} without it, {some(unknown, 2)}"
    return passed, evidence
