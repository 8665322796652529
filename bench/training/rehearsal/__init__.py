"""What a GPU would run, compiled for an H100 on a machine without one: `./run.sh doctor --rehearse-gpu`."""
