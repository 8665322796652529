"""bench/base/reading: what is read is a plain file of bounded size, depth and numbers, or one sentence."""

import os
import shutil
import time
from types import UnionType
from typing import Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
import pytest
from fuzzing import BOMB

from bench.analysis.memory import pickles
from bench.analysis.trace import events, source
from bench.base.reading import json_file, plain_file, yaml_file
from bench.base.reading.damage import Damaged, Missing, reading_record
from bench.record import ledger, shape


@pytest.fixture(params=["pipe", "device", "folder", "loop"])
def odd(request, tmp_path):
    path = tmp_path / "odd"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if request.param == "device" else path)
    return path


def test_only_a_regular_file_is_read(odd):
    for read in (plain_file.content, plain_file.text, json_file.read, yaml_file.read):
        with pytest.raises(Damaged, match=f"{odd}: cannot be read"):
            read(odd)
    with pytest.raises(Damaged), plain_file.lines(odd):
        pass


def test_a_file_that_is_not_there_is_missing_and_one_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(Missing):
        plain_file.content(tmp_path / "none")
    for name, num_bytes, why in (
        ("large", 20 * 2**20, "more than 16,777,216 are not read"),
        ("sparse", 5 * 2**30, "most of which are a hole"),
    ):
        with open(tmp_path / name, "wb") as file:
            file.truncate(num_bytes)
        with pytest.raises(Damaged, match=why):
            json_file.read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 50_000, "nested more than 64 deep"),
        ("[" * 66 + "]" * 66, "nested more than 64 deep"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested more than 64 deep"),
        ('{"a": 1' + "0" * 400 + "}", "a whole number of more than 30 digits"),
        ('{"a": [1e400]}', "a number that is not finite"),
        ("NaN", "a number that is not finite"),
        ('"' + '\\"' * 100_000, "not valid JSON"),
        ('{"seed": "7"}', "x, line 3: seed: expected int, got str"),
        ("[1]", "expected object, got array"),
    ],
)
def test_json_is_bounded_and_typed_and_the_field_is_named(text, sentence):
    started_s = time.monotonic()
    with pytest.raises(Damaged, match=sentence):
        json_file.parsed(text, "x, line 3", _Seed if "seed" in text else dict[str, object])
    assert time.monotonic() - started_s < 5


class _Seed(TypedDict):
    seed: int


def test_json_that_is_well_formed_is_kept_with_keys_that_no_type_has():
    text = '{"seed": 7, "more": ["' + "[" * 200 + '", {"sha256": "' + "0" * 64 + '"}, 0.1]}'
    assert json_file.parsed(text, "x", _Seed) == {"seed": 7, "more": ["[" * 200, {"sha256": "0" * 64}, 0.1]}
    assert json_file.parsed('"\\udcff"', "x") == "\udcff"  # of a path that is not UTF-8, as our own records have it


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        "- " * 50_000,
        "a: &a [1]\nb: &b [*a, *a]\n<<: *b",
        "&a [*a]",
        "a: " + "1:" * 50_000,
        "a: !!python/object/apply:os.system [id]",
        "a: !!timestamp x",
        "a: 2001-99-99",
        "? [a]\n: b",
        BOMB,
    ],
)
def test_yaml_that_multiplies_nests_or_runs_is_refused_at_once(text):
    started_s = time.monotonic()
    with pytest.raises(Damaged, match="config.yaml: is not valid YAML of plain settings"):
        yaml_file.parsed(text, "config.yaml")
    assert time.monotonic() - started_s < 5


def test_yaml_of_settings_with_an_alias_is_read():
    assert yaml_file.parsed("a: &id001 [1, 2]\nb: *id001\nc: 1e-3\n", "x") == {"a": [1, 2], "b": [1, 2], "c": "1e-3"}


def test_what_damage_breaks_inside_is_one_sentence_with_the_place_in_the_code():
    with (
        pytest.raises(Damaged, match=r"runs/x: the record lacks something .*KeyError.*test_reading.py:\d+"),
        reading_record("runs/x"),
    ):
        {}["status"]


def test_the_type_of_a_record_is_its_schema():
    schema, fields = shape.schema(), shape.record().__annotations__
    assert set(fields) == set(schema["properties"])
    assert shape.record().__required_keys__ == shape.Record.__required_keys__ == set(schema["required"])
    checked = get_type_hints(shape.Record)
    later = {"doubts", "warnings", "instrument_summaries", "foreign_programs"}  # not in the first records
    assert set(checked) - set(fields) == later
    for name, kind in fields.items():
        assert kinds(checked[name]) == kinds(kind), name


def kinds(hint):
    """The plain types that a field may have: {str, NoneType}, {list}, ..."""
    if get_origin(hint) is Literal:
        return {type(literal) for literal in get_args(hint)}
    if get_origin(hint) in (Union, UnionType, NotRequired):
        return set().union(*map(kinds, get_args(hint)))
    return {dict if is_typeddict(hint) else get_origin(hint) or hint}


def test_a_ledgers_last_line_without_an_end_costs_its_length_and_blank_lines_are_no_lines(tmp_path):
    ledger.append(tmp_path, "start", run="t/1")
    path = tmp_path / ledger.NAME
    path.write_bytes(path.read_bytes() + b"\n\n\n")
    ledger.append(tmp_path, "end", run="t/1", status="complete")
    assert ledger.read(tmp_path).faults == []
    with open(path, "ab") as file:
        file.write(b"x" * 20_000_000)
    started_s = time.process_time()
    ledger.append(tmp_path, "start", run="t/2")
    assert time.process_time() - started_s < 5
    assert list(ledger.read(tmp_path).runs) == ["t/1", "t/2"]


def test_a_string_without_an_end_and_a_moment_without_bound_are_read_in_linear_time():
    started_s = time.process_time()
    assert source._end_of_array(b'{"name":"' + b'\\"' * 2_000_000) is None
    assert source._end_of_array(b'{"name":"a\\"]"}]') == 15
    assert time.process_time() - started_s < 5
    times_ns = events.nanoseconds([msgspec.Raw(b"1.5"), msgspec.Raw(b"1" + b"0" * 400)])
    assert (times_ns[0], times_ns[1]) == (1500, events.BAD)


def test_a_snapshot_whose_numbers_have_no_bound_or_whose_devices_share_a_list_is_refused():
    def refused(sentence, segments=(), traces=()):
        with pytest.raises(ValueError, match=sentence):
            pickles.checked({"segments": list(segments), "device_traces": list(traces)})

    refused("segment 0: total_size: expected int <=", [{"total_size": 10**400, "blocks": []}])
    refused("segment 0: device: expected int, got str", [{"total_size": 1, "device": "x", "blocks": []}])
    shared = [{"action": "alloc", "size": 1}]
    refused("several devices share one list", traces=[shared, shared])


def test_a_folder_that_is_removed_while_its_neighbours_are_listed_holds_nothing(tmp_path):
    for name in ("a/b", "c/d"):
        (tmp_path / name).mkdir(parents=True)
    found = []
    for entry in plain_file.entries_below(tmp_path):
        found.append(entry.name)
        if entry.name == "b":
            shutil.rmtree(tmp_path / "a")
        if entry.name == "d":
            shutil.rmtree(tmp_path / "c")
            (tmp_path / "c").touch()
    assert sorted(found) == ["a", "b", "c", "d"]
    with pytest.raises(FileNotFoundError):
        list(plain_file.entries_below(tmp_path / "gone"))
