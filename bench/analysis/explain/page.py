"""An account, or the difference of two -> markup: a section of a run's page, and a page of its own."""

from collections.abc import Sequence
from pathlib import Path

from bench.analysis.explain import explained, parts, ranking, text
from bench.analysis.trace import load
from bench.analysis.trace.source import NoTrace
from bench.base import text_table
from bench.base.units import MIB, format_ms
from bench.web.page import REPORT_STYLES, Safe, bullets, details, join, page, section, soft, table, tag
from bench.web.waterfall import CHANGES, Bar, Waterfall, of_changes

TITLE = "Where a step's time goes"
NUM_NEXT = 12
MAX_TRACE_BYTES = 32 * MIB  # of a run's traces, for its own page: reading them takes seconds, and no page waits longer
NAMES = (("limit", "what the limit explains"), ("above", "above it"), ("unknown", "whose limit is not known"))


def html(sections: Sequence[Safe]) -> str:
    """A page of its own; sections: of of_account() or of_difference()."""
    return page(TITLE, tag("h1", TITLE), *sections, data={"charts": []}, styles=REPORT_STYLES)


def of_run(folder: Path | str) -> Safe:
    """Run folder -> the section of its page, folded; "" where it has no measured step.

    By its traces, unless they are large: then by its record, and the section says how to see more.
    """
    folder, hint = Path(folder), ""
    try:
        num_bytes = _trace_bytes(folder)
        if num_bytes == 0:
            answers = {"": explained.of_record(folder)}
        elif num_bytes > MAX_TRACE_BYTES:
            hint = soft("Its traces are large, so this is by its record: ./run.sh explain RUN --html FILE reads them.")
            answers = {"": explained.of_record(folder)}
        else:
            answers = explained.of_paths("", [folder])
    except NoTrace as error:
        return section(TITLE, soft(f"Its traces cannot be explained: {error}"))
    except ValueError:
        return Safe("")  # no step that was timed undisturbed
    shown = [
        details(f"One step, {format_ms(answer['step_ms'])}{title}", hint, _account(answer))
        for title, answer in answers.items()
    ]
    return section(TITLE, *shown, id="explained")


def _trace_bytes(folder):
    try:
        return sum(path.stat().st_size for path in load.find(folder / "traces"))
    except NoTrace:
        return 0  # none was recorded


def of_account(answer: dict, title: str) -> Safe:
    """answer: of account.of_ranks() or from_record.of()."""
    return section(f"{format_ms(answer['step_ms'])}: {title}", _account(answer))


def _account(answer):
    ranks = answer["ranks"]
    first = next(iter(ranks.values()))
    many = f", mean of {len(ranks)} ranks" if len(ranks) > 1 else ""
    about = f"mean of {text_table.counted(answer['num_steps'], 'step')}{many}, by {text.OF[answer['of']]}"
    limit = f"Limit: {first['ceiling'] or 'no peak is known of this device'}"
    device = f"; {first['device']}" if first["device"] else ""
    late = text.lateness_lines(answer)
    return join(
        [
            Waterfall("One step, ms:", about, _bars(answer), NAMES).markup,
            soft(f"{limit}{device}."),
            _next(answer),
            tag("h3", "Who delays whom, ms a step") if late else "",
            *((soft if words.startswith(" ") else lambda words: tag("p", words))(words) for words in late),
            details("What each part holds", _parts(answer)),
            details("Each rank, ms a step", _ranks(answer)) if len(ranks) > 1 else "",
        ]
    )


def _bars(answer):
    bars, at_ms = [], 0.0
    for line in answer["parts"]:
        kind = (
            "limit" if line["is_limit"] else "unknown" if line["part"] in (*parts.NO_BOUND, parts.UNKNOWN) else "above"
        )
        words = f"{line['ms']:.3f} ({line['pct']:.1f} %)"
        bars.append(Bar(line["part"], at_ms, at_ms + line["ms"], words, kind, line["meaning"]))
        at_ms += line["ms"]
    return [*bars, Bar("the step", 0.0, answer["step_ms"], f"{answer['step_ms']:.3f} (100 %)", "total")]


def _next(answer):
    known, others = ([], [])
    for line in answer["next"]:
        (others if line["part"] in parts.NO_BOUND else known).append(line)
    shown = [*known[:NUM_NEXT], *others[:NUM_NEXT]]
    hints = dict.fromkeys(f"{line['part']}: {line['advice']}" for line in shown)
    return join(
        [
            _ranked("Where the next millisecond is:", "what each could give at most, ms", known, "above"),
            _ranked(
                "Whose bound is not known:", "the time of each, of which it could give a part, ms", others, "unknown"
            ),
            details("What may help", bullets(hints)) if shown else "",
            details("What people did about it", _records(shown)) if ranking.legend(shown) else "",
        ]
    )


def _records(lines):
    about = soft("Records of models/ladder that gained at such a place; their names stand at the lines above.")
    return join([about, bullets(ranking.legend(lines))])


def _ranked(title, about, lines, kind):
    bars = []
    for line in lines[:NUM_NEXT]:
        records = f" ({', '.join(line['ladder'])})" if line["ladder"] else ""
        words = f"{line['gain_ms']:.3f} ({line['gain_pct']:.1f} %)"
        bars.append(Bar(text.evidence(line) + records, 0.0, line["gain_ms"], words, kind))
    return Waterfall(title, about, bars, has_sentences=True).markup if bars else ""


def _parts(answer):
    rows = [
        (line["part"], text.ms3(line["ms"]), f"{line['pct']:.1f}", line["meaning"], line["source"] or "")
        for line in answer["parts"]
    ]
    return table(("part", "ms", "%", "what it holds", "its limit is from"), rows)


def _ranks(answer):
    names = [line["part"] for line in answer["parts"]]
    rows = []
    for rank, one in answer["ranks"].items():
        ms = {line["part"]: line["ms"] for line in one["parts"]}
        rows.append((rank, text.ms3(one["step_ms"]), *(text.ms3(ms.get(name, 0.0)) for name in names)))
    return table(("rank", "step", *names), rows)


def of_difference(difference: dict, title: str) -> Safe:
    """result: of difference.of()."""
    a, b = difference["a"], difference["b"]
    ends = (("step of A", a["step_ms"]), ("step of B", b["step_ms"]))
    steps = [(row["part"], row["change_ms"], row["meaning"]) for row in difference["parts"]]
    lines = [
        Bar(
            text.evidence(line),
            0.0,
            line["change_ms"],
            f"{line['a_ms']:.3f} to {line['b_ms']:.3f}",
            "less" if line["change_ms"] < 0 else "more",
            f"{line['change_ms']:+.3f} ms",
        )
        for line in difference["lines"]
    ]
    return section(
        title,
        of_changes("From A's step to B's, ms:", f"by {text.OF[a['of']]}", ends, steps).markup,
        Waterfall("What changed most:", "ms in A and in B", lines, CHANGES, has_sentences=True).markup if lines else "",
        soft(f"{difference['rest_ms']:+.3f} ms in all others together."),
    )
