"""./run.sh analyze PATH... [--json] [--rules FILE]      ./run.sh analyze diff A B

PATH: a run folder, a Kineto trace (.json, .json.gz), or a folder of ranks' traces, anybody's.  Several files are the ranks
of one job; several folders, and the windows of a run, are answered one by one, in --json as {PATH: answer}.  Of a run folder
it also writes analysis.json and summary.md into it, of its first window.  Needs no torch.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from bench import atomic, paths as places
from bench.machine import peak_rates
from bench.trace.text import as_markdown, as_text, diff_text
from bench.trace import (
    advice,
    attribution,
    categories,
    critical,
    diff,
    events,
    flops,
    kernels,
    launches,
    load,
    operators,
    skew,
    temporal,
    window,
)

DTYPES = ("bfloat16", "float16", "float32", "tf32", "float8")
MAX_OPERATORS = 50
MAX_RANKS = 2**20  # a file that says more is not believed


def main(argv):
    """Exit codes: 0 analysed, 2 wrong use or no trace."""
    if argv[:1] == ["diff"]:
        return _diff(argv[1:])
    args = _parser().parse_args(argv)
    rules = categories.load_rules(places.of_user(args.rules)) if args.rules else categories.RULES
    answers = {}
    for words in _jobs(args.path):
        paths = [_locate(word) for word in words]
        by_window = load.by_window([one for path in paths for one in load.find(path)])
        found = {}
        for name, ranks in by_window.items():
            title = ", ".join(words) + (f", window {name}" if len(by_window) > 1 else "")
            found[title] = of_ranks(ranks, rules, args.include_last_step)
            if not args.json:
                print(as_text(found[title], title))
        if (paths[0] / "run.json").is_file():
            _keep(paths[0], next(iter(found.values())))
        answers |= found
    if args.json:
        print(json.dumps(answers if len(answers) > 1 else next(iter(answers.values())), indent=1))
    return 0


def _jobs(words):
    """What was named -> lists of what belongs together: several files are the ranks of one job, a folder is one by itself."""
    files = [word for word in words if places.of_user(word).is_file()]
    return [files] * bool(files) + [[word] for word in words if word not in files]


def analyze(paths, rules=categories.RULES, include_last_step=False):
    """Trace files of one job -> {"ranks": {"0": {...}}, "overall": {...}}: the --json answer."""
    return of_ranks(load.load_all(paths), rules, include_last_step)


def of_ranks(ranks, rules=categories.RULES, include_last_step=False):
    """Ranks of one job -> the same."""
    chosen = {rank.rank: (rank, *_rows(rank, rules, include_last_step)) for rank in ranks}
    by_rank = {str(number): of_rank(*one, rules, include_last_step) for number, one in chosen.items()}
    return {"ranks": by_rank, "overall": _overall(by_rank, chosen)}


def _rows(rank, rules, include_last_step):
    rows = window.device_rows(rank, include_last_step)
    return rows, kernels.types(rank, rows, rules), window.until(rank, include_last_step)


def of_rank(rank, rows, kinds, until_ns, rules, include_last_step=False):
    """Everything about one rank; of several devices in one file, the one with most rows leads and "devices" has all."""
    by_device = window.devices(rank, rows)
    leads = max(by_device.values(), key=lambda mask: mask.sum(), default=slice(None))
    on_main, main_kinds = rows[leads], kinds[leads]
    time = temporal.breakdown(rank, on_main, main_kinds)
    table = kernels.by_name(rank, rows, kinds, rules)
    ops = operators.table(rank, rows, until_ns)
    peaks, mem_bytes_per_s, device_name = _peaks(rank)
    rates, achieved = flops.achieved(ops, sum(line["sum_us"] for line in table) if len(rows) else None, peaks, mem_bytes_per_s)
    steps = window.steps(rank, include_last_step)
    num_calls, num_lost = launches.without_kernel(rank, until_ns)
    found = {
        "file": rank.path.name,
        "profiler_steps": [number for number, _, _ in steps],
        "profiler_steps_left_out": [number for number, _, _ in rank.steps()][len(steps) :],
        "num_events": rank.num_events,
        "num_device_rows": len(rows),
        "num_device_rows_left_out": _left_out(rank, len(rows)),
        "num_bad_events": rank.num_bad,
        "num_launch_calls": num_calls,
        "num_launches_without_kernel": num_lost,
        "cut": rank.cut,
        "device": device_name,
        "temporal": {name: time[name] for name in ("idle_us", "compute_us", "non_compute_us", "span_us", "idle_pct", "compute_pct", "non_compute_pct")},
        "overlap_pct": time["overlap_pct"],
        "comm_us": time["comm_us"],
        "exposed_comm_us": time["exposed_comm_us"],
        "idle": temporal.idle(rank, rows),
        "kernel_types": kernels.by_type(rank, on_main, main_kinds),
        "kernels": table,
        "categories": kernels.by_category(table),
        "steps": temporal.steps(rank, on_main, main_kinds, steps),
        "phases": attribution.phase_times(rank, rows, until_ns),
        "annotations": temporal.annotations(rank, events.ANNOTATION, until_ns),
        "gpu_annotations": temporal.annotations(rank, events.GPU_ANNOTATION, until_ns),
        "launches": launches.statistics(rank, rows),
        "queues": launches.queues(rank, rows),
        "copies": launches.copies(rank, rows),
        "operators": _leading(ops),
        "num_operators": len(ops),
        "achieved": rates[:MAX_OPERATORS],
        "achieved_whole": achieved,
        "flop_known_frac": achieved["known_frac"],
        "launchers": attribution.launchers(rank, rows),
        "modules": attribution.modules(rank, rows, until_ns),
        "sources": attribution.sources(rank, rows, until_ns)[:MAX_OPERATORS],
        "critical_path": critical.path(rank, on_main, main_kinds),
        "critical_path_of_steps": critical.steps(rank, on_main, main_kinds),
        "gaps": critical.gaps(rank, on_main),
        "synchronisations": critical.synchronisations(rank, steps),
        "items": critical.items(rank, rows),
        "host_copies": launches.host_copies(rank, on_main),
        "devices": {str(device): temporal.breakdown(rank, rows[mask], kinds[mask]) for device, mask in by_device.items()},
    }
    return found | {"advice": advice.of(found)}


def _left_out(rank, num_counted):
    """{"last_step", "not_launched"}: device rows that do not count, of the last step and of no known step (see window)."""
    recorded = rank.device_rows()
    if num_counted == len(recorded):
        return {"last_step": 0, "not_launched": 0}
    num_unknown = int((window.step_times(rank, recorded) == window.NOT_LAUNCHED).sum())
    return {"last_step": len(recorded) - num_counted - num_unknown, "not_launched": num_unknown}


def _leading(ops):
    """Those that lead by device time, own CPU time, memory or FLOPs, in their order."""
    leading = set()
    for measure in ("device_us", "self_cpu_us", "allocated_bytes", "flop"):
        leading |= set(sorted(range(len(ops)), key=lambda place: -(ops[place][measure] or 0))[:MAX_OPERATORS])
    return [ops[place] for place in sorted(leading)]


def _peaks(rank):
    """(precision -> FLOP/s or None, bytes/s or None, the device's name or None) by what the trace says of its GPU."""
    properties = rank.meta.get("deviceProperties")
    names = [one.get("name") for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    name = next((one for one in names if isinstance(one, str)), None)
    if name is None:
        return (lambda precision: None), None, None
    return (lambda precision: peak_rates.peak_flops(name, precision) if precision in DTYPES else None), peak_rates.mem_bytes_per_s(name), name


def _overall(by_rank, chosen):
    times = {number: found["temporal"] for number, found in by_rank.items() if found["temporal"]["span_us"]}
    sizes = [one[0].world_size for one in chosen.values() if 0 < (one[0].world_size or 0) <= MAX_RANKS]
    overall = {"num_ranks": len(by_rank), "world_size": max(sizes, default=None)}
    overall["missing_ranks"] = sorted(set(range(overall["world_size"] or 0)) - set(chosen))
    for name in ("idle", "compute", "non_compute"):
        shares = [time[f"{name}_pct"] for time in times.values()]
        overall[f"{name}_pct_mean"] = sum(shares) / len(shares) if shares else None
    overall["slowest_rank"] = max(times, key=lambda number: times[number]["span_us"], default=None)
    overall["step_skew"] = skew.steps({number: by_rank[str(number)]["steps"] for number in chosen})
    overall["collectives"] = skew.collectives({number: one[:3] for number, one in chosen.items()})
    return overall


def _keep(folder, found):
    """Beside the run's record, for reports."""
    try:
        atomic.write_json(folder / "analysis.json", found)
        if not (folder / "summary.md").exists() or (folder / "summary.md").read_text().startswith("# Trace analysis"):
            atomic.write_text(folder / "summary.md", as_markdown(found, folder.name))
        print(f"analyze: wrote {os.path.relpath(folder / 'analysis.json')}", file=sys.stderr)
    except OSError as error:
        print(f"analyze: {folder}/analysis.json could not be written ({error.strerror})", file=sys.stderr)


def _diff(argv):
    parser = argparse.ArgumentParser(prog="./run.sh analyze diff", description="What changed from A to B, per step.")
    parser.add_argument("a", metavar="A", help="a trace, a folder of traces or a run")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--by", choices=["kernel", "operator"], help="match kernels by name, or operators by name and shape; kernels where there are some")
    parser.add_argument("--rank", type=int, help="of a folder with several ranks; the lowest without it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    ranks = [_one_rank(word, args.rank) for word in (args.a, args.b)]
    by = args.by or diff.by_default(ranks)
    for word, rank in zip((args.a, args.b), ranks):
        if by == "kernel" and not len(rank.device_rows()):
            raise ValueError(f"--by kernel: {word} has no kernels, it is a trace of the CPU alone: match by operator")
    found = {"by": by} | diff.compare(*(diff.profile(rank, by) for rank in ranks))
    print(json.dumps(found, indent=1) if args.json else diff_text(found, args.a, args.b))
    return 0


def _one_rank(word, number):
    ranks = load.load_all(load.find(_locate(word)))
    for rank in ranks:
        if number is None or rank.rank == number:
            return rank
    raise ValueError(f"--rank {number}: {word} has ranks {', '.join(str(rank.rank) for rank in ranks)}")


def _locate(word):
    """A path from where the user stands; or a run id."""
    path = places.of_user(word)
    if path.exists():
        return path
    from bench.record import run_folder

    return Path(run_folder.locate(word))


def _parser():
    parser = argparse.ArgumentParser(prog="./run.sh analyze", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="+", metavar="PATH")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--rules", metavar="FILE", help="yaml list of {category, pattern}: your own kernels' categories, tried first")
    parser.add_argument("--include-last-step", action="store_true", help="count the last ProfilerStep too: its kernels may be cut off")
    return parser
