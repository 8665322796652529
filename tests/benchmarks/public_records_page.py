"""What public_records.py keeps -> docs/reference/public-records.md: numbers and verdicts are made here.

The words around the tables are public_records.md, those about single records public_records.yaml.
"""

import collections
import dataclasses
import functools
import itertools
import statistics
import string
import textwrap
from typing import Any

from bench.base import stats
from bench.base.text_table import counted
from bench.compare import effects, eligibility, target, verdict
from benchmarks import public_records as kept
from benchmarks import track3

OFF_PCT = 0.5  # between README's time and the logs' mean, from which a note says so
DIFFERENT_POINTS = 0.3  # between two changes in per cent
USUAL_GPUS = "8 x NVIDIA H100 80GB HBM3"
# When README got the rules, by its history: p < 0.01 (commit 3030776e), a baseline on the same hardware (4b6328c3)
P_SINCE, BASELINE_SINCE = "2024-12-04", "2025-12-02"
PULLS = "https://github.com/KellerJordan/modded-nanogpt/pull/"
UNMATCHED = "unmatched code"
wrap = textwrap.TextWrapper(140, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@dataclasses.dataclass
class Record:
    """A row of README's table with what its logs say."""

    track: str
    claim: dict[str, Any]
    before: dict[str, Any] | None  # the row of README before it
    facts: dict[str, Any]
    given: dict[str, Any]  # of the yaml

    def __post_init__(self):
        self.number = self.claim["number"]
        self.rows, self.baseline = self.arm(""), self.arm(" baseline")
        self.timed = [row for row in self.rows if eligibility.is_timed(row)]
        self.times_s = eligibility.times_s(self.timed)
        self.claimed_pct = self.before and 100 * (self.claim["s"] / self.before["s"] - 1)
        self.off_pct = 100 * (stats.mean(self.times_s) / self.claim["s"] - 1) if self.times_s else None
        month, day, year = (self.claim["date"].split("/") * 3)[:3]
        self.date = f"20{year}-{month}-{day}"  # ISO, as the rules' days

    def arm(self, name):
        name = f"{self.track}/{self.number}{name}"
        return kept.decoded(name, self.facts) if name in self.facts["arms"] else []

    @functools.cached_property
    def compared(self):
        return against(self.baseline, self.rows) if self.baseline else None

    @functools.cached_property
    def printed(self):
        """The change from the printed times of a baseline; None: there are none."""
        printed_s = self.claim.get("printed_s")
        return effects.change([printed_s, self.times_s], stats.ALPHA)[0] if printed_s and self.times_s else None

    @functools.cached_property
    def test(self):
        """The track's own test of the losses; None without logs."""
        if not self.rows:
            return None
        losses, row = target.mean_losses(target.independent(self.rows)), self.rows[0]
        return target.loss_test(losses, row["target"], target.p_value_of(row["track"]))

    @property
    def is_unshown(self):
        return bool(self.test) and self.test["below"] is False and self.date >= P_SINCE

    def sentences(self, known):
        """Where README and logs differ, and why, as far as facts say it; known: of known_codes()."""
        claimed_s, rounding_s = self.claim["s"], self.claim["rounding_s"]
        compared, before = self.compared, int(self.number.rstrip("bc")) - 1
        if self.times_s and abs(self.off_pct) > OFF_PCT and abs(stats.mean(self.times_s) - claimed_s) > rounding_s:
            low_s, high_s, num = min(self.times_s), max(self.times_s), len(self.times_s)
            side, extreme = ("below", "fast") if self.off_pct > 0 else ("above", "slow")
            no_log = f"; none is as {extreme}" * (not low_s - rounding_s <= claimed_s <= high_s + rounding_s)
            logs = f"the mean of these logs ({low_s:.2f} to {high_s:.2f} s{no_log})" if num > 1 else "the log"
            yield f"README's {claimed_s:.1f} s is {abs(self.off_pct):.1f} % {side} {logs}."
        for text in self.claim.get("merged", ()):
            yield f"README's time is that of record {before} minus a difference: \"{text}\" (the folder's README)."
        if self.times_s and gpus_of(self.timed) not in (USUAL_GPUS, "GPUs unknown"):
            yield f"These logs say {gpus_of(self.timed)}; the table is for 8 H100."
        change = compared["time"] if compared else self.printed
        if is_different(self, change):
            baseline = "the logs of the baseline" if compared else "the printed times"
            change_pct = change["change_pct"]
            yield f"README's change is {self.claimed_pct:+.2f} %; against {baseline} it is {change_pct:+.2f} %."
            if abs(self.off_pct) < OFF_PCT:
                yield f"README compares these runs with the table's time of record {before}, from another session."
        if compared and "runs-overlap" in compared["flags"]:
            yield "Some runs began before earlier ones had ended, so several machines made them."
        if compared and not compared["comparable"]:
            yield f"It is not comparable with its baseline: {compared['reasons'][0]}."
        owner = known[self.baseline[0]["source_sha256"]] if self.baseline else ""
        if owner not in ("", f"baseline of {self.number}", f"{before}'s code"):
            owner = f"record {owner[:-7]}" if owner.endswith("'s code") else f"the {owner}"
            yield f"The baseline's code is that of {owner}, not of record {before}."
        if self.is_unshown:
            yield f"A mean below the target is not shown: p = {p_text(self.test['p'])}, n = {self.test['n']}."
        for number, pair in enumerate(self.given.get("also", ())):
            arms = [self.arm(f" also {number} {arm}") for arm in ("baseline", "runs")]
            num_runs = " and ".join(str(len(arm)) for arm in arms)
            yield f"Also, {pair['about']} ({num_runs} runs): {verdict_text(against(*arms))}."


def against(a_rows, b_rows, **options):
    return verdict.compare_rows(a_rows, b_rows, names=("the baseline", "the record"), **options)


def page(facts, remarks):
    """The Markdown of docs/reference/public-records.md."""
    given = remarks["records"]
    track_1, track_2 = (
        [
            Record(track, claim, before, facts, given.get(f"{track}/{claim['number']}", {}))
            for before, claim in zip([None, *facts["tracks"][track]], facts["tracks"][track])
        ]
        for track in ("1", "2")
    )
    runs = {str(number): run for number, *_, run in track3.kept()}
    results = [
        Result(claim, given.get(f"3/{claim['number']}", {}), runs[claim["number"]]) for claim in facts["tracks"]["3"]
    ]
    fields = {"commit": facts["commit"][:8], "date": facts["date"], "newest": track_1[-1].date}
    fields |= {"p_since": P_SINCE, "baseline_since": BASELINE_SINCE} | summary(track_1, results)
    for name, records in (("1", track_1), ("2", track_2)):
        known = known_codes(records)
        fields[f"track_{name}"] = table_rows(cells(record, known) for record in records)
        fields[f"notes_{name}"] = notes(records, known)
    fields |= {"track_3": table_rows(map(result_cells, results)), "notes_3": notes(results)}
    fields["session_drift_pct"] = f"{effects.SESSION_DRIFT_PCT:g}"
    template = string.Template((kept.HERE / "public_records.md").read_text())
    return template.substitute(fields | sessions(track_1, facts) | neighbours(track_1))


def summary(records, results):
    """Returns {"num_NAME" and "which_NAME" of the records or results that are so, "verdicts", "by_verdict"}."""
    paired = [record for record in records if record.compared]
    timed = [record for record in records if record.timed]
    printed = [record for record in timed if record.printed]
    bare = [record for record in timed if record not in paired + printed]
    tested = [record for record in records if record.date >= P_SINCE and record.test]
    numbers = [record for record in paired if record.compared["time"]["change_pct"] is not None]
    late = [record for record in paired if record.compared["verdict"] == "not_interleaved"]
    counts = {
        "logs": [record for record in records if record.rows],
        "no_logs": [record for record in records if not record.rows],
        "paired": paired,
        "numbers": numbers,
        "less": [record for record in numbers if record.compared["time"]["change_pct"] < 0],
        "beyond": [record for record in late if max(record.compared["time"]["ci95_pct"]) < 0],
        "different": [record for record in paired if is_different(record, record.compared["time"])],
        "printed": printed,
        "printed_different": [record for record in printed if is_different(record, record.printed)],
        "bare": bare,
        "recent": [record for record in bare if record.date >= BASELINE_SINCE],
        "off": [record for record in timed if abs(record.off_pct) > 1],
        "tested": [record for record in tested if record.test["p"] is not None],
        "below": [record for record in tested if record.test["below"]],
        "unshown": [record for record in tested if record.is_unshown],
        "single": [record for record in tested if record.test["p"] is None],
        "results": results,
        "agreeing": [result for result in results if result.is_as_claimed],
        "passing": [result for result in results if result.passes],
        "failing": [result for result in results if not result.passes],
    }
    by_verdict = collections.defaultdict(list)
    for record in paired:
        by_verdict[word(record.compared["verdict"])].append(record)
    verdicts = sorted(by_verdict.items())
    fields = {"verdicts": "; ".join(f"{len(group)} {name}" for name, group in verdicts)}
    fields["by_verdict"] = table_rows([f"- {name}", str(len(group)), numbers_of(group)] for name, group in verdicts)
    fields |= {f"which_{name}": numbers_of(group) for name, group in counts.items()}
    return fields | {f"num_{name}": str(len(group)) for name, group in counts.items()}


def numbers_of(records):
    return ", ".join(record.number for record in records)


def is_different(record, change):
    """Whether a change in the logs differs from README's; change: an effects.Change or None."""
    change_pct = change and change["change_pct"]
    return change_pct is not None and abs(change_pct - record.claimed_pct) > DIFFERENT_POINTS


# ---- a track that judges time


def cells(record, known):
    logs = "no log" if not record.rows else f"no time ({len(record.rows)})"
    if record.times_s:
        gpus = gpus_of(record.timed)
        others = "" if gpus == USUAL_GPUS else f", {short(gpus)}"
        logs = f"{stats.mean(record.times_s):.2f} s ({len(record.times_s)}{others})"
    machine = ["", "none" * bool(record.rows), ""]
    if record.compared:
        owner = known[record.baseline[0]["source_sha256"]]
        owner = UNMATCHED if owner == f"baseline of {record.number}" else owner
        machine = [interval_text(record.compared["time"]), f"{owner} ({len(record.baseline)})"]
        machine.append(verdict_cell(record.compared))
    elif record.printed:
        machine = [interval_text(record.printed), f"{len(record.claim['printed_s'])} printed times", "no logs of it"]
    p = ""
    if record.test:
        p = f"n = {record.test['n']}" if record.test["p"] is None else p_text(record.test["p"])
        p += " (not shown)" if record.is_unshown else " (before the rule)" * (record.test["below"] is False)
    seconds = f"{record.claim['s']:.{0 if record.claim['s'] >= 1000 else 1}f} s"
    change = "" if record.claimed_pct is None else f"{record.claimed_pct:+.2f} %"
    off = "" if record.off_pct is None else f"{record.off_pct:+.1f} %"
    return [record.number, seconds, change, logs, off, *machine, p]


def known_codes(records):
    """Returns {code: whose it is}: that of the record whose own logs have it, or of the first baseline that has it."""
    known = {row["source_sha256"]: f"{record.number}'s code" for record in reversed(records) for row in record.timed}
    for record in records:
        for row in record.baseline:
            known.setdefault(row["source_sha256"], f"baseline of {record.number}")
    return known


def gpus_of(rows):
    gpus = [setting["gpus"] for setting in eligibility.settings_of(rows)]
    return " and ".join(sorted({f"{len(names)} x {names[0]}" if names else "GPUs unknown" for names in gpus}))


def short(gpus):
    return gpus.replace("NVIDIA ", "").replace(" 80GB HBM3", "").replace(" x", "")


def notes(records, *known):
    """Returns a list of the records or results that have something to say."""
    lines = []
    for record in records:
        sentences = [*record.sentences(*known), *filter(None, [record.given.get("remark")])]
        pull = record.claim["pull"]
        where = f" ([PR {pull}]({PULLS}{pull}))" if pull else ""
        lines += [f"- **{record.number}**{where}: {' '.join(sentences)}"] * bool(sentences)
    return "\n".join(wrap.fill(line) for line in lines)


# ---- track 3


@dataclasses.dataclass
class Result:
    """A row of track 3's table with what its logs say, counted as upstream does: a run a loss."""

    claim: dict[str, Any]
    given: dict[str, Any]
    runs: list[dict[str, Any]]  # of track3.kept()

    def __post_init__(self):
        self.number, rules = self.claim["number"], target.rules_of("steps")
        curves = [run["curve"] for run in self.runs]
        judged = kept.USUAL["target"], rules.z_margin_nats
        (self.mean,) = (mean for mean in target.step_means(curves) if mean.step == self.claim["steps"])
        self.first = target.first_passing(curves, *judged)
        self.margin_nats = self.mean.margin_nats(judged[0])
        self.passes = target.first_passing([{0: self.mean.mean}] * self.mean.n, *judged) is not None
        is_same_mean = abs(self.mean.mean - float(self.claim["mean"])) < 0.0001  # README has four digits, some cut off
        is_same_mark = self.passes == (self.claim["mark"] == "✓")
        self.is_as_claimed = is_same_mean and is_same_mark and self.mean.n == self.claim["n"]
        rows = [{"seed": run["seed"], "provenance": "imported", "target": judged[0]} for run in self.runs]
        self.decision = target.decide_z(rows, curves, rules)  # a seed a loss

    def sentences(self):
        claim, mean = self.claim, self.mean
        if mean.n != claim["n"]:
            yield f"README counts {counted(claim['n'], 'run')}, but the clone has {mean.n}."
        elif not self.is_as_claimed:
            yield f"README's mean is {claim['mean']}, and the mean of the logs is {mean.mean:.5f}."
        if self.decision["n"] < mean.n:
            passed = "they pass" if self.decision["passed"] else "they do not pass"
            seeds = counted(self.decision["n"], "seed")
            yield f"The {mean.n} runs print {seeds}, and `judge` counts a seed once: {passed}."
        if claim["mark"] != "✓" and not self.passes:
            yield "README also marks it as not passing (Ⓧ); its rules list the first three results as exceptions."
        if self.first and self.first.step < mean.step:
            yield f"The rule already holds {counted(mean.step - self.first.step, 'step')} before the claimed one."


def result_cells(result):
    claim, mean = result.claim, result.mean
    claimed = f"{claim['steps']} at {claim['mean']} ({claim['n']}) {claim['mark']}"
    passes, first = "passes" if result.passes else "does not pass", str(result.first.step) if result.first else "none"
    logs = [f"{mean.mean:.5f} ({mean.n})", f"{result.margin_nats:.4f}", passes, first]
    return [claim["number"], claimed, *logs, ", ".join(map(short, claim["gpus"]))]


# ---- sessions


def sessions(records, facts):
    """The same code on another day or machine: what a comparison across folders would take for an effect."""
    by_code = collections.defaultdict(list)
    for name in facts["arms"]:
        rows = [row for row in kept.decoded(name, facts) if eligibility.is_timed(row)]
        for code in sorted({row["source_sha256"] for row in rows} - {None}):
            code_rows = [row for row in rows if row["source_sha256"] == code]
            by_code[code, gpus_of(code_rows), code_rows[0]["num_steps"]].append((name, code_rows))
    lines, changes = [], []
    for (name, first), *others in by_code.values():
        seen = {row["started_at"] for row in first}
        for other_name, other in others:
            if seen & {row["started_at"] for row in other}:
                continue  # the same logs, in another pair of that record's
            seen |= {row["started_at"] for row in other}
            time = against(first, other, force=True)["time"]
            differing = [eligibility.SETTINGS[key] for key in eligibility.differing_settings(first + other)]
            changes.append(abs(time["change_pct"]))
            fields = [arm_text(name, first), arm_text(other_name, other), interval_text(time)]
            lines.append([*fields, ", ".join(differing) or "nothing in the logs"])
    gains = [-record.claimed_pct for record in records if int(record.number.rstrip("bc")) >= 28]
    numbers = {"median": statistics.median(changes), "largest": max(changes), "gain": statistics.median(gains)}
    fields = {f"{name}_pct": f"{value:.2f}" for name, value in numbers.items()}
    return fields | {"num_sessions": str(len(lines)), "sessions": table_rows(lines)}


def arm_text(name, rows):
    number, _, arm = name.partition("/")[2].partition(" ")
    return f"{number}{arm and f', {arm.split()[-1]}'}: {stats.mean(eligibility.times_s(rows)):.2f} s ({len(rows)})"


def neighbours(records):
    """What comparing the logs of each record with those of the one before would say, across folders."""
    pairs = [pair for pair in itertools.pairwise(records) if pair[0].timed and pair[1].timed]
    reasons, allowed = collections.Counter(), []
    for before, record in pairs:
        compared = against(before.rows, record.rows)
        if compared["comparable"]:
            claimed = f"README: {record.claimed_pct:+.2f} %"
            allowed.append(f"- {record.number} after {before.number}: {verdict_text(compared)} ({claimed})")
        reasons["apart"] += any("hours apart" in reason for reason in compared["reasons"])
        reasons.update(eligibility.differing_settings(before.timed + record.timed))
    fields = {name: str(reasons[name]) for name in ("apart", "driver", "torch", "gpus")}
    fields["of_65"] = next(interval_text(record.printed) for record in records if record.number == "65")
    fields |= {"num_pairs": str(len(pairs)), "num_refused": str(len(pairs) - len(allowed))}
    return fields | {"allowed": "\n".join(allowed)}


# ---- text


def word(verdict_name):
    return verdict_name.replace("_", " ")


def verdict_cell(compared):
    """The verdict; of one that is not interleaved with the interval that the harness gives it."""
    is_widened = compared["verdict"] == "not_interleaved"
    return word(compared["verdict"]) + edges_text(compared["time"]["ci95_pct"]) * is_widened


def verdict_text(compared):
    return f"{interval_text(compared['time']) or compared['reasons'][0]}, {verdict_cell(compared)}"


def interval_text(change):
    """Returns "-0.50 % [-0.73, -0.27]" of a Change, as the runs' own spread gives it; "" where there is none."""
    if change["change_pct"] is None:
        return ""
    drift_pct = change.get("drift_pct") or 0.0  # by which the harness has widened the interval
    edges = [edge + sign * drift_pct for edge, sign in zip(change["ci95_pct"] or [], (1, -1))]
    return f"{change['change_pct']:+.2f} %{edges_text(edges)}"


def edges_text(edges):
    return f" [{edges[0]:+.2f}, {edges[1]:+.2f}]" if edges else ""


def p_text(p):
    return f"{p:.4f}" if p >= 1e-4 else f"{p:.0e}"


def table_rows(rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
