"""A whole measurement: the ranks of bench/passport/measure/rank.py, started and followed -> a passport."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import utc
from bench.config.schema import HardwareConfig
from bench.launch import probe, ranks
from bench.machine import check_host, gpus
from bench.passport import kept

LIMIT_S = 140.0  # of measuring
WHOLE_S = 155.0  # from the start, processes' imports too: the case under way and the end stay under three minutes
START_S = 90.0  # for the processes to import torch, also from a cold disk
LOOK_EVERY_S = 0.2
RANK = (sys.executable, "-m", "bench.passport.measure.rank")
ENVIRONMENT = ("cpu_model", "num_cpus", "memory_gib", "driver", "governor")


class NotMeasured(RuntimeError):
    """The ranks did not answer: a sentence that says why and what to try."""


def measure(
    hardware: HardwareConfig, env: dict, say: Callable[[str], object], limit_s: float = LIMIT_S
) -> kept.Passport:
    """hardware: resolved; env: environment(); say(): is given "12/58 copy 32.0 MiB" from time to time.

    limit_s: of measuring; the whole takes less than three minutes anyhow.  Raises NotMeasured.
    """
    foreign_cores, started_s, at = check_host.sample_foreign_cores(), time.perf_counter(), utc.now()
    cpus = env["num_cpus"]
    num_ranks = min(2, cpus) if hardware.device == "cpu" else hardware.num_processes
    asked = {"device": hardware.device, "num_threads": sorted({1, cpus}), "limit_s": limit_s}
    answers = _answers(hardware, num_ranks, asked | {"until_s": time.monotonic() + WHOLE_S}, say)
    first = answers[0]
    if not first["figures"]:
        raise NotMeasured(f"its processes took more than {WHOLE_S:.0f} s to start: end other programs, and try again")
    return {
        "schema_version": kept.SCHEMA_VERSION,
        "at": at,
        "took_s": time.perf_counter() - started_s,
        "device": hardware.device,
        "environment": {name: env[name] for name in ENVIRONMENT} | first["torch_facts"],
        "foreign_cpu_cores": foreign_cores,
        "devices": _devices(hardware, env, answers),
        "collectives": first["collectives"],
        "omitted": first["omitted"],
    }


def _devices(hardware, env, answers):
    if hardware.device == "cpu":
        named = [(kept.cpu_id(env), env["cpu_model"])]
    else:
        named = [(gpu["uuid_hash"], gpu["name"]) for gpu in gpus.of_run(env["gpus"], hardware)]
    return [
        {"id": id, "name": name, "index": index}
        | {"figures": answers[index]["figures"], "under_load": answers[index]["under_load"]}
        for index, (id, name) in enumerate(named)
    ]


def _answers(hardware, num_ranks, asked, say):
    env = ranks.environment(
        dataclasses.replace(hardware, num_processes=num_ranks, num_threads=asked["num_threads"][-1])
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "asked.json").write_text(json.dumps(asked))
        with (
            open(folder / "logs" / "agent.log", "wb") as log,
            ranks.agent(folder, num_ranks, env, log, RANK) as process,
        ):
            _follow(process, folder / "progress", START_S + 1.5 * asked["limit_s"], say)
            exit_code = process.poll()
        answers = [json.loads(path.read_text()) for path in folder.glob("rank*.figures.json")]
        if len(answers) == num_ranks:
            return sorted(answers, key=lambda answer: answer["rank"])
        failed = [json.loads(path.read_text()) for path in folder.glob("logs/rank*.failure.json")]
        output = (folder / "logs" / "agent.log").read_text(errors="replace")
    check = probe.no_answer(num_ranks, len(answers), failed, exit_code, output, WHOLE_S)
    raise NotMeasured(f"{check.found}: ./run.sh doctor says more")


def _follow(process, progress, limit_s, say):
    """Until the process has ended or limit_s are over; says each line of the file once."""
    until_s, num_said = time.perf_counter() + limit_s, 0
    while True:
        has_ended = process.poll() is not None or time.perf_counter() > until_s
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[num_said:]:
            say(line)
        num_said = len(lines)
        if has_ended:
            return
        time.sleep(LOOK_EVERY_S)
