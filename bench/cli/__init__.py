"""The verbs of ./run.sh, one a file: parse, call, print, exit code."""
