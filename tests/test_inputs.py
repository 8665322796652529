"""Every file that a verb reads of records, as anything but what it should be: answered in words, in bounded time.

INPUTS is the table: a verb, and the files of a run, a race and a results folder that it reads.
"""

import contextlib
import os
import signal

import claimed
import pytest

from bench.cli.main import main as bench

OF_RUN = ("run.json", "config.yaml", "steps.csv", "telemetry.csv", "events.jsonl", "environment.json", "overrides.yaml")
OF_RACE, OF_RESULTS = ("race.json", "plan.json"), ("ledger.jsonl", ".ledger.count", ".store.sqlite")
# verb: (words, files that it reads); RUN, RACE and RESULTS are folders
INPUTS = {
    "verify": (["verify", "RUN"], OF_RUN + OF_RESULTS),
    "table": (["table", "RESULTS"], ("run.json", *OF_RESULTS)),
    "compare": (["compare", "RACE"], ("run.json", "steps.csv", *OF_RACE, *OF_RESULTS)),
    "judge": (["judge", "RACE:B"], OF_RUN + OF_RACE + OF_RESULTS),
    "report": (["report", "RUN"], OF_RUN),
    "report race": (["report", "RACE"], ("run.json", "steps.csv", *OF_RACE)),
    "export": (["export", "RUN", "--to", "tensorboard"], ("run.json", "steps.csv")),
    "replay": (["replay", "--check", "RUN"], ("run.json", "config.yaml", "overrides.yaml", "environment.json")),
}
BECOMES = {
    "removed": lambda path: None,
    "empty": lambda path: path.write_text(""),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**42)),
    "another type": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "a list": lambda path: path.write_text("[[1, null, {}]]\n"),
}
WITHIN_S = 30
SAMPLE = 13  # of the whole walk, one step in so many is made each time: `pytest --all` makes all of it


def walked(results, verb, name, becomes, capsys):
    """-> (exit code, what was printed)."""
    (race,) = (results / "races").iterdir()
    run = min(results.glob("cpu_nano/*"))
    home = race if name in OF_RACE else results if name in OF_RESULTS else run
    if (home / name).exists():
        (home / name).unlink()
    BECOMES[becomes](home / name)
    places = {"RUN": run, "RACE": race, "RACE:B": f"{race}:B", "RESULTS": results}
    words = [str(places.get(word, word)) for word in INPUTS[verb][0]]

    def late(number, frame):
        pytest.fail(f"{verb} with {name} {becomes}: over {WITHIN_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(WITHIN_S)
    try:
        with contextlib.suppress(SystemExit, ValueError):  # what `python -m bench` prints as a line, and ends with 2
            return bench(words), capsys.readouterr()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return 2, capsys.readouterr()


WALK = [(verb, name, kind) for verb, (_, names) in INPUTS.items() for name in names for kind in BECOMES]
EVERY = [pytest.param(*step, marks=[] if place % SAMPLE == 0 else pytest.mark.slow) for place, step in enumerate(WALK)]


@pytest.mark.parametrize(("verb", "name", "becomes"), EVERY)
def test_an_input_that_is_anything_else_is_answered_in_words(verb, name, becomes, tmp_path, capsys, monkeypatch):
    """The same file of every verb that reads it; a claim of others' records meets all of these."""
    claimed.Results(tmp_path / "results").kept_race(monkeypatch)
    capsys.readouterr()
    exit_code, out = walked(tmp_path / "results", verb, name, becomes, capsys)
    assert exit_code in (0, 1, 2), exit_code
    assert "Traceback" not in out.err + out.out and len(out.err) < 20_000
