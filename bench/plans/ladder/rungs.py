"""The rungs: experiments whose head says of which record they are.  Nothing lists them; a new yaml is a new rung.

The comment at the head of conf/experiment/NAME.yaml has, as far as they are known:

    # Record 9, 8.2 minutes: value residual, embedding skip, ...         the record's time, and what was new
    # Source: records/track_1_short/...                                  what makes it a rung: a record of the speedrun
    # Expected on 8x H100: val_loss 3.2791 after 3,200 steps, 154.78 ms a step.
"""

import re
from dataclasses import dataclass

from bench.config import groups

GROUP = "experiment"
SOURCE = re.compile(r"\brecords/(track_\d+)")
MINUTES = re.compile(r"([\d.]+) minutes")
EXPECTED = re.compile(r"Expected[^:]*: (.*)", re.DOTALL)
VAL_LOSS = re.compile(r"val_loss (\d\.\d{4})")  # "3.28 or a little less" is not a measurement
STEPS = re.compile(r"after ([\d,]+) steps")
STEP_MS = re.compile(r"(?<!to )\b([\d.]+) ms a step")  # "147 to 155 ms a step" is not a measurement either


@dataclass(frozen=True)
class Rung:
    """An experiment, and what its record reached on 8x H100.  None: its yaml does not say."""

    name: str  # experiment=NAME
    what: str  # was new; "" where the yaml has no head
    track: str | None = None  # of modded-nanogpt: track_1; None: no record of the speedrun
    minutes: float | None = None
    num_steps: int | None = None
    step_ms: float | None = None
    val_loss: float | None = None

    @property
    def arm(self) -> str:
        """Its name as an arm of a race, which begins with a capital letter."""
        word = re.sub(r"\W", "_", self.name)
        return word[0].upper() + word[1:] if word[0].isalpha() else f"E{word}"


def known() -> list[Rung]:
    """Every rung, the lowest first: track 1's records by their names, then those of other tracks."""
    result = [of_name(name) for name in groups.choices(GROUP)]
    return sorted((rung for rung in result if rung.track), key=lambda rung: (rung.track, rung.name))


def of_name(name: str) -> Rung:
    """Any experiment as a rung.  ValueError: there is no such experiment."""
    if name not in groups.choices(GROUP):
        names = ", ".join(rung.name for rung in known())
        raise ValueError(f"{name}: there is no experiment of that name; the rungs are {names}")
    return of_head(name, _head(groups.path_of(GROUP, name).read_text()))


def of_head(name: str, lines: list[str]) -> Rung:
    """lines: of the comment at the head of its yaml, without #; [] for none."""
    first, text = (lines or [""])[0], " ".join(lines)
    source, minutes = SOURCE.search(text), MINUTES.search(first)
    expected = (EXPECTED.search(" ".join(lines)) or [""])[0]
    what = first[minutes.end() :] if minutes else first
    steps, step_ms, val_loss = STEPS.search(expected), STEP_MS.search(expected), VAL_LOSS.search(expected)
    return Rung(
        name,
        what.strip(" :.,"),
        track=source and source[1],
        minutes=minutes and float(minutes[1]),
        num_steps=steps and int(steps[1].replace(",", "")),
        step_ms=step_ms and float(step_ms[1]),
        val_loss=val_loss and float(val_loss[1]),
    )


def _head(text):
    """The first lines that are comments, without Hydra's own."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# ").rstrip())
    return lines
