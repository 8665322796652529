"""What becomes of each hack of tests/hacks.py in a search: by which stage it fell, and what it cost.

Exit code 1: one was kept, or did harm.
"""

import os
import tempfile
import time
from pathlib import Path


def main(*names):
    """Prints a line a hack, and how many were kept.  With "models" first, the hacks are code of models."""
    import hacks

    known, names = (hacks.OF_MODELS, names[1:]) if names[:1] == ("models",) else (hacks.HACKS, names)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]}: choose from {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        os.environ |= {"SPEEDRUN_RESULTS": str(results), "SPEEDRUN_CWD": folder}
        is_script, num_harmful = known == hacks.HACKS, 0
        search = hacks.search_in(results, Path(folder)) if is_script else hacks.search_of_models(results)
        for name in names or known:
            before, began_s = (search.folder / "ledger.jsonl").read_bytes(), time.monotonic()
            search, decided = hacks.submitted(search, name, Path(folder))
            harms = hacks.harm(search, before)
            num_harmful += bool(harms)
            line = f"{name:36} {decided['decision']:9} {time.monotonic() - began_s:4.0f} s  {decided['why'][:110]}"
            print(line + "".join(f"\n    HARM: {sentence}" for sentence in harms), flush=True)
    print(f"{len(names or known)} hacks, {len(search.kept)} kept, {num_harmful} did harm")
    return 1 if num_harmful else 0
