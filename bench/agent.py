"""torchrun for one run: starts the ranks, waits, and writes how each of them ended.  python -m bench.agent FOLDER N

The same elastic agent as torchrun --standalone; called as a library, because only so does it say which rank ended
with which exit code.  Its answer is FOLDER/logs/agent.json: {"failures": [{"rank", "exit_code", "failed_at_s"}]}.
"""

import json
import logging
import os
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(folder, num_processes):
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # a laptop without network cannot look its own name up
        max_restarts=0,
        monitor_interval=0.1,
    )
    os.environ["SPEEDRUN_AGENT_PID"] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", "bench.worker", str(folder))
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "failed_at_s": failure.timestamp}
            for rank, failure in sorted(error.failures.items())
        ]
        (Path(folder) / "logs" / "agent.json").write_text(json.dumps({"failures": failures}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
