"""Eight GPUs that are not there, for whole commands: processes started with Gpus.env find them.

torch      a CPU build gets a device "cuda" with the CPU's arithmetic (device.cpp, cuda.py), nccl that is gloo
NVML       the real nvidia-ml-py on a library of our own (nvml.c)
both       read one file, a line for each GPU (gpus.h): Gpus.set() changes what happens to a GPU, also during a run

What differs from a GPU, beside every time: nothing is asynchronous, so an error is raised where it happens and an event
is the host's clock; torch.compile is aot_eager, no Triton; a trace has no kernels; products and copies of doctor's and
passport's sizes are not computed; the allocator has no fragments.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import real_runs

FOLDER = Path(__file__).resolve().parent
USUAL = {
    "power_mw": 500_000,
    "energy_mj": 9_000_000_123,
    "clock_mhz": 1755,
    "max_clock_mhz": 1980,
    "temp_c": 61,
    "reasons": 0,
    "limit_mw": 700_000,
    "lost": 0,  # off the bus: NVML says so, and CUDA calls fail
    "denied": 0,  # NVML may not read its utilisation
    "slow_ms": 0,  # that a call of NVML takes
    "num_processes": 0,  # on it, that are none of ours
    "memory_mib": 81_559,
    "others_mib": 600,  # that is not ours
    "ecc_uncorrected": 0,
    "mig": 0,
    "xid": 0,  # of an event that NVML gives
    "cuda_error": 0,  # cudaError_t that every kernel of it ends with
    "nccl_error": 0,
    "hang": 0,  # its kernels never end
    "capability": 90,
}
SMALL = ["model/size=nano", "model.num_layers=1", "model.width=32", "model.num_heads=1", "data.seq_len=64"]
SHORT = ["goal.num_steps=6", "goal.val_tokens=1024", "goal.val_every_steps=3", "data.batch_tokens=512"]
ON_GPUS = ["track=free", "hardware=cuda", *SMALL, *SHORT]


def write(path, gpus):
    """Replaces the file that both libraries read.  gpus: {UUID: {key: number}}."""
    lines = (
        f"{uuid} {' '.join(f'{key}={number}' for key, number in (USUAL | gpu).items())}\n" for uuid, gpu in gpus.items()
    )
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    new.replace(path)


def compiled(name, *options, compiler=("gcc", "cc")):
    """Compiles a source of this folder once with these options; the library stays among temporary files -> its path."""
    source, program = FOLDER / name, next(filter(None, map(shutil.which, compiler)), None)
    if program is None or not sys.platform.startswith("linux"):
        pytest.skip(f"a stand-in for GPUs needs Linux and a compiler: {' or '.join(compiler)}")
    texts = [source.read_bytes(), (FOLDER / "gpus.h").read_bytes(), " ".join(options).encode()]
    room = Path(tempfile.gettempdir()) / f"speedrun-stand-in-{os.getuid()}"
    folder = room / hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    path = folder / ("libnvidia-ml.so.1" if name == "nvml.c" else "device.so")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".made")
            subprocess.run([program, "-shared", "-fPIC", "-w", source, *options, "-o", made], check=True)
            made.replace(path)
    return path


def device():
    """Returns the library of device.cpp for this torch; compiling it takes half a minute the first time."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is a build for GPUs, which have no stand-in")
    home = Path(torch.__file__).parent
    includes = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    links = [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"]
    made_for = f"-DTORCH_{re.sub(r'[^0-9a-z]', '_', torch.__version__)}"  # another torch is another library
    try:
        return compiled("device.cpp", "-std=c++20", "-O1", made_for, *includes, *links, compiler=("g++", "c++"))
    except subprocess.CalledProcessError:
        if torch.__version__.startswith("2.13."):
            raise
        pytest.skip(f"device.cpp is made for torch 2.13 and does not compile against {torch.__version__}")


class Gpus:
    """A machine with num GPUs, each as USUAL except for `changed`; folder holds its results and the GPUs' file."""

    def __init__(self, folder, num=8, **changed):
        self.results, self._path = folder / "results", folder / "gpus.txt"
        own = secrets.token_hex(6)  # two tests at once lease no GPU of each other
        self.uuids = [f"GPU-{number:08d}-aaaa-bbbb-cccc-{own}" for number in range(num)]
        self._gpus = {uuid: dict(changed) for uuid in self.uuids}
        self.set()
        self.env = {
            "STAND_IN_GPUS": str(self._path),
            "STAND_IN_DEVICE": str(device()),
            "LD_LIBRARY_PATH": str(compiled("nvml.c").parent),
            "PYTHONPATH": str(FOLDER),
            "SPEEDRUN_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "0",  # else torch ends its threads when Python has gone, and aborts
        }

    def set(self, *numbers, **changed):
        """Changes these GPUs, or all of them if none is named."""
        for uuid in [self.uuids[number] for number in numbers] or self.uuids:
            self._gpus[uuid] |= changed
        write(self._path, self._gpus)

    def command(self, *argv, timeout_s=400, **env):
        """Runs a command in the repository, as a user types it -> CompletedProcess."""
        env = real_runs.environment(self.results, **self.env, **env)
        options = {"cwd": real_runs.REPO, "capture_output": True, "text": True}
        return subprocess.run(argv, env=env, timeout=timeout_s, **options)

    def run(self, *overrides, **env):
        """Runs ./run.sh run with a small model -> (its folder, CompletedProcess)."""
        before = set(real_runs.folders(self.results))
        done = self.command("./run.sh", "run", *ON_GPUS, *overrides, **env)
        (folder,) = set(real_runs.folders(self.results)) - before
        return folder, done

    @contextlib.contextmanager
    def running(self, *overrides, **env):
        """A context in which a long run has begun its steps -> (its folder, Popen)."""
        argv = ["./run.sh", "run", *ON_GPUS, "goal.num_steps=100000", "goal.val_every_steps=100000", *overrides]
        env = real_runs.environment(self.results, **self.env, **env)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(argv, cwd=real_runs.REPO, env=env, **options)
        try:
            real_runs.wait_for(lambda: process.poll() is not None or self._has_begun())
            assert process.poll() is None, process.communicate()[0]
            yield real_runs.folders(self.results)[-1], process
        finally:
            process.kill()
            process.communicate()

    def _has_begun(self):
        return any('"eval_stop"' in path.read_text() for path in self.results.glob("*/*/events.jsonl"))
