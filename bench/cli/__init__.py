"""The commands: one file each, which parses arguments, calls the harness, prints and returns an exit code."""
