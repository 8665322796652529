"""The machine of a run: its code, packages, CPUs, GPUs and processes, and whether they are ready to benchmark."""
