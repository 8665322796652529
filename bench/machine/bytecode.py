"""Tells which bytecode is not what its source compiles to, run by the interpreter of that bytecode for surroundings.py.

It reads a list of .pyc files, in JSON, and prints the list of the forged ones.  It needs only what Python 3.8 has.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import sys

HEADER_BYTES = 16  # of a .pyc: magic number, flags, time and size of the source


def is_forged(path: str) -> bool:
    """Returns whether Python would use this bytecode, and it is not its source's."""
    try:
        source = importlib.util.source_from_cache(path)
        with open(path, "rb") as file:
            content = file.read()
        with open(source, "rb") as file:
            text, facts = file.read(), os.fstat(file.fileno())
        flags, time_s, num_bytes = (int.from_bytes(content[at : at + 4], "little") for at in (4, 8, 12))
        if not flags and (time_s, num_bytes) != (int(facts.st_mtime) & 0xFFFFFFFF, facts.st_size & 0xFFFFFFFF):
            return False
        level = int(path.rpartition(".opt-")[2][:-4]) if ".opt-" in os.path.basename(path) else 0
        expected = compile(text, source, "exec", dont_inherit=True, optimize=level)
        return bool(marshal.loads(content[HEADER_BYTES:]) != expected)  # which compares all but file names
    except (FileNotFoundError, NotImplementedError):  # without its source it is not used
        return False
    except (OSError, SyntaxError, ValueError, EOFError, TypeError):
        return True


if __name__ == "__main__":
    print(json.dumps([path for path in json.load(sys.stdin) if is_forged(path)]))
