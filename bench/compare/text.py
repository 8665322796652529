"""A comparison as text, for a terminal or a pull request.  Everything shown is in the dict already."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.analysis.diagnosis import text as diagnosis_text
from bench.base import text_table
from bench.compare import effects, wording
from bench.compare.effects import MIN_FLOOR_PCT
from bench.compare.verdict import Comparison

MAX_DIFFERENCES = 40
MAX_FILES = 12
SIGNS = {"added": "+", "removed": "-"}  # lines of a file
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
FORMS = ("simple", "github")  # of a table: terminal, Markdown
NO_VERDICT = "no verdict: "  # what some sentences begin with
MAX_CHARS = 44  # of a value in the list of differences
FLAGS = {  # what each means, for someone who meets it the first time
    "imported": "another harness timed these runs and wrote their logs",
    "session-unknown": "nothing says that both arms ran in one session",
    "order-confounded": "the arms were not interleaved: a drift of the machine looks like a change",
    "order-unknown": "whether the arms were interleaved is unknown",
    "uncalibrated": f"no ./run.sh calibrate in this session: the noise floor of {MIN_FLOOR_PCT:g} % is assumed",
    "calibration-ignored": "the machine disturbed the runs of this session's calibration: calibrate when it is quiet",
    "n=1": "one run has no spread: no verdict",
    "no-spread": "identical times in each arm: not measured? no verdict",
    "runs-without-a-time": "some started runs failed, are invalid or still run",
    "suspect-runs": "the machine disturbed some runs; too few others remain, so they are counted",
    "software-differs": "the arms' scripts have their own interpreters, with another torch, CUDA or NCCL",
    "data-unknown": "the arms' scripts brought data of their own, of which nothing is known",
    "suspect-records": "an instrument marked some runs suspect, or a log has lines that were not understood",
    "runs-excluded": "runs that the machine disturbed are excluded from both arms",
    "verdict-depends-on-exclusions": "with the excluded runs the verdict would be different",
    effects.DISAGREE: "the runs' own clocks alone would give a verdict, which the launcher's clock does not confirm",
    effects.NOT_COUNTED: "the candidate may have trained while its own clock stood still",
    "one-clock": "one arm's records predate the launcher's clock, so only the runs' own clocks decide",
    "same-seed": "repeats of one seed count as one loss",
    "steps-differ": "the arms ran different numbers of steps to the same target",
    "tokens-differ": "the arms take different numbers of tokens a step on the way to the same target",
    "mixed-code": "an arm mixes runs of different code, or of identity versions, so that their code cannot be compared",
    "open-division": "runs that change what their track fixes",
    "not-at-a-planned-look": "the number of runs is not one at which the plan looks: no verdict",
    "without-its-plan": "runs of a race, compared without the plan that it had: name the race",
    "unplanned-look": "an interim look that is not in the race's plan: the verdict is not evidence",
    "raced-before": "the ledger has earlier races of these arms: repeated often enough, a race differs by chance",
    "forced": "numbers were asked for although the runs are not comparable",
}
CSV_COLUMNS = (
    *("against", "metric", "verdict", "a_mean", "b_mean", "change", "unit"),
    *("ci95_low", "ci95_high", "p", "p_holm", "n_a", "n_b", "mde_pct", "baseline", "candidate"),
)


def report(results: Sequence[Comparison], form: str = "terminal", **options: Any) -> str:
    """Comparisons with one baseline as text, their verdicts last.  form: terminal or md; options: of render()."""
    parts = [render(result, form, **options) for result in results]
    return "\n\n".join([*parts, ("\n\n" if form == "md" else "\n").join(verdict(one, form) for one in results)])


def render(
    result: Comparison, form: str = "terminal", patch: bool = False, why: bool = False, hint: str = "--why"
) -> str:
    """All but the verdict, as text; form: terminal or md; patch: the change of the source in full.

    why: where the time went; without it a line with the cause, if one stands out, and hint, what to type for the rest.
    """
    is_md = form == "md"
    parts = [_head(result, is_md), _differences(result, is_md)]
    parts += [_code(result.get("code_change"), is_md, patch), _numbers(result, is_md)]
    diagnosis = result.get("diagnosis") or {}
    parts += [diagnosis_text.text(diagnosis, FORMS[is_md]) if why else _hint(result, diagnosis, "" if is_md else hint)]
    return "\n\n".join(part for part in [*parts, _notes(result, is_md)] if part)


def verdict(result: Comparison, form: str = "terminal") -> str:
    """The verdict in a line, its word in colour on a terminal, and one about earlier races of the same arms."""
    word, words = result["verdict"].replace("_", " ").upper(), text_table.line(result["words"], form == "md")
    if words.startswith(NO_VERDICT):
        word, words = "NO VERDICT", words.removeprefix(NO_VERDICT)
    line = f"verdict: {f'**{word}**' if form == 'md' else text_table.coloured(word)}  {words}"
    before = result.get("earlier_races")
    if not before:
        return line
    counts = ", ".join(f"{'without a verdict' if name == 'none' else name} {num}" for name, num in before.items())
    num = text_table.counted(sum(before.values()), "earlier race")
    return f"{line}\n{' ' * len('verdict: ')}{num} of these arms in this ledger: {counts}"


def as_csv(results: Iterable[tuple[str, Comparison]]) -> str:
    """[(name of B, Comparison)] -> CSV with a head line; the unit of change is per cent, of val_loss nats."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for name, result in results:
        verdicts = {"time": result["verdict"], "val_loss": result["val_loss"]["verdict"]}
        for key, (metric, mean_key, *_) in wording.MEASURES.items():
            measure: Any = result[key]  # type: ignore[literal-required]  # of MEASURES
            end, unit, _ = wording.unit_of(key)
            numbers = [*measure[mean_key], measure[f"change_{end}"], unit.strip() or end]
            numbers += [*(measure[f"ci95_{end}"] or ("", "")), measure["p"], measure.get("p_holm"), *measure["n"]]
            writer.writerow([name, metric, verdicts.get(key, ""), *numbers, measure.get("mde_pct"), *result["arms"]])
    return out.getvalue()


def _hint(result: Comparison, diagnosis: dict[str, Any], hint: str) -> str:
    if not (diagnosis.get("regions") or diagnosis.get("traces")):
        return ""
    cause = diagnosis_text.cause(diagnosis) if result["verdict"] in ("faster", "slower") else None
    known = [f"why: {cause}"] * bool(cause) + [f"{hint} shows where the time went"] * bool(hint)
    return "; ".join(known)


def _bullets(sentences: Iterable[str], is_md: bool) -> list[str]:
    return [f"{'-' if is_md else '  -'} {text_table.line(sentence, is_md)}" for sentence in sentences]


def _head(result: Comparison, is_md: bool) -> str:
    (a, b), (about_a, about_b) = result["arms"], result["about"]
    lines = [f"## {text_table.line(f'{b} ({about_b}) against {a} ({about_a})', True)}", ""] if is_md else []
    replayed = result.get("certificates") or (None, None)
    of_arms = (result["started"], result["time"]["n"], result["steps"], replayed)
    for name, about, started, timed, num_steps, certificate in zip((a, b), (about_a, about_b), *of_arms, strict=True):
        counts = text_table.counted(started, "run")
        counts += f", {timed} counted" * (result["comparable"] and timed != started)
        counts += "" if num_steps is None else f", {num_steps} steps"
        counts += "" if certificate is None else f"; replayed: {certificate}"
        lines.append(text_table.line(f"{name}: {about} ({counts})", is_md) + "  " * is_md)
    lines.append(f"comparable: {'yes' if result['comparable'] else 'NO'}" + "  " * is_md)
    if result.get("kind_words"):  # an older race.json has none
        lines.append(text_table.line(f"compared: {result['kind_words']}", is_md))
    if is_md and result["reasons"]:
        lines.append("")
    return "\n".join(lines + _bullets(result["reasons"], is_md))


def _differences(result: Comparison, is_md: bool) -> str:
    differences = result["differences"]
    if not differences:
        return "what differs: nothing in the records"
    shown = differences[:MAX_DIFFERENCES]
    cells = [
        [fact["kind"], fact["what"], *(" | ".join(map(_value, values)) for values in (fact["a"], fact["b"]))]
        for fact in shown
    ]
    more = len(differences) - len(cells)
    table = text_table.render(["what differs", "", *result["arms"]], cells, [False] * 4, FORMS[is_md])
    return table + (f"\nand {more} more differences: --json has all" if more else "")


def _code(change: dict[str, Any] | None, is_md: bool, patch: bool) -> str:
    """Which files of the source differ and by how many lines; nothing where the code is the same."""
    if not change:
        return ""
    if change["unknown"]:
        return text_table.line(f"source: what changed is unknown: {change['unknown']}", is_md)
    files = sorted(change["files"], key=lambda one: -(one["added"] or 0) - (one["removed"] or 0))
    cells = [
        [one["path"], *("binary" if one[key] is None else f"{sign}{one[key]}" for key, sign in SIGNS.items())]
        for one in files[:MAX_FILES]
    ]
    more = f"\nand {len(files) - MAX_FILES} more files" if len(files) > MAX_FILES else ""
    result = text_table.render(["source", "added", "removed"], cells, [False, True, True], FORMS[is_md]) + more
    if not patch:
        return result + ("" if is_md else "\n--diff shows the lines")
    text = "\n".join(text_table.printable(line.replace("\t", "    ")) for line in change["patch"].split("\n"))
    text += "... and more\n" if change["is_cut"] else ""
    return f"{result}\n\n" + (f"````diff\n{text.replace('````', '')}````" if is_md else text)


def _value(value: object) -> str:
    if isinstance(value, list):
        text = ", ".join(_value(item) for item in value)
    else:
        text = "-" if value is None else value[:12] if isinstance(value, str) and HASH.fullmatch(value) else str(value)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."


def _numbers(result: Comparison, is_md: bool) -> str:
    cells = [[wording.MEASURES[key][0], *wording.cells(result, key)] for key in wording.known(result)]
    if not cells:
        return ""
    columns = ["", *result["arms"], *wording.HEAD]
    table = text_table.render(columns, cells, [False] + [True] * 8, FORMS[is_md])
    lines = [*wording.loss_sentences(result["val_loss"], result["arms"]), *_time_lines(result)]
    lines = [text_table.line(line, is_md) + "  " * is_md for line in lines]
    return "\n".join([table, *([""] if is_md and lines else []), *lines])


def _time_lines(result: Comparison) -> list[str]:
    everything = result["time_all"]
    by_launcher = result["time"].get("outside")
    lines = [f"by the launcher's clock: {wording.outside_words(by_launcher)}"] if by_launcher else []
    if not everything:
        return lines
    low, high = everything["ci95_pct"] or (None, None)
    with_all = f"{everything['change_pct']:+.2f} % [{low:+.2f}, {high:+.2f}]" if low is not None else "no interval"
    names = ", ".join(f"{run['arm']} {run['run_id']} ({'; '.join(run['reasons'])})" for run in result["excluded"])
    return [*lines, f"excluded: {names}", f"with them: {with_all}, n = {everything['n'][0]} and {everything['n'][1]}"]


def _notes(result: Comparison, is_md: bool) -> str:
    """What a reader must know beside the verdict."""
    floor = text_table.two_digits(result["time"]["floor_pct"])
    kept = result.get("calibration")
    source = text_table.line(f"calibrated, {kept['file']}" if kept else "not calibrated", is_md)
    flags = _bullets([f"{flag}: {FLAGS.get(flag, '')}".rstrip(": ") for flag in result["flags"]], is_md)
    return "\n".join([f"noise floor {floor} % ({source})", *([""] if is_md and flags else []), *flags])
