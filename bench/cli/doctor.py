"""Is this machine fit to measure?  ./run.sh doctor [--json] [--quick] [hardware=cpu ...]

The quick checks of every race (bench/preflight), then what takes seconds: the processes of a race are started as in a
race, sum a tensor over all of them within a timeout, and tell what torch, CUDA and NCCL they found.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.config import compose, resolve, schema
from bench.machine import environment, gpus, preflight
from bench.machine.preflight import Check
from bench.machine.processes import die_with_parent
from bench.paths import REPO, results_root
from bench.training import flight_recorder
from bench.units import GIB, MIB

PROBE_TIMEOUT_S = 30.0  # of one collective
START_S = 90.0  # for the processes to import torch, also from a cold disk
SLOW_FRAC = 0.03  # below the median GPU; the same model differs by a few percent at most when it is healthy
WIDTH = len("power limit")  # the longest name
NUM_CPU_RANKS = 2  # what a probe of gloo needs
TELLING = re.compile(r"timed out|timeout|error", re.I)


def main(argv):
    """Exit codes: 0 fit, perhaps with warnings; 1 a check failed; 2 wrong use."""
    args = _parser().parse_intermixed_args(argv)
    if not args.timeout_s > 0:
        raise ValueError(f"--timeout-s={args.timeout_s:g}: use a number of seconds above 0")
    machine = schema.Machine(gpus.num_visible(), environment.usable_cpus())
    hardware = compose.compose(args.overrides, machine).hardware
    resolve.resolve_hardware(hardware, machine)
    env = environment.environment()
    found = preflight.checks(hardware, 0, env, results_root())
    if hardware.device == "cuda" or env["nvml"] is None:
        found.insert(0, driver(env))
    if not args.quick:
        if not args.json:
            print(preflight.report(found, WIDTH), flush=True)
        probed = probe(hardware, args.timeout_s)
        if not args.json:
            print(preflight.report(probed, WIDTH), flush=True)
        found += probed
    elif not args.json:
        print(preflight.report(found, WIDTH))
    fit = not any(check.status == "fail" for check in found)
    if args.json:
        print(json.dumps({"fit": fit, "checks": [vars(check) for check in found]}, indent=1))
    else:
        print(verdict(found))
    return 0 if fit else 1


def verdict(found):
    """One line for a person."""
    failed, warned = ([check.name for check in found if check.status == status] for status in ("fail", "warn"))
    if failed:
        return f"not fit: {', '.join(failed)}"
    if warned:
        return f"fit, but times will be worth less: {', '.join(warned)}"
    return "fit to measure"


def driver(env):
    """The NVIDIA driver, and how many GPUs it shows."""
    if env["nvml"] is not None:
        return Check("driver", "fail", env["nvml"], "install the NVIDIA driver, or start the container with --gpus all")
    num_visible = sum(gpu["visible"] is not None for gpu in env["gpus"])
    return Check("driver", "ok", f"{env['driver']}, {len(env['gpus'])} GPU(s), {num_visible} visible")


def probe(hardware, timeout_s=PROBE_TIMEOUT_S):
    """Start the ranks of a race, let them talk, and end them -> list of Check."""
    num_processes = max(NUM_CPU_RANKS, hardware.num_processes) if hardware.device == "cpu" else hardware.num_processes
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "logs").mkdir()
        (folder / "probe.json").write_text(json.dumps({"device": hardware.device, "timeout_s": timeout_s}))
        ended = _run_ranks(folder, hardware.device, num_processes, START_S + 4 * timeout_s)
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.probe.json"), key=_rank)]
        failed = [json.loads(path.read_text()) for path in sorted(folder.glob("logs/rank*.failure.json"), key=_rank)]
        failed.sort(key=lambda one: one["failed_at_s"])
        output = (folder / "logs" / "agent.log").read_text(errors="replace")
    if len(told) < num_processes:
        return [_silent(num_processes, len(told), failed, ended, output, timeout_s)]
    return answers(hardware.device, told)


def _rank(path):
    return int("".join(filter(str.isdigit, path.name)))


def _run_ranks(folder, device, num_processes, limit_s):
    """Exit code of the agent, None if it took longer than limit_s."""
    env = os.environ | flight_recorder.variables(num_processes) | {"OMP_NUM_THREADS": "1"}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    with open(folder / "logs" / "agent.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.launch.agent", str(folder), str(num_processes), "bench.launch.probe"],
            cwd=REPO,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _silent(num_processes, num_told, failed, ended, output, timeout_s):
    """Why not every rank answered, as far as it is known."""
    if failed:
        why, hint = f"rank {failed[0]['rank']}: {failed[0]['message'][:300]}", failed[0]["hint"]
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        last = next((line for line in lines if TELLING.search(line)), lines[-1] if lines else "they said nothing")
        why = (
            f"the processes {'did not end in time' if ended is None else f'ended with exit code {ended}'}: {last[:300]}"
        )
        hint = "the same with more words: NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL ./run.sh doctor"
    if "timed out" in why.lower() or "timeout" in why.lower():
        hint = f"is a firewall, a dead rank or a broken NVLink between them? --timeout-s={2 * timeout_s:g} waits longer"
    return Check("collective", "fail", f"{num_told} of {num_processes} ranks answered; {why}", hint)


def answers(device, told):
    """What the ranks told, in rank order -> list of Check."""
    first, num_ranks = told[0], len(told)
    facts = first["torch_facts"]
    software = f"torch {facts['torch']}"
    if device == "cuda":
        software += f", CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}"
    found = [Check("software", "ok", software)]
    if first["all_reduce_ms"] is None:
        found.append(Check("collective", "ok", "one process: nobody to talk to"))
    else:
        slowest_ms, num_bytes = max(one["all_reduce_ms"] for one in told), first["num_bytes"]
        # Bus bandwidth of an all-reduce, 2 (n - 1) / n of the bytes over the time: nccl-tests, PERFORMANCE.md
        gib_per_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / GIB / (slowest_ms / 1e3)
        sum_words = f"all-reduce of {num_bytes / MIB:g} MiB {slowest_ms:.2f} ms, {gib_per_s:.3g} GiB/s a rank"
        found.append(Check("collective", "ok", f"{num_ranks} ranks agree; {sum_words}"))
    rates = [one["matmul_tflop_per_s"] for one in told]
    return [*found, speed(rates)] if device == "cuda" else found


def speed(rates):
    """TFLOP/s of a matrix multiplication on each GPU, all at once: the slowest sets everybody's pace."""
    middle = statistics.median(rates)
    slow = [f"GPU {rank} {rate:.0f}" for rank, rate in enumerate(rates) if rate < (1 - SLOW_FRAC) * middle]
    if slow:
        remedy = "race on the others (CUDA_VISIBLE_DEVICES), or look at its temperature, power and PCIe slot"
        return Check("gpu speed", "warn", f"{', '.join(slow)} TFLOP/s bfloat16, the median {middle:.0f}", remedy)
    return Check("gpu speed", "ok", f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s bfloat16")


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh doctor",
        description="Is this machine fit to measure?  A table of checks, each failure with its remedy.",
        epilog="Exit codes: 0 fit, perhaps with warnings; 1 a check failed; 2 wrong use.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as for run, e.g. hardware=cpu hardware.num_processes=4"
    )
    parser.add_argument(
        "--json", action="store_true", help="for programs: {fit, checks: [{name, status, found, remedy}]}"
    )
    parser.add_argument("--quick", action="store_true", help="only what every race checks: no processes are started")
    parser.add_argument(
        "--timeout-s", type=float, default=PROBE_TIMEOUT_S, help="of one collective (default %(default)g)"
    )
    return parser
