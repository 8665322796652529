"""Memory snapshots of torch's CUDA allocator -> pages that open offline.  No torch.

    from bench.snapshot import load, of_snapshot
    html = of_snapshot(load("memory/steps_rank0.pickle"), "steps 11 to 13, rank 0")

The format is what torch.cuda.memory._snapshot() gives (its docstring describes it): "segments" that cudaMalloc gave, cut
into blocks, and "device_traces", what the allocator did, oldest first.  Ours has "speedrun" besides: rank, window, marks.
"""

from bench.memory.snapshot.page import of_snapshot
from bench.memory.snapshot.pickles import load

__all__ = ["load", "of_snapshot"]
