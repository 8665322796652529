"""Memory snapshots of torch's CUDA allocator -> pages that open offline.  No torch.

The format is what torch.cuda.memory._snapshot() gives (its docstring describes it): "segments" that cudaMalloc gave,
cut into blocks, and "device_traces", what the allocator did, oldest first.  Ours has "speedrun" too: rank, window,
marks.
"""
