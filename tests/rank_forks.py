"""Runs a function on several ranks, which are forks of one process that has done the imports and the preparation.

    ranks_of("test_reducer", 4, folder)    ->    [result of rank 0, ...]

The module defines prepared(world_size), which is called once before the fork, and rank_program(prepared), whose result
is saved by torch.save().  Ranks have the environment variables of torchrun.  Warnings are errors.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parent.parent
ENDS_WITHIN_S = 240


def ranks_of(module, world_size, folder):
    import torch

    command = [sys.executable, "-W", "error", __file__, module, str(world_size), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    try:
        output, _ = process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 0, output
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.communicate()
    return [torch.load(_saved(folder, rank)) for rank in range(world_size)]


def _saved(folder, rank):
    return Path(folder, f"rank{rank}.pt")


def _main(name, world_size, folder):
    module = import_module(name)
    prepared = module.prepared(world_size)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    gc.freeze()
    ranks = {_fork(module, prepared, rank, folder) for rank in range(world_size)}
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            os.killpg(0, signal.SIGKILL)  # the other ranks would wait for it
    return 0


def _fork(module, prepared, rank, folder):
    if pid := os.fork():
        return pid
    with forked.ending():
        import torch

        os.environ["RANK"] = str(rank)
        torch.set_num_threads(1)
        torch.save(module.rank_program(prepared), _saved(folder, rank))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
