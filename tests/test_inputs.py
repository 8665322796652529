"""Each verb reads and writes what the table in tests/inputs.py says, and nothing else.

Each time a sample is tried; SPEEDRUN_INPUTS_SEED=WORD draws another, and `tests/benchmarks inputs` tries every pair.
"""

import os
import random

import pytest
from benchmarks import inputs as night
from cases import slow
from inputs import BELIEVED, ELSEWHERE, PRIVATE, READS, WALK, WRITES
from walk import World

from bench.base import escape
from bench.base.reading import plain_file, yaml_file
from bench.cli import main as program
from bench.record import run_folder
from bench.web import page

CHANCE = random.Random(os.environ.get("SPEEDRUN_INPUTS_SEED", "a word"))
SLOW = ("race --resume", "referee submit")  # seconds each
QUICK = [step for step in WALK if step[0] not in SLOW]
SAMPLE = CHANCE.sample(QUICK, 60)
LONGER = [*SAMPLE[20:], *CHANCE.sample([step for step in WALK if step[0] in SLOW], 4)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with World(tmp_path_factory.mktemp("world")) as built:
        yield built


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb in SLOW)) for verb in READS])
def test_a_verb_opens_what_the_table_says_and_nothing_else(world, verb):
    assert set(world.opened(verb)) == set(READS[verb].reads)


def test_every_verb_is_in_the_table():
    assert {command.split()[0] for command in READS} | set(ELSEWHERE) == set(program.VERBS)
    assert {name for verb in READS.values() for name in verb.reads} == set(BELIEVED)


@pytest.mark.parametrize(("verb", "name", "kind", "phase"), SAMPLE[:20] + [slow(*step) for step in LONGER])
def test_an_input_that_is_anything_else_is_answered_in_words(world, verb, name, kind, phase):
    outcome = world.changed(verb, name, kind, phase)
    assert outcome is None or outcome[1] == []


@pytest.mark.parametrize("output", WRITES)
def test_what_a_record_says_does_nothing_where_it_is_shown(world, output):
    places = world.places(output)
    shown = [world.shown(output, *place) for place in CHANCE.sample(places, 5)]
    shown.append(world.shown(output, "RUN/run.json", ("run_id",)))
    assert [wrong for _, wrong in shown if wrong] == []


def test_the_page_has_the_tables_as_they_are():
    assert night.written(night.PAGE.read_text()) == night.PAGE.read_text()


# ---- what the walk must find


def test_an_input_that_the_table_lacks_is_found(world, monkeypatch):
    read = run_folder.read_raw

    def curious(folder, checked=True):
        plain_file.content(f"{folder}/config.yaml")
        return read(folder, checked)

    monkeypatch.setattr(run_folder, "read_raw", curious)
    assert set(world.opened("export")) - set(READS["export"].reads) == {"RUN/config.yaml"}


def test_an_input_that_is_read_twice_and_changes_in_between_is_found(world, monkeypatch):
    step = ("judge", "RUN/run.json", "another run's", "while")
    assert world.changed(*step)[1] == []
    monkeypatch.setattr(program, "JUDGING", ())
    assert world.changed(*step)[1] == ["read, changed, and read again (exit code 1)"]


def test_a_private_file_behind_a_link_is_found(world, monkeypatch):
    step = ("verify", "RUN/config.yaml", PRIVATE, "before")
    assert world.changed(*step) == (1, [])
    monkeypatch.setattr(yaml_file, "recorded", yaml_file.read)
    assert world.changed(*step) == (1, ["a private file is shown in the answer"])


@pytest.mark.slow
def test_a_pipe_that_is_waited_for_is_found(world, monkeypatch):
    monkeypatch.setattr("walk.WITHIN_S", 2)
    monkeypatch.setattr(plain_file, "open_now", os.open)
    assert "over 2 s" in world.changed("export", "RUN/steps.csv", "a pipe", "before")[1][0]


def test_a_record_that_is_written_on_unchecked_is_found(world, monkeypatch):
    step = ("publish", "RUN/steps.csv", "longer", "before")
    assert world.changed(*step) == (2, [])
    monkeypatch.setattr("bench.record.verification.artifacts_are_unchanged", lambda files, run: (True, ""))
    assert any("steps.csv" in wrong for wrong in world.changed(*step)[1])


@pytest.mark.parametrize(
    ("medium", "output", "omitted"),
    [
        ("HTML", "report RUN", (page.html, "escape")),
        ("Markdown", "table --md", (escape, "markdown")),
        ("csv", "table --csv", (escape, "_cell")),
    ],
)
def test_a_field_that_is_not_escaped_is_found(world, monkeypatch, medium, output, omitted):
    places = [("RUN/run.json", ("name",)), ("RUN/run.json", ("environment", "cpu_model"))]
    monkeypatch.setattr(*omitted, lambda value: value)
    assert WRITES[output][2] == medium and any(world.shown(output, *place)[1] for place in places)


def test_a_control_character_on_the_terminal_is_found(world, monkeypatch):
    monkeypatch.setattr(escape.Door, "write", lambda door, text: door._stream.write(text))
    monkeypatch.setattr(escape, "line", str)  # the first of two walls
    assert "on the terminal" in world.shown("verify", "RUN/run.json", ("run_id",))[1][0]
