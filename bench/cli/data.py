"""Fetch, make or show data.  ./run.sh data fetch NAME | make NAME | show [NAME | FILE.bin ...]

NAME is a file of conf/data/ without .yaml.  Its settings follow as data.KEY=VALUE.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from bench.base import text_table
from bench.base.paths import user_path
from bench.base.units import format_bytes
from bench.cli import arguments
from bench.config import groups, schema
from bench.data import shards
from bench.data.sources import datasets

Facts = dict[str, Any]  # facts of a dataset or file, as --json prints them

NUM_FIRST_TOKENS = 8
VERBS = {
    "fetch": "download what is missing, and check all of it",
    "make": "make it on this machine if it is missing, and check it",
    "show": "what is here, checked; of a .bin file also its header and first tokens",
}


def main(argv: list[str]) -> int:
    """Exit codes: 0 fine, 1 data are missing or damaged, 2 usage error."""
    args = _parser().parse_args(argv)
    names = [word for word in args.arguments if not word.startswith("data.")]
    overrides = [word for word in args.arguments if word.startswith("data.")]
    choices = groups.choices("data")
    try:
        if len(names) != 1 and (args.verb != "show" or (overrides and not names)):
            raise ValueError(f"{' '.join([args.verb, *args.arguments])}: name one of {', '.join(choices)}")
        if args.verb == "show" and not names:
            output: Any = [_listed(name) for name in choices]
            text = text_table.render((), map(_row, output))
        elif args.verb == "show":
            output = [_shown(name, overrides) for name in names]
            text = "\n\n".join(map(_lines, output))
        else:
            name, fetch = names[0], args.verb == "fetch"
            data = data_config(name, overrides)
            if data.source == "hub" and not fetch:
                raise ValueError(f"data make {name}: downloaded, not made: use ./run.sh data fetch {name}")
            output = _facts(name, datasets.prepare(data, fetch=fetch, say=_say))
            text = _lines(output)
    except ValueError as error:
        print(f"data: {error}", file=sys.stderr)
        return 1 if isinstance(error, shards.CheckFailed) else 2
    print(json.dumps(output, indent=1) if args.json else text)
    return 0


def data_config(name: str, overrides: Sequence[str] = ()) -> schema.DataConfig:
    """Returns the DataConfig of conf/data/NAME.yaml and data.KEY=VALUE. A track's settings would change no file."""
    if name not in groups.choices("data"):
        problem = "a file, and not a .bin of tokens" if user_path(name).is_file() else "unknown data"
        raise ValueError(f"{name}: {problem}; choose from {', '.join(groups.choices('data'))}, or show a .bin file")
    values = yaml.safe_load(groups.path_of("data", name).read_text())
    for override in overrides:
        key, equals, value = override.removeprefix("data.").partition("=")
        if not equals:
            raise ValueError(f"{override}: a setting is data.KEY=VALUE")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{override}: the value is not yaml: quote it, for the shell and for yaml") from error
    return schema.build(schema.DataConfig, {"seq_len": 1, "batch_tokens": 1} | values, "data.")


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh data", main=main)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, about in VERBS.items():
        child = verbs.add_parser(verb, help=about, description=about)
        child.add_argument("arguments", nargs="*", metavar="NAME or data.KEY=VALUE")
        child.flag("--json", help="print JSON, for programs")
    return parser


def _shown(name: str, overrides: Sequence[str]) -> Facts:
    if not (name.endswith(".bin") or os.sep in name):
        return _facts(name, datasets.find(data_config(name, overrides), _say))
    if not (path := user_path(name)).exists():
        raise ValueError(f"{name}: there is no such file; name one, or one of {', '.join(groups.choices('data'))}")
    shard = shards.check(path)
    return {
        "file": str(path),
        "magic": shards.MAGIC,  # check() has refused everything else
        "version": shards.VERSION,
        "num_tokens": shard.num_tokens,
        "num_bytes": shard.num_bytes,
        "sha256": shards.sha256(path),
        "max_token": shards.max_token(shard),
        "first_tokens": shard.tokens()[:NUM_FIRST_TOKENS].tolist(),
    }


def _listed(name: str) -> Facts:
    """Returns a row of the list of all data: what exists, or what to do about it."""
    try:
        return {"there": True} | _shown(name, ())
    except ValueError as error:
        return {"name": name, "there": False, "why": str(error)}


def _facts(name: str, dataset: datasets.Dataset) -> Facts:
    facts = {"name": name, "vocab_size": dataset.vocab_size}
    for split, files in (("train", dataset.train), ("val", dataset.val)):
        facts[split] = [
            {"file": str(file.path), "num_tokens": file.num_tokens, "num_bytes": file.num_bytes}
            | {"sha256": file.sha256, "max_token": file.max_token}
            for file in files
        ]
    return facts


def _row(row: Facts) -> tuple[str, str]:
    """Returns (the dataset's name, what exists or what to do about it)."""
    if not row["there"]:
        return row["name"], row["why"]
    num_files = len(row["train"]) + len(row["val"])
    num_bytes = sum(file["num_bytes"] for file in row["train"] + row["val"])
    train_tokens = sum(file["num_tokens"] for file in row["train"])
    return row["name"], f"{num_files} shards, {train_tokens:,} train tokens, {format_bytes(num_bytes)}, checked"


def _lines(facts: Facts) -> str:
    """Returns everything about a dataset or file as text for a person."""
    if "magic" in facts:
        return text_table.render((), ((key, str(value)) for key, value in facts.items()))
    num_train, num_val = len(facts["train"]), len(facts["val"])
    header = f"{facts['name']}: vocab_size {facts['vocab_size']}, {num_train} train and {num_val} val shards, checked"
    cells = [
        [split, f"{file['num_tokens']:,}", format_bytes(file["num_bytes"])]
        + [str(file[key]) for key in ("max_token", "sha256", "file")]
        for split in ("train", "val")
        for file in facts[split]
    ]
    columns = ["split", "tokens", "size", "largest token", "sha256", "file"]
    return f"{header}\n{text_table.render(columns, cells, [False, True, True, True, False, False])}"


def _say(text: str) -> None:
    print(f"data: {text}", file=sys.stderr, flush=True)
