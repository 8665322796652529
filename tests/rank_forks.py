"""A function on several ranks: forks of one process that has imported and prepared what they need: most of their work.

    ranks_of("test_reducer", 4, folder)    ->    [what rank 0 answered, ...]

The module has rank_program(prepared), whose answer is kept by torch.save(), and prepared(world_size), which is called
once before the fork.  In a rank the variables are those of torchrun.  Warnings are errors.
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

    words = [sys.executable, "-W", "error", __file__, module, str(world_size), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    try:
        said, _ = process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 0, said
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
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    gc.freeze()
    ranks = {_fork(module, prepared, rank, folder) for rank in range(world_size)}
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            os.killpg(0, signal.SIGKILL)  # the others wait for it
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
