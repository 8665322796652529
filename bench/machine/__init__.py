"""Where a run happens: code, packages, CPUs, GPUs, processes, and whether they are fit to measure."""
