"""Where a run happens: code, packages, CPUs, GPUs, processes, and whether they are ready to benchmark."""
