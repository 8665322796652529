"""Is this machine ready to benchmark?  ./run.sh doctor [--json] [--quick] [--passport] [hardware=cpu ...]

Makes the quick checks of every run (bench/machine/preflight.py), and then slower ones: it starts processes as in a run,
which sum a tensor over all of them within a timeout and report torch, CUDA and NCCL (bench/launch/probe.py).
--passport instead measures peak FLOP/s and bandwidth, keeps and compares them (bench/machine/passports.py).
--rehearse-gpu [MODEL ...] instead compiles models for an H100 that need not be present (bench/launch/rehearse.py).
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

from bench.base.paths import REPO, results_root
from bench.base.text_table import counted
from bench.cli import arguments
from bench.config import compose, resolve, schema
from bench.launch import probe, rehearse
from bench.machine import code_state, environment, gpus, passports, preflight
from bench.machine.preflight import Check
from bench.plans.passport import session

WIDTH = len("power limit")  # the longest name of a check


def main(argv: list[str]) -> int:
    """Exit codes: 0 fit, perhaps with warnings; 1 a check failed, or nothing could be measured; 2 usage error."""
    args = _parser().parse_intermixed_args(argv)
    if args.rehearse_gpu is not None:
        arguments = [*args.rehearse_gpu, *args.overrides]
        settings = [word for word in arguments if "=" in word]
        names = [word for word in arguments if word not in settings]
        return rehearsal(names, settings, args.gpu, 0 if args.full else rehearse.NUM_LAYERS, args.json)
    machine = schema.Machine(len(gpus.visible()), environment.usable_cpus())
    hardware = compose.compose(args.overrides, machine).hardware
    resolve.resolve_hardware(hardware, machine)
    env = environment.environment()
    if args.passport:
        return passport(hardware, env, args.json)
    checks = [*preflight.checks(hardware, 0, env, results_root()), preflight.git(code_state.git_failure(), REPO)]
    if hardware.device == "cuda" or env["nvml"] is None:
        checks.insert(0, driver(env, gpus.torch_fault()))
    show = (lambda shown: None) if args.json else (lambda shown: print(preflight.report(shown, WIDTH), flush=True))
    show(checks)
    if not args.quick:
        probed = probe.probe(hardware)
        show(probed)
        checks += probed
    fit = not any(check.status == "fail" for check in checks)
    as_json = {"fit": fit, "checks": [vars(check) for check in checks]}
    print(json.dumps(as_json, indent=1) if args.json else verdict(checks))
    return 0 if fit else 1


def check(argv: list[str]) -> None:
    """Raises ValueError for arguments that are no settings, before they are submitted with cluster=slurm."""
    compose.compose(_parser().parse_intermixed_args(argv).overrides)


def passport(hardware: schema.HardwareConfig, env: dict[str, Any], as_json: bool) -> int:
    """Measures and prints a passport. Returns 0, also if it reports a slow GPU, or 1 if it could not be measured."""
    earlier = passports.every()
    try:
        measured = session.measure(hardware, env, _say)
    except session.NotMeasured as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    path = passports.write(measured)
    changes, slow = passports.changes(measured, earlier), passports.slower_than_peers(measured)
    if as_json:
        output = {"file": str(path), "passport": measured, "changes": changes, "slower_than_peers": slow}
        print(json.dumps(output, indent=1))
    else:
        print(passports.as_text(measured, path, changes, slow))
    return 0


def rehearsal(names: list[str], overrides: list[str], gpu: str, num_layers: int, as_json: bool) -> int:
    """Compiles these models, or all, for a GPU. Returns 0 if each compiles as a run needs it, 1 if one does not."""
    requested = {name: rehearse.overrides_of(name) for name in names or rehearse.choices()}
    rehearsals, checks = {}, []
    for name, own in requested.items():
        rehearsals[name] = rehearse.rehearse([*own, *overrides], gpu, num_layers)
        rows = rehearse.judge(name, rehearsals[name])
        checks += rows
        if not as_json:
            print(preflight.report(rows, WIDTH), flush=True)
    failed = sorted({check.name for check in checks if check.status == "fail"})
    if as_json:
        rows_as_json = [vars(check) for check in checks]
        print(json.dumps({"fit": not failed, "checks": rows_as_json, "rehearsals": rehearsals}, indent=1))
    else:
        print(f"{len(requested) - len(failed)} of {len(requested)} compile for {gpu.upper()} as they are")
        print(rehearse.NOT_FOUND)
    return 1 if failed else 0


def _say(line: str) -> None:
    """Prints progress: one line that changes on a terminal, else every tenth line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line.partition("/")[0].endswith("0"):
        print(line, file=sys.stderr, flush=True)


def verdict(checks: Iterable[Check]) -> str:
    """Returns the verdict as one line for a person."""
    failed, warned = ([check.name for check in checks if check.status == status] for status in ("fail", "warn"))
    if failed:
        return f"not ready to benchmark: {', '.join(failed)}"
    if warned:
        return f"ready, but times will be less reliable: {', '.join(warned)}"
    return "ready to benchmark"


def driver(env: dict[str, Any], fault: tuple[str, str] | None) -> Check:
    """Checks for the NVIDIA driver, how many GPUs it shows, and whether torch can use them (gpus.torch_fault())."""
    if env["nvml"] is not None:
        return Check("driver", "fail", env["nvml"], "install the NVIDIA driver, or start the container with --gpus all")
    if fault is not None:
        return Check("driver", "fail", *fault)
    num_visible = sum(gpu["visible"] is not None for gpu in env["gpus"])
    return Check("driver", "ok", f"{env['driver']}, {counted(len(env['gpus']), 'GPU')}, {num_visible} visible")


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh doctor", main=main)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for run, e.g. hardware.num_processes=4")
    parser.flag(
        "--json", help="{fit, checks: [{name, status, found, remedy}]}, or {passport, changes, slower_than_peers}"
    )
    parser.flag("--quick", help="make only the checks of every run; start no processes")
    passport_help = "measure this machine's peak rates: products, memory, collectives, launches, clocks; in 3 minutes"
    parser.flag("--passport", help=passport_help)
    rehearse_help = "compile experiments and models, also my_model.py:MyModel, for a GPU that need not be present; "
    rehearse_help += "needs a C++ compiler, and triton for the kernels"
    parser.add_argument("--rehearse-gpu", nargs="*", metavar="MODEL", help=rehearse_help)
    gpu_help = "the GPU of --rehearse-gpu; default %(default)s"
    parser.add_argument("--gpu", choices=("h100", "a100"), default="h100", help=gpu_help)
    full_help = f"--rehearse-gpu: compile all layers instead of {rehearse.NUM_LAYERS} that include every kind"
    parser.flag("--full", help=full_help)
    return parser
