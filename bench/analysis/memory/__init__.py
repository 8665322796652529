"""Turns memory snapshots of torch's CUDA allocator into pages that open offline, without importing torch.

The format is that of torch.cuda.memory._snapshot() (its docstring describes it): "segments" from cudaMalloc, divided
into blocks, and "device_traces", the allocator's actions, oldest first.  Snapshots of this project also have
"speedrun": rank, window and marks.
"""
