"""Every input of every verb as anything but what it should be, and every text of a record in every output.

    .venv/bin/python tests/benchmarks inputs [SEED]      each pair of verb, input, damage and phase at least once
    .venv/bin/python tests/benchmarks inputs SEED all    all combinations of the four: hours

What goes wrong is printed as it is found.  Then docs/reference/faults.md gets its tables of inputs and outputs from
tests/inputs.py, and how much was tried.
"""

import collections
import itertools
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from inputs import BELIEVED, ELSEWHERE, READS, WALK, WRITES
from walk import World

from bench.cli.main import JUDGING

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/faults.md"
ESCAPES = {
    "terminal": "`escape.line()`, and `escape.Door` around standard output",
    "HTML": "`page.text()`, `page.tag()`",
    "Markdown": "`escape.markdown()`",
    "csv": "`escape.csv_text()`",
    "JSON": "`json.dumps()`",
}
BLOCK = re.compile(r"(<!-- inputs: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)


def measure(seed="0", extent="pairs"):
    """Returns [(what, number, sign, target)]"""
    chance, tried, num_wrong, num_shown = random.Random(seed), [], 0, 0
    with tempfile.TemporaryDirectory() as folder, World(folder) as world:
        steps = WALK if extent == "all" else pairs(chance)
        for number, step in enumerate(steps):
            began_s = time.monotonic()
            if (outcome := world.changed(*step)) is not None:
                tried.append((step, outcome[0]))
                num_wrong += bool(outcome[1])
                if outcome[1]:
                    print(f"WRONG {step}: {outcome[1]}", flush=True)
            print(f"{number + 1}/{len(steps)} {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
        fields = [(output, *place) for output in WRITES for place in world.places(output)]
        num_fields = len(fields) if extent == "all" else min(len(fields), len(steps) // 4)
        for output, *place in chance.sample(fields, num_fields):
            is_shown, wrong = world.shown(output, *place)
            num_shown, num_wrong = num_shown + is_shown, num_wrong + bool(wrong)
            if wrong:
                print(f"WRONG {output} {place}: {wrong}", flush=True)
    about = f"Tried with seed {seed}: {len(tried):,} of {len(WALK):,} combinations of verb, input, damage and moment, "
    about += f"and {num_fields:,} of {len(fields):,} texts of records in outputs; {num_wrong} went wrong."
    PAGE.write_text(written(PAGE.read_text(), about))
    return [
        ("inputs that were something else", len(tried), ">=", 1),
        ("texts of records that an output showed", num_shown, ">=", 1),
        ("of them that went wrong", num_wrong, "<=", 0),
    ]


def pairs(chance):
    """Steps that contain every pair of a verb, an input, a damage and a phase that any step contains: a tenth of all.

    What goes wrong with one damage of one input goes wrong in most verbs, or in most phases."""
    of = {step: {*itertools.combinations(enumerate(step), 2)} for step in chance.sample(WALK, len(WALK))}
    missing, steps = set().union(*of.values()), []
    for least in range(6, 0, -1):
        for step in of:
            if len(of[step] & missing) >= least:
                steps.append(step)
                missing -= of[step]
    return steps


def written(page, tried=None):
    """The page with its tables as they are now; tried: None leaves that of what was tried."""
    tables = {"read": reads(), "written": writes(), "tried": tried}
    return BLOCK.sub(lambda block: f"{block[1]}{tables[block[2]] or block[3].strip()}\n{block[4]}", page)


def reads():
    """The table of inputs, how often they are read, and the verbs whose inputs are tried elsewhere."""
    readers = {name: [verb for verb, row in READS.items() if name in row.reads] for name in BELIEVED}
    rows = [(f"`{name}`", ", ".join(readers[name]), believed) for name, believed in BELIEVED.items()]
    often = f"""{", ".join(JUDGING[:-1])} and {JUDGING[-1]} read a file as often as they need it, and refuse one that
changed in between, but for those that other commands append to.  Every other verb reads it as it is at that moment.
The other verbs:"""
    others = [(verb, about) for verb, about in ELSEWHERE.items()]
    return f"{table(('input', 'read by', 'believed'), rows)}\n\n{often}\n\n{table(('verb', 'reads'), others)}"


def writes():
    """The table of outputs."""
    outputs = collections.defaultdict(list)
    for output, (_, _, medium) in WRITES.items():
        outputs[medium].append(f"`{output}`")
    rows = [(medium, ESCAPES[medium], ", ".join(tried)) for medium, tried in outputs.items()]
    return table(("medium", "escaped by", "tried in"), rows)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
