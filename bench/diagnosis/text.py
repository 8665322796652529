"""Where the time went, as text: regions, quarters of the run, ranks, telemetry, traces."""

from bench import text_table

FORMS = ("simple", "github")  # of a table: terminal, Markdown
MAX_WHAT_CHARS = 60  # of a kernel's name


def text(found: dict, is_md: bool = False) -> str:
    """found: of between_runs.py, perhaps with "traces" -> text for a terminal or Markdown; "" for nothing known."""
    lines = _steps(found, is_md) if found.get("regions") else []
    lines += _traces(found["traces"], found.get("arms", "AB"), is_md) if found.get("traces") else []
    if not lines:
        return ""
    head = f"{found['label']}: where to look; it is not a test"
    return ("\n\n" if is_md else "\n").join([head, *lines])


def _steps(found, is_md):
    cells = [[name.removesuffix("_ms"), *_step_cells(pair), _share(pair)] for name, pair in found["regions"].items()]
    cells += [[f"steps {one['first_step']} to {one['last_step']}", *_step_cells(one), ""] for one in found["stretches"]]
    (num_a, num_b), (a, b) = found["runs"], found.get("arms", "AB")  # older race.json: no names
    columns = ["ms a step", f"{a}, {num_a} run{'s' * (num_a > 1)}", f"{b}, {num_b}", "change", "", "share"]
    lines = [text_table.render(columns, cells, [False] + [True] * 5, FORMS[is_md])]
    lines += [text_table.line(words, is_md) for words in found["words"]]
    if found["ranks"]:
        spread = found["ranks"]["spread_pct"]
        lines.append(f"slowest rank against fastest: {a} {spread[0]:.2f} %, {b} {spread[1]:.2f} %")
    known = [
        [name, *("" if mean is None else f"{mean:,.4g}" for mean in means)]
        for name, means in found["telemetry"].items()
    ]
    if known:
        lines += ["", text_table.render(["telemetry, mean of runs", a, b], known, [False, True, True], FORMS[is_md])]
    return lines


def _traces(found, arms, is_md):
    """The largest lines of a trace diff, for the two files that it names."""
    a_ms, b_ms = found[found["of"]]
    of = "a step" if found["of"] == "step_ms" else "the device span"
    change = "" if found["change_ms"] is None else f": {of} {a_ms:.3f} ms, {b_ms:.3f} ms, {found['change_ms']:+.3f} ms"
    cells = [
        [f"{one['change_ms']:+.3f}", _ms(one["a_ms"]), _ms(one["b_ms"]), one["status"], one["what"][:MAX_WHAT_CHARS]]
        for one in found["lines"]
    ]
    more = found["num_lines"] - len(cells)
    lines = ["", text_table.line(f"traces {found['a']} and {found['b']}{change}", is_md)]
    lines.append(
        text_table.render(["ms a step", *arms, "", found["by"]], cells, [True] * 3 + [False] * 2, FORMS[is_md])
    )
    return lines + ([f"and {more} more: ./run.sh analyze diff has all"] if more else [])


def _step_cells(pair):
    pct = "" if pair["change_pct"] is None else f"{pair['change_pct']:+.1f} %"
    return [f"{pair['a_ms']:.3f}", f"{pair['b_ms']:.3f}", f"{pair['change_ms']:+.3f}", pct]


def _ms(ms):
    return "" if ms is None else f"{ms:.3f}"


def _share(pair):
    return "" if pair["share_frac"] is None else f"{100 * pair['share_frac']:.0f} %"
