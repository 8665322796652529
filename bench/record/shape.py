"""The types of a record: Record for the type checker, and run.schema.json converted to a type for msgspec.

Every reader checks a record against the latter, which takes microseconds: whether the fields are present and have the
right types, also inside sections.  Patterns and ranges are only checked by ./run.sh verify.
"""

import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

SCHEMA = Path(__file__).with_name("run.schema.json")
KINDS: dict[str, Any] = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}
FREE: dict[str, Any] = {"array": list, "object": dict[str, Any]}  # if the schema does not say what is inside

Section = dict[str, Any]  # its fields are in run.schema.json; imported logs and older records lack some of them
CALIBRATION = "calibration"  # the race_id of the runs of ./run.sh calibrate, which are in no race
Facts = Mapping[str, Any]  # a record, or the sections of one that a function reads


class ConfigShape(TypedDict):
    """A part of what bench.config.identity.shape() returns, in a line of the ledger."""

    shape_id: str
    floats: list[float]


class Record(TypedDict):
    """run.json.  None means unknown.  run.schema.json says what the fields mean; a test compares it with this class."""

    schema_version: int
    run_id: str
    name: str
    track: str
    deviations: list[str]
    status: Literal["running", "complete", "failed", "aborted", "stopped", "preempted"]
    validity: Literal["valid", "suspect", "invalid"]
    validity_reasons: list[str]
    failure: Section | None
    started_at: str | None
    heartbeat_at: str | None
    ended_at: str | None
    launcher: Section | None
    command: list[str]
    seed: int | None
    config_id: str | None
    comparability_id: str | None
    session_id: str | None
    world_size: int | None
    model: Section
    optim: str
    instruments: Section
    timing_protocol: Section
    code: Section
    data: Section
    environment: Section
    measured: Section
    metrics: Section
    artifacts: list[Section]
    provenance: NotRequired[Literal["imported"] | None]
    imported: NotRequired[Section | None]
    launched_by: NotRequired[Section | None]
    nodes: NotRequired[list[Section] | None]
    goal: NotRequired[Section | None]
    hardware: NotRequired[Section | None]
    foreign_programs: NotRequired[list[Section]]  # {"name", "cpu_cores"} of the other programs that used most CPU
    exporters: NotRequired[Section | None]
    script: NotRequired[Section | None]
    preflight: NotRequired[list[Section] | None]
    audit: NotRequired[Section | None]
    redacted: NotRequired[list[str] | None]
    not_kept: NotRequired[dict[str, str] | None]
    referee: NotRequired[Section | None]
    look: NotRequired[Section | None]
    costs: NotRequired[Section | None]
    skew: NotRequired[Section | None]
    beside: NotRequired[Section | None]
    segments: NotRequired[list[Section] | None]
    race: NotRequired[Section | None]
    sweep: NotRequired[Section | None]
    ledger_sha256: NotRequired[str | None]
    doubts: NotRequired[list[Section]]  # "instrument", "doubt"
    warnings: NotRequired[list[Section]]
    instrument_summaries: NotRequired[Section | None]


def world_sizes(run: Facts) -> list[int | None]:
    """Returns the number of ranks of each of the run's segments, in order; of the run, if it has none."""
    segments: list[Section] = run.get("segments") or [{}]
    return [segment.get("world_size", run.get("world_size")) for segment in segments]


def schema() -> Section:
    """Reads run.schema.json."""
    document: Section = json.loads(SCHEMA.read_text())
    return document


@functools.cache
def record() -> Any:
    """Returns the type of a whole record, for json_file.read()."""
    whole = schema()
    return _object("record", whole, whole["required"])


def _object(name: str, part: Section, required: Collection[str] = ()) -> Any:
    """Returns a TypedDict.  Inside sections no field is required, as imported logs and older records lack some."""
    fields = {key: _kind(key, inner) for key, inner in part["properties"].items()}
    fields = {key: kind if key in required else NotRequired[kind | None] for key, kind in fields.items()}
    return TypedDict(name, fields)  # type: ignore[operator]  # created at run time: the type checker cannot see it


def _kind(name: str, part: Section) -> Any:
    """Converts a part of the schema to a type."""
    if "enum" in part:
        return Literal[tuple(part["enum"])]
    if "anyOf" in part:
        return _any([_kind(name, other) for other in part["anyOf"]])
    kinds = part.get("type", [])
    return _any([_of(kind, name, part) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _any(kinds: list[Any]) -> Any:
    return functools.reduce(lambda left, right: left | right, kinds) if kinds else Any


def _of(kind: str, name: str, part: Section) -> Any:
    if kind == "object" and part.get("properties"):
        return _object(name, part)
    if kind == "object" and isinstance(part.get("additionalProperties"), dict):
        return dict.__class_getitem__((str, _kind(name, part["additionalProperties"])))
    if kind == "array" and "items" in part:
        return list.__class_getitem__(_kind(name, part["items"]))
    return (KINDS | FREE)[kind]
