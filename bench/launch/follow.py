"""A node of a run that spans a SLURM allocation:  python -m bench.launch.follow WORD...   started by srun, once a node.

WORD: the run's overrides, hardware.rendezvous among them.  Prints only why it cannot take part.
"""

import sys

from bench.launch import joining
from bench.launch.prepare import prepare
from bench.machine.signals import Interrupted


def main(overrides):
    """Exit code: 0 where the run is complete, 2 where this node cannot take part."""
    try:
        return joining.follow_nodes(prepare(overrides, say=lambda text: None, check_own=False))
    except Interrupted:
        return 1
    except ValueError as error:
        print(f"node {joining.slurm_node()}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
