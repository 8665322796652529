"""Compiles what a GPU would run, on a machine without one: `./run.sh doctor --rehearse-gpu`."""
