"""Where a run happens: code, packages, CPUs, GPUs, processes, and whether they are quiet enough to benchmark."""
