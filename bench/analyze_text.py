"""An analysis (bench/analyze.py) -> words for a terminal, Markdown for a file."""

from tabulate import tabulate

MAX_NAME_CHARS = 60
NUM_LINES = 12


def as_text(found, title):
    return "\n".join(_lines(found, title, "simple", ""))


def as_markdown(found, title):
    return "\n".join(_lines(found, title, "github", "## ")) + "\n"


def _lines(found, title, form, mark):
    yield f"{'# ' if mark else ''}Trace analysis: {_plain(title, 200)}"
    overall = found["overall"]
    if overall["missing_ranks"]:
        yield f"\n{len(overall['missing_ranks'])} of {overall['world_size']} ranks are missing: {overall['missing_ranks'][:10]}"
    on_device = [_time_line(rank, one) for rank, one in found["ranks"].items() if one["temporal"]["span_us"]]
    head = ("rank", "span", "busy %", "compute %", "non-compute %", "idle %", "overlap %", "exposed comm.", "steps", "device rows")
    yield from _part(f"{mark}Time of the device, ms and % of the span", head, on_device, form)
    for rank, one in found["ranks"].items():
        if one["cut"] or one["num_bad_events"]:
            yield f"\nrank {rank}: {one['cut'] or 'the file is whole'}; {one['num_events']} events were read, {one['num_bad_events']} could not be"
    first = next(iter(found["ranks"]))
    yield from _of_rank(first, found["ranks"][first], form, mark)
    yield from _over_ranks(overall, form, mark)


def _time_line(rank, one):
    time = one["temporal"]
    exposed = None if one["overlap_pct"] is None else f"{one['exposed_comm_us'] / 1000:.2f}"
    shares = [f"{value:.2f}" if value is not None else None for value in (100 - time["idle_pct"], time["compute_pct"], time["non_compute_pct"], time["idle_pct"], one["overlap_pct"])]
    return [rank, f"{time['span_us'] / 1000:.2f}", *shares, exposed, len(one["profiler_steps"]), one["num_device_rows"]]


def _of_rank(rank, one, form, mark):
    if not one["num_device_rows"]:
        yield f"\nrank {rank} has no device rows: a trace of the CPU alone"
    if one["advice"]:
        yield f"\n{mark}What it means (rank {rank})\n"
        yield "\n".join(f"- {sentence}" for sentence in one["advice"])
    yield from _part(f"{mark}Categories (rank {rank})", ("category", "ms", "%", "kernels"), [(line["category"], _ms(line["sum_us"]), f"{line['pct']:.1f}", line["count"]) for line in one["categories"]], form)
    yield from _part(f"{mark}Kernels", ("kernel", "category", "ms", "count", "mean us"), [(_plain(line["name"]), line["category"], _ms(line["sum_us"]), line["count"], f"{line['mean_us']:.2f}") for line in one["kernels"][:NUM_LINES]], form)
    ops = [line for line in one["operators"] if line["device_us"] or line["self_cpu_us"]][:NUM_LINES]
    yield from _part(f"{mark}Operators", ("operator", "shapes", "device ms", "self CPU ms", "count"), [(_plain(line["name"]), _plain(line["shapes"] or "", 40), _ms(line["device_us"]), _ms(line["self_cpu_us"]), line["count"]) for line in ops], form)
    rates = [(_plain(line["name"]), _plain(line["shapes"], 40), f"{line['tflop_per_s']:.1f}", _one(line["pct_of_peak"]), _one(line["flop_per_byte"]), line["bound"]) for line in one["achieved"][:NUM_LINES]]
    if one["flop_known_frac"] is not None:
        yield from _part(f"{mark}TFLOP/s from shapes, known for {100 * one['flop_known_frac']:.0f} % of device time", ("operator", "shapes", "TFLOP/s", "% of peak", "FLOP/byte", "bound"), rates, form)
    steps = [(line["step"], _ms(line["host_us"]), _ms(line["busy_us"]), _ms(line["exposed_comm_us"]), line["num_kernels"]) for line in one["steps"][:NUM_LINES]]
    yield from _part(f"{mark}Steps", ("step", "host ms", "device busy ms", "exposed comm. ms", "kernels"), steps, form)
    yield from _part(f"{mark}Phases", ("phase", "host ms", "device ms", "kernels"), [(line["phase"], _ms(line["host_us"]), _ms(line["device_us"]), line["num_kernels"]) for line in one["phases"]], form)
    yield from _part(f"{mark}Idle time by stream, ms", ("device", "stream", "host wait", "kernel wait", "other"), [(line["device"], line["stream"], *(_ms(line[f"{name}_us"]) for name in ("host_wait", "kernel_wait", "other"))) for line in one["idle"]], form)
    yield from _critical_path(one["critical_path"], one["critical_path_of_steps"])
    yield from _part(f"{mark}Largest gaps of the device", ("at ms", "us", "the host was in", "next kernel"), [(_ms(gap["start_us"]), f"{gap['us']:.1f}", _plain(gap["host"] or "nothing recorded"), _plain(gap["after"])) for gap in one["gaps"][:5]], form)


def _critical_path(whole, of_steps):
    """Of the whole span, and of a step: the mean over the steps, whose shares say what bounds it."""
    parts = ("compute", "communication", "memory", "launch", "host", "wait")
    sums = {key: sum(path[key] for path in of_steps) for key in (*(f"{part}_us" for part in parts), "span_us")}
    paths = [("Critical path", whole, 1)] + [(f"Critical path of a step, mean of {len(of_steps)}", sums, len(of_steps))] * bool(of_steps)
    for title, path, num in paths:
        if path["span_us"]:
            words = ", ".join(f"{part} {100 * path[f'{part}_us'] / path['span_us']:.1f} %" for part in parts)
            yield f"\n{title}: {path['span_us'] / num / 1000:.2f} ms: {words}"


def _over_ranks(overall, form, mark):
    found = overall["collectives"]
    if found:
        lines = [(line["rank"], _ms(line["wait_us"]), line["num_last"]) for line in found["waits"]]
        yield from _part(f"{mark}Who waited for whom: {found['num_matched']} collectives matched", ("rank", "waited ms", "came last"), lines, form)
    if overall["step_skew"]:
        lines = [(line["step"], line["slowest"], line["fastest"], _ms(line["skew_us"])) for line in overall["step_skew"][:NUM_LINES]]
        yield from _part(f"{mark}Own work of a step", ("step", "slowest rank", "fastest", "skew ms"), lines, form)


def diff_text(found, a, b):
    """The answer of analyze diff for a terminal."""
    pair = found[found["of"]]
    lines = []
    if found["change_ms"] is not None:
        lines.append(f"{'a step' if found['of'] == 'step_ms' else 'the device span'}: {pair[0]:.3f} ms in {_plain(a, 80)}, {pair[1]:.3f} ms in {_plain(b, 80)}: {found['change_ms']:+.3f} ms")
        lines.append(f"the lines below add up to {found['explained_ms']:+.3f} ms; the rest, {found['rest_ms']:+.3f} ms, is idle time and overlap")
    shown = [line for line in found["lines"] if line["status"] != "same"]
    rows = [(f"{line['change_ms']:+.3f}", line["status"], _three(line["a_ms"]), _three(line["b_ms"]), _one(line["a_count"]), _one(line["b_count"]), _plain(line["what"])) for line in shown[: 3 * NUM_LINES]]
    lines.append("\n" + _table(("ms a step", "", "A ms", "B ms", "A count", "B count", "what"), rows, "simple"))
    if len(shown) > len(rows):
        rest = sum(line["change_ms"] for line in shown[len(rows) :])
        lines.append(f"and {len(shown) - len(rows)} more: {rest:+.3f} ms; --json has all")
    return "\n".join(lines)


def _part(title, head, rows, form):
    if rows:
        yield f"\n{title}\n"
        yield _table(head, rows, form)


def _table(head, rows, form):
    return tabulate(rows, head, tablefmt=form, disable_numparse=True, colalign=["left"] * len(head) if rows else None)


def _plain(value, limit=MAX_NAME_CHARS):
    """Somebody's words on our screen: no control characters, no table of their own, not too long."""
    words = "".join(char if char.isprintable() else " " for char in str(value)).replace("|", "¦").replace("<", "‹").replace(">", "›")
    return words if len(words) <= limit else words[: limit - 1] + "…"


def _ms(us):
    return None if us is None else f"{us / 1000:.3f}"


def _one(value):
    return None if value is None else f"{value:.1f}"


def _three(value):
    return None if value is None else f"{value:.3f}"
