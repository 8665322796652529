"""Arguments --key=value over the script's globals, as its exec() of this file makes them."""

import sys
from ast import literal_eval

for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    assert key in globals(), f"unknown key {key}"
    try:
        globals()[key] = literal_eval(value)
    except (ValueError, SyntaxError):
        globals()[key] = value
