"""Where the time went, as text: regions, quarters of the run, ranks, telemetry, traces."""

from bench.base import text_table
from bench.base.text_table import counted

MAX_WHAT_CHARS = 60  # of a kernel's name
MIN_SHARE_FRAC = 0.5  # of the change of a step, for a cause that stands out
TELEMETRY = {  # what of the summary says something of the machine: --json has all
    "mean_power_w": ("power, W", 1),
    "energy_j": ("energy, J", 1),
    "mean_sm_clock_mhz": ("SM clock, MHz", 1),
    "mean_mem_clock_mhz": ("memory clock, MHz", 1),
    "mean_util_pct": ("GPU use, %", 1),
    "mean_cpu_util_pct": ("CPU use, %", 1),
    "mean_cpu_freq_mhz": ("CPU clock, MHz", 1),
    "mean_load": ("load, threads that run or wait", 1),
    "max_temp_c": ("hottest, °C", 1),
    "sampler_cpu_frac": ("CPU use of the sampler, %", 100),
}


def text(diagnosis: dict, form: str = "wide") -> str:
    """result: of between_runs.py, perhaps with "traces" -> text; "" for nothing known.  form: as of text_table."""
    is_md = form == "github"
    lines = _steps(diagnosis, form, is_md) if diagnosis.get("regions") else []
    lines += _traces(diagnosis["traces"], diagnosis.get("arms", "AB"), form, is_md) if diagnosis.get("traces") else []
    if not lines:
        return ""
    head = f"{diagnosis['label']}: where to look; it is not a test"
    return ("\n\n" if is_md else "\n").join([head, *lines])


def cause(diagnosis: dict) -> str | None:
    """The region that makes most of the change of a step; None where none stands out."""
    shares = {
        name: pair["share_frac"] or 0 for name, pair in (diagnosis.get("regions") or {}).items() if name != "step_ms"
    }
    name = max(shares, key=lambda name: shares[name], default=None)
    if name is None or shares[name] < MIN_SHARE_FRAC:
        return None
    return f"{name.removesuffix('_ms')} makes {100 * shares[name]:.0f} % of the change of a step"


def _steps(diagnosis, form, is_md):
    cells = [
        [name.removesuffix("_ms"), *_step_cells(pair), _share(pair)] for name, pair in diagnosis["regions"].items()
    ]
    cells += [
        [f"steps {one['first_step']} to {one['last_step']}", *_step_cells(one), ""] for one in diagnosis["stretches"]
    ]
    (num_a, num_b), (a, b) = diagnosis["runs"], diagnosis.get("arms", "AB")  # older race.json: no names
    columns = ["ms a step", f"{a}, {counted(num_a, 'run')}", f"{b}, {num_b}", "change", "change %", "share %"]
    lines = [text_table.render(columns, cells, [False] + [True] * 5, form)]
    lines += [text_table.line(sentence, is_md) for sentence in diagnosis["words"]]
    if diagnosis["ranks"]:
        spread = diagnosis["ranks"]["spread_pct"]
        lines.append(f"slowest rank against fastest: {a} {spread[0]:.2f} %, {b} {spread[1]:.2f} %")
    known = [
        [sentence, *("" if mean is None else f"{per * mean:,.4g}" for mean in diagnosis["telemetry"][name])]
        for name, (sentence, per) in TELEMETRY.items()
        if name in diagnosis["telemetry"]
    ]
    if known:
        lines += ["", text_table.render(["telemetry, mean of runs", a, b], known, [False, True, True], form)]
    return lines


def _traces(difference, arms, form, is_md):
    """The largest lines of a trace diff, for the two files that it names."""
    a_ms, b_ms = difference[difference["of"]]
    of = "a step" if difference["of"] == "step_ms" else "the device span"
    change = (
        ""
        if difference["change_ms"] is None
        else f": {of} {a_ms:.3f} ms, {b_ms:.3f} ms, {difference['change_ms']:+.3f} ms"
    )
    cells = [
        [f"{one['change_ms']:+.3f}", _ms(one["a_ms"]), _ms(one["b_ms"]), one["status"], one["what"][:MAX_WHAT_CHARS]]
        for one in difference["lines"]
    ]
    more = difference["num_lines"] - len(cells)
    lines = ["", text_table.line(f"traces {difference['a']} and {difference['b']}{change}", is_md)]
    right = [True] * 3 + [False] * 2
    lines.append(text_table.render(["ms a step", *arms, "", difference["by"]], cells, right, form))
    return lines + ([f"and {more} more: ./run.sh analyze diff has all"] if more else [])


def _step_cells(pair):
    pct = "" if pair["change_pct"] is None else f"{pair['change_pct']:+.1f}"
    return [f"{pair['a_ms']:.3f}", f"{pair['b_ms']:.3f}", f"{pair['change_ms']:+.3f}", pct]


def _ms(ms):
    return "" if ms is None else f"{ms:.3f}"


def _share(pair):
    return "" if pair["share_frac"] is None else f"{100 * pair['share_frac']:.0f}"
