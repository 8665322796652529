"""An analysis (bench/trace/analysis.py) -> words for a terminal, Markdown for a file."""

import re

from bench import text_table

MAX_NAME_CHARS = 60
NUM_LINES = 10
BOILERPLATE = re.compile(r"^void |at::native::|at::cuda::|c10::|\(anonymous namespace\)::|(?<=[<, ])at::(?=\w)")


def as_text(found, title):
    return "\n".join(_lines(found, title, "simple", ""))


def as_markdown(found, title):
    return "\n".join(_lines(found, title, "github", "## ")) + "\n"


def _lines(found, title, form, mark):
    yield f"{'# ' if mark else ''}Trace analysis: {_plain(title, 200)}"
    overall, ranks = found["overall"], found["ranks"]
    if overall["missing_ranks"]:
        yield f"\n{len(overall['missing_ranks'])} of {overall['world_size']} ranks are missing: {overall['missing_ranks'][:10]}"
    on_device = [_time_line(rank, one) for rank, one in ranks.items() if one["temporal"]["span_us"]]
    head = (
        "rank",
        "span",
        "busy %",
        "compute %",
        "non-compute %",
        "idle %",
        "overlap %",
        "exposed comm.",
        "steps",
        "device rows",
    )
    yield from _part(f"{mark}Time of the device, ms and % of the span", head, on_device, form)
    for rank, one in ranks.items():
        yield from _of_file(rank, one)
    shown = next(iter(ranks))
    of_rank = f" (rank {shown} of {len(ranks)}; --json has all)" if len(ranks) > 1 else ""
    yield from _of_rank(shown, ranks[shown], of_rank, form, mark)
    yield from _over_ranks(overall, form, mark)


def _time_line(rank, one):
    time = one["temporal"]
    exposed = None if one["overlap_pct"] is None else f"{one['exposed_comm_us'] / 1000:.2f}"
    shares = [
        f"{value:.2f}" if value is not None else None
        for value in (
            100 - time["idle_pct"],
            time["compute_pct"],
            time["non_compute_pct"],
            time["idle_pct"],
            one["overlap_pct"],
        )
    ]
    return [rank, f"{time['span_us'] / 1000:.2f}", *shares, exposed, len(one["profiler_steps"]), one["num_device_rows"]]


def _of_file(rank, one):
    """What a reader must know of a file before trusting its numbers."""
    if one["cut"] or one["num_bad_events"]:
        yield f"\nrank {rank}: {one['cut'] or 'the file is whole'}; {one['num_events']} events were read, {one['num_bad_events']} could not be"
    if one["num_launches_without_kernel"]:
        yield f"\nrank {rank}: {one['num_launches_without_kernel']} of {one['num_launch_calls']} launches have no kernel in the trace: the profiler lost them, and all sums are too low by them"
    left_out = one["num_device_rows_left_out"]
    if not one["num_device_rows"] and not any(left_out.values()):
        yield f"\nrank {rank} has no device rows: {'a trace of the CPU alone' if one['num_operators'] else 'nor any operators: there is nothing to analyse'}"
    if left_out["last_step"]:
        yield f"\nrank {rank}: {left_out['last_step']} device rows of the last step, {one['profiler_steps_left_out'][-1]}, are not counted: it may be cut off (--include-last-step counts them)"
    if left_out["not_launched"]:
        yield f"\nrank {rank}: {left_out['not_launched']} device rows are not counted: their launch was not recorded, so their step is not known"


def _of_rank(rank, one, of_rank, form, mark):
    def part(title, head, rows):
        return _part(f"{mark}{title}{of_rank}", head, rows, form)

    if one["advice"]:
        yield f"\n{mark}What it means{of_rank}\n"
        yield "\n".join(f"- {sentence}" for sentence in one["advice"])
    yield from part(
        "Kernels by type, % of the busy time",
        ("type", "ms", "%"),
        [(line["type"].lower(), _ms(line["sum_us"]), _one(line["pct"])) for line in one["kernel_types"]],
    )
    yield from part(
        "Categories, % of all kernels' time",
        ("category", "ms", "%", "kernels"),
        [(line["category"], _ms(line["sum_us"]), _one(line["pct"]), line["count"]) for line in one["categories"]],
    )
    table = [
        (
            _short(line["name"]),
            line["category"],
            _ms(line["sum_us"]),
            line["count"],
            *map(_two, (line["mean_us"], line["min_us"], line["max_us"], line["std_us"])),
        )
        for line in one["kernels"]
    ]
    yield from part("Kernels", ("kernel", "category", "ms", "count", "mean us", "min", "max", "std"), table[:NUM_LINES])
    lines = [line for line in one["launchers"] if line["operator"] or line["annotation"] or line["source"]]
    by = [name for name in ("operator", "annotation", "module", "source") if any(line[name] for line in lines)]
    table = [
        (
            _short(line["kernel"], 40),
            *(_plain(line[name] or "", 40) for name in by),
            _ms(line["device_us"]),
            line["count"],
        )
        for line in lines[:NUM_LINES]
    ]
    yield from part("Who launched them", ("kernel", *by, "ms", "count"), table)
    yield from _operators(one, part)
    yield from _steps(one, part)
    yield from _waiting(one, part)
    yield from _critical_path(one["critical_path"], one["critical_path_of_steps"])
    gaps = [
        (_ms(gap["start_us"]), _one(gap["us"]), _plain(gap["host"] or "nothing recorded"), _short(gap["after"], 40))
        for gap in one["gaps"][:5]
    ]
    yield from part("Largest gaps of the device", ("at ms", "us", "the host was in", "next kernel"), gaps)


def _operators(one, part):
    ops, on_device = one["operators"], bool(one["num_device_rows"])
    for title, key, words in (
        ("device time", "device_us", _ms),
        ("own CPU time", "self_cpu_us", _ms),
        ("memory asked for", "allocated_bytes", _mib),
    ):
        leading = sorted((line for line in ops if line[key]), key=lambda line: -line[key])[:NUM_LINES]
        head, times = ("device ms", "own CPU ms"), ("device_us", "self_cpu_us")
        head, times = (head, times) if on_device else (head[1:], times[1:])
        if words is _mib:
            head, times = (*head, "MiB", "net MiB"), (*times, "allocated_bytes", "net_bytes")
        table = [
            (
                _plain(line["name"]),
                _shapes(line),
                *((_mib if "bytes" in name else _ms)(line[name]) for name in times),
                line["count"],
            )
            for line in leading
        ]
        yield from part(f"Operators by {title}", ("operator", "shapes", *head, "count"), table)
    whole = one["achieved_whole"]
    if whole["known_frac"] is not None and one["achieved"]:
        unit, per = ("TFLOP/s", 1.0) if whole["of"] == "device" else ("GFLOP/s", 1e3)
        what = "device time" if whole["of"] == "device" else "the operators' time on the CPU"
        title = f"{unit} of matrix products and attention, from their shapes: {whole['tflop_per_s'] * per:.1f} over the {100 * whole['known_frac']:.0f} % of {what} for which they are known"
        head, peak = (
            ("operator", "shapes", "ms", unit),
            any(line["pct_of_peak"] is not None for line in one["achieved"]),
        )
        rates = [
            (
                _plain(line["name"]),
                _shapes(line),
                _ms(line["time_us"]),
                _three_digits(line["tflop_per_s"] * per),
                _one(line["flop_per_byte"]),
                *([_one(line["pct_of_peak"]), line["precision"], line["bound"]] if peak else []),
            )
            for line in one["achieved"][:NUM_LINES]
        ]
        yield from part(title, (*head, "FLOP/byte", *(("% of peak", "of", "bound by") if peak else ())), rates)


def _steps(one, part):
    if one["num_device_rows"]:
        head, names = (
            ("step", "host ms", "device busy ms", "compute ms", "comm. ms", "exposed comm. ms", "kernels"),
            ("host_us", "busy_us", "compute_us", "comm_us", "exposed_comm_us"),
        )
        yield from part(
            "Steps",
            head,
            [
                (line["step"], *(_ms(line[name]) for name in names), line["num_kernels"])
                for line in one["steps"][:NUM_LINES]
            ],
        )
        yield from part(
            "Phases",
            ("phase", "host ms", "device ms", "kernels"),
            [
                (line["phase"], _ms(line["host_us"]), _ms(line["device_us"]), line["num_kernels"])
                for line in one["phases"]
            ],
        )
    else:
        yield from part(
            "Steps", ("step", "ms"), [(line["step"], _ms(line["host_us"])) for line in one["steps"][:NUM_LINES]]
        )
        yield from part("Phases", ("phase", "ms"), [(line["phase"], _ms(line["host_us"])) for line in one["phases"]])
    for title, key in (("host", "annotations"), ("GPU", "gpu_annotations")):
        lines = [line for line in one[key] if not line["name"].startswith("ProfilerStep")][:NUM_LINES]
        yield from part(
            f"Annotations of the {title}",
            ("annotation", "ms", "count", "mean us", "std us"),
            [
                (_plain(line["name"]), _ms(line["sum_us"]), line["count"], _two(line["mean_us"]), _two(line["std_us"]))
                for line in lines
            ],
        )
    for key, name in (("modules", "module"), ("sources", "source")):
        time, count, head = (
            ("device_us", "num_kernels", ("device ms", "kernels"))
            if one["num_device_rows"]
            else ("cpu_us", "num_calls", ("own CPU ms", "calls"))
        )
        yield from part(
            f"By {'nn.Module' if name == 'module' else 'source line'}",
            (name, *head),
            [(_plain(line[name]), _ms(line[time]), line[count]) for line in one[key][:NUM_LINES]],
        )


def _waiting(one, part):
    """Why streams were idle, how the host launched, what was queued and copied."""
    idle = [
        (line["device"], line["stream"], *(_ms(line[f"{name}_us"]) for name in ("host_wait", "kernel_wait", "other")))
        for line in one["idle"]
    ]
    yield from part("Idle time by stream, ms", ("device", "stream", "host wait", "kernel wait", "other"), idle)
    found = one["launches"]
    if found["num_launches"]:
        yield (
            f"\n{found['num_launches']} launches: a call takes {found['call_us_mean']:.1f} us (mean; 95 % are under {found['call_us_p95']:.1f}), the kernel starts {found['delay_us_p50']:.1f} us after it "
            f"(median; 95 % under {found['delay_us_p95']:.1f}).  {found['num_short_kernels']} kernels run shorter than their call, {found['num_slow_calls']} calls take over 50 us, {found['num_long_delays']} delays are over 100 us."
        )
    if found["num_graph_rows"]:
        yield f"\n{found['num_graph_rows']} kernels were launched by {found['num_graph_launches']} graphs."
    yield from part(
        "Queued launches",
        ("device", "stream", "most", "mean", "% of the time none"),
        [
            (line["device"], line["stream"], line["max"], _one(line["mean"]), _one(line["empty_pct"]))
            for line in one["queues"]
        ],
    )
    copies = [
        (
            _plain(line["name"]),
            line["count"],
            _mib(line["gib"] and line["gib"] * 2**30),
            _ms(line["sum_us"]),
            _two(line["gib_per_s"]),
        )
        for line in one["copies"]
    ]
    yield from part("Copies and their bandwidth", ("copy", "count", "MiB", "ms", "GiB/s"), copies)
    waits = [(_plain(line["name"]), line["count"], _ms(line["sum_us"])) for line in one["synchronisations"][:5]]
    yield from part("The host waited for the device in", ("call", "count", "ms"), waits)


def _critical_path(whole, of_steps):
    """Of the whole span, and of a step: the mean over the steps, whose shares say what bounds it."""
    parts = ("compute", "communication", "memory", "launch", "host", "wait")
    sums = {key: sum(path[key] for path in of_steps) for key in (*(f"{part}_us" for part in parts), "span_us")}
    paths = [("Critical path", whole, 1)] + [
        (f"Critical path of a step, mean of {len(of_steps)}", sums, len(of_steps))
    ] * bool(of_steps)
    for title, path, num in paths:
        if path["span_us"]:
            words = ", ".join(f"{part} {100 * path[f'{part}_us'] / path['span_us']:.1f} %" for part in parts)
            yield f"\n{title}: {path['span_us'] / num / 1000:.2f} ms: {words}"


def _over_ranks(overall, form, mark):
    found = overall["collectives"]
    if found:
        lines = [(line["rank"], _ms(line["wait_us"]), line["num_last"]) for line in found["waits"]]
        yield from _part(
            f"{mark}Who waited for whom: {found['num_matched']} collectives matched",
            ("rank", "waited ms", "came last"),
            lines,
            form,
        )
        worst = [
            (_short(line["name"]), line["call"], line["late_rank"], _ms(line["longest_wait_us"]))
            for line in found["worst"][:5]
        ]
        yield from _part(
            f"{mark}The longest waits", ("collective", "call", "rank that came last", "longest wait ms"), worst, form
        )
    if overall["step_skew"]:
        lines = [
            (line["step"], line["slowest"], line["fastest"], _ms(line["skew_us"]))
            for line in overall["step_skew"][:NUM_LINES]
        ]
        yield from _part(f"{mark}Own work of a step", ("step", "slowest rank", "fastest", "skew ms"), lines, form)


def diff_text(found, a, b):
    """The answer of analyze diff for a terminal."""
    pair = found[found["of"]]
    lines = []
    if found["change_ms"] is not None:
        lines.append(
            f"{'a step' if found['of'] == 'step_ms' else 'the span'}: {pair[0]:.3f} ms in {_plain(a, 80)}, {pair[1]:.3f} ms in {_plain(b, 80)}: {found['change_ms']:+.3f} ms"
        )
        lines.append(
            f"  {found['explained_ms']:+.3f} ms in {'kernels' if found['by'] == 'kernel' else 'operators'}, the lines below\n"
            f"  {found['idle_change_ms']:+.3f} ms in which none of them ran\n"
            f"  {-found['overlap_change_ms']:+.3f} ms by running more or less of them at once"
        )
    if found["categories"]:
        rows = [
            (f"{line['change_ms']:+.3f}", _three(line["a_ms"]), _three(line["b_ms"]), line["category"])
            for line in found["categories"]
        ]
        lines.append("\n" + _table(("ms a step", "A ms", "B ms", "category of kernels"), rows, "simple"))
    shown = [line for line in found["lines"] if line["status"] != "same"]
    rows = [
        (
            f"{line['change_ms']:+.3f}",
            line["status"],
            _three(line["a_ms"]),
            _three(line["b_ms"]),
            _one(line["a_count"]),
            _one(line["b_count"]),
            _short(line["what"], 80),
        )
        for line in shown[: 3 * NUM_LINES]
    ]
    if rows:
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
    return text_table.render(head, [["" if cell is None else str(cell) for cell in row] for row in rows], form=form)


def _plain(value, limit=MAX_NAME_CHARS):
    """Somebody's words on our screen: no control characters, no table of their own, not too long."""
    words = text_table.printable(str(value)).replace("|", "¦").replace("<", "‹").replace(">", "›")
    return words if len(words) <= limit else words[: limit - 1] + "…"


def _short(name, limit=MAX_NAME_CHARS):
    """A kernel's name without what all have: return type, namespaces and arguments; what is left tells them apart."""
    words = BOILERPLATE.sub("", str(name))
    head, bracket, _ = words.rpartition("(")
    is_call = words.endswith(")") and head and not head.endswith(" ")  # "Memcpy HtoD (Pinned -> Device)" is none
    return _plain(head if bracket and is_call else words, limit)


def _shapes(line):
    return _plain("" if line["shapes"] is None else line["shapes"], 40)


def _ms(us):
    return None if us is None else f"{us / 1000:.3f}"


def _one(value):
    return None if value is None else f"{value:.1f}"


def _two(value):
    return None if value is None else f"{value:.2f}"


def _mib(num_bytes):
    return None if num_bytes is None else f"{num_bytes / 2**20:.3f}"


def _three_digits(value):
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _three(value):
    return None if value is None else f"{value:.3f}"
