"""An agent without a model: it changes one constant of the champion's script at random, and submits that.

./run.sh referee demo budget=10m     searches bench/plans/referee/demo_train.py, in which improvements are planted
"""

import random
import re
import time
from pathlib import Path

from bench.plans.referee import refereeing, submission
from bench.plans.referee.search import Search

EXAMPLE = Path(__file__).with_name("demo_train.py")
CONSTANT = re.compile(r"^([A-Z][A-Z_0-9]*) = (\d+(?:\.\d+)?)\b", re.M)
FACTORS = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 2, 2, 3, 4)
AUTHOR = "random mutations"


def mutated(source: str, chance: random.Random) -> tuple[str, str]:
    """Returns (what was changed, the script with one constant times a factor). Raises ValueError if it has none."""
    constants = list(CONSTANT.finditer(source))
    if not constants:
        raise ValueError("the script has no constants to change: write NAME = 3 at the beginning of a line")
    constant, factor = chance.choice(constants), chance.choice(FACTORS)
    before = constant[2]
    after = f"{float(before) * factor:.4g}" if "." in before else str(max(1, round(int(before) * factor)))
    start, end = constant.span(2)
    return f"{constant[1]} = {after}, was {before}", f"{source[:start]}{after}{source[end:]}"


def go(search: Search, seconds: float, seed: int, folder: Path) -> Search:
    """Submits mutations of the current champion for that many seconds, none twice. folder: where they are written."""
    chance, deadline_s, tried = random.Random(seed), time.monotonic() + seconds, set[str]()
    while time.monotonic() < deadline_s and search.spent_s < search.settings["budget_s"]:
        program = submission.program_of(search.champion)
        if program is None or not program.file:
            raise ValueError("the champion is not a script: this agent changes only constants of scripts")
        source = (program.root / program.file).read_text()
        note, changed = mutated(source, chance)
        if changed in tried or changed == source:
            if len(tried) > 1000:
                break
            continue
        tried.add(changed)
        path = folder / "submitted.py"
        path.write_text(changed)
        search, _ = refereeing.submit(search, [f"script={path}"], AUTHOR, note)
        search = refereeing.work(search)
    return search
