"""Make this folder a project.  ./run.sh init      writes a model, an optimizer, an experiment and a track to start from

Writes conf/, my_model.py and my_optim.py into the current folder; existing files are not changed.
"""

import os
import shlex
from pathlib import Path

from bench.base import atomic, escape
from bench.base.paths import INSTALLED, REPO, working_folder
from bench.cli import arguments

STARTER = Path(__file__).with_name("starter")
NEXT = """
next:  ./run.sh run model=mine track=free goal.num_steps=20      a short run of it
       ./run.sh race A= B=model=mine track=free goal.num_steps=40 n=2      is it faster than the default?
       ./run.sh race A= B=optim=mine track=free n=3      is its loss lower?
       ./run.sh study optim=adamw,mine tune=optim.lr track=free goal.val_every_steps=10 budget=20m      and both tuned?
       ./run.sh table      what was run here; records are in results/, data in .data/
the guide:  {guide}"""


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 usage error."""
    _parser().parse_args(argv)
    folder = Path(working_folder()).absolute()
    if folder.is_relative_to(REPO):
        raise ValueError(f"{folder}: lies in the harness's own folder: create one outside of {REPO} and cd into it")
    for source in sorted(path for path in STARTER.rglob("*") if path.suffix in (".py", ".yaml")):
        name = source.relative_to(STARTER)
        if os.path.lexists(folder / name):
            print(f"    kept  {name}, which was there")
            continue
        text = source.read_text()
        try:
            atomic.inner_folder(folder, *name.parts[:-1])
        except OSError as error:  # a link that came with the folder
            raise ValueError(f"{name}: cannot be written: {error.filename}: {error.strerror}") from None
        atomic.write_out(folder / name, escape.installed(text) if INSTALLED else text, "the file")
        print(f"   wrote  {name}")
    following = NEXT.format(guide=REPO / "docs" / "own.md")
    print(following if INSTALLED else following.replace("./run.sh", shlex.quote(str(REPO / "run.sh"))))
    return 0


def _parser() -> arguments.Parser:
    return arguments.Parser("./run.sh init", main=main)
