"""docs/reference/public-records.md: the public records of modded-nanogpt, judged from what is kept of their logs.

With SPEEDRUN_RECORDS_CLONE=FOLDER, a clone at the page's commit, what is kept is read again and compared.
"""

import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml
from benchmarks import public_records, public_records_page, track3

from bench.cli import pr

CLONE = os.environ.get("SPEEDRUN_RECORDS_CLONE")
REMARKS = yaml.safe_load(public_records.REMARKS.read_text())
PAGE = public_records.PAGE.read_text()


@pytest.fixture(scope="module")
def facts():
    return json.loads(public_records.FACTS.read_text())


def line_of(number, track="1"):
    """The row of a record, its cells by name."""
    head, _, *rows = PAGE.partition(f"## Track {track}")[2].partition("| # |")[2].splitlines()
    names = ["#", *(cell.strip() for cell in head.strip("| ").split("|"))]
    line = next(row for row in rows if row.startswith(f"| {number} |"))
    return dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


def note_of(number):
    notes = PAGE.partition("### Notes on track 1")[2].partition("## Track 2")[0]
    return " ".join(notes.partition(f"- **{number}**")[2].partition("\n- **")[0].split())


def test_the_page_is_made_of_what_is_kept_to_the_byte(facts):
    assert public_records_page.page(facts, REMARKS) == PAGE, "stale: run .venv/bin/python tests/benchmarks records"


def test_every_record_of_the_three_tables_is_there(facts):
    numbers = {track: [claim["number"] for claim in claims] for track, claims in facts["tracks"].items()}
    twice = ["21b", "21c"]  # the 21st was timed again twice
    assert numbers["1"] == [*map(str, range(1, 22)), *twice, *map(str, range(22, 90))]
    assert numbers["2"] == [*map(str, range(1, 19))] and numbers["3"] == [*map(str, range(1, 47))]
    assert sum(len(arm["runs"]) for name, arm in facts["arms"].items() if " " not in name) == 746


def test_the_page_tells_of_every_run_that_is_kept(facts):
    """A run left out, or a loss made lower, is another page."""
    facts = json.loads(json.dumps(facts))
    runs = facts["arms"]["1/84"]["runs"]
    left_out = runs.pop()
    assert public_records_page.page(facts, REMARKS) != PAGE
    runs.append(left_out[:-1] + [left_out[-1] - 0.003])
    assert "p = 0.0148, n = 8" in PAGE and "p = 0.0148, n = 8" not in public_records_page.page(facts, REMARKS)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("30", "-0.86 % [-0.98, -0.75]"),
        ("71", "-0.78 % [-0.90, -0.66]"),
        ("76", "-0.50 % [-0.73, -0.27]"),
        ("83", "-1.13 % [-1.20, -1.06]"),
        ("84", "-0.92 % [-1.02, -0.83]"),
        ("87", "-4.06 % [-4.29, -3.84]"),
    ],
)
def test_changes_against_a_baseline_are_those_worked_out_apart(number, change):
    """scipy worked them out from the logs."""
    assert line_of(number)["against its baseline [95 %]"] == change


def test_what_the_logs_do_not_show_is_said():
    assert line_of("84")["p"] == "0.0148 (not shown)" and line_of("79")["p"] == "0.0319 (not shown)"  # scipy: the same
    assert "- 65 after 64: " in PAGE and "+1.26 %" in PAGE.partition("- 65 after 64: ")[2].splitlines()[0]
    assert "none is as fast" in note_of(16) and line_of(16)["logs: mean (n)"] == "231.01 s (40)"
    assert "8 H200" in line_of(82)["logs: mean (n)"] and "8 x NVIDIA H200" in note_of(82)
    assert "on one GPU" in note_of(88) and "on one GPU" in note_of(59)
    assert line_of(72)["logs: mean (n)"] == "93.26 s (15)" and "five versions" in note_of(72)
    assert line_of(74)["verdict"].startswith("not interleaved [") and "+0.12 % [+0.04, +0.20], not" in note_of(74)
    assert line_of(76)["verdict"] == "faster" and "several machines" in note_of(87)
    assert "not of record 70" in note_of(71) and "not of record 88" in note_of(89)


def test_the_46_results_of_track_3_are_as_upstream_has_them_or_the_page_says_why(facts):
    """tests/test_track3.py judges them one by one."""
    runs = {str(number): kept for number, *_, kept in track3.kept()}
    results = [public_records_page.Result(claim, {}, runs[claim["number"]]) for claim in facts["tracks"]["3"]]
    assert len(results) == 46
    others = {result.number: list(result.sentences()) for result in results if not result.is_as_claimed}
    assert others == {
        "6": ["README's mean is 3.2788, and the mean of the logs is 3.27893."],
        "8": ["README's mean is 3.2778, and the mean of the logs is 3.27798."],
        "41": ["README counts 20 runs, but the clone has 1."],
    }
    assert [result.number for result in results if not result.passes] == ["1", "2", "3", "41"]
    assert [result.number for result in results if result.claim["mark"] == "Ⓧ"] == ["1", "2", "3"]


def test_a_table_of_records_and_the_times_that_a_readme_prints_are_read(tmp_path):
    text = "1 | 45 minutes | base | 05/28/24 | [log](records/a/b.txt) | me\n21 | 2.9 minutes | x | 01/26/25 | - | -\n"
    first, second, again = public_records.claims_of(text + "21 | 2.99 minutes | retimed | 02/01/25 | none | -\n", "1")
    assert (first["s"], first["rounding_s"], first["link"], first["date"]) == (2700, 30, "a/b.txt", "05/28/24")
    assert (second["number"], second["rounding_s"], again["number"], again["s"]) == ("21", 3, "21b", 179.4)
    path = tmp_path / "README.md"
    before = "losses = [3.27, 3.28]\ntimes = [98.9, 98.8]\n"
    path.write_text(f"times = [97.825, 97.7]\nPrevious record (timed on same machine):\n{before}")
    assert public_records.printed_times(path, [97.825, 97.7, 97.9]) == [98.9, 98.8]
    assert public_records.printed_times(path, [96.0, 97.7, 97.9]) is None  # the logs are of other runs
    path.write_text(f"times = [97.825, 97.7]\n{before}")
    assert public_records.printed_times(path, [97.825, 97.7]) is None


PULLS = re.findall(r"\| \[(\d+)\]\(\S+/pull/\d+\) .*? \| (meets the rules|not shown|refused)", PAGE)


def test_the_page_tells_of_each_pull_request_once():
    assert len(PULLS) == len({number for number, _ in PULLS}) == 17


@pytest.mark.skipif(not CLONE, reason="SPEEDRUN_RECORDS_CLONE names no clone of modded-nanogpt")
@pytest.mark.parametrize(("number", "verdict"), [*PULLS, ("246 --candidate muon-beta2", "not shown")])
def test_pr_says_of_a_public_pull_request_what_the_page_says(number, verdict, capsys):
    arguments = [*number.split(), "--clone", CLONE]
    if verdict == "refused":
        with pytest.raises(ValueError, match="adds no log"):
            pr.main(arguments)
        return
    began_s = time.process_time()
    assert pr.main(arguments) == (verdict == "not shown")
    assert f"verdict: **{verdict.upper()}**" in capsys.readouterr().out and time.process_time() - began_s < 10


@pytest.mark.skipif(not CLONE, reason="SPEEDRUN_RECORDS_CLONE names no clone of modded-nanogpt")
def test_the_clone_gives_what_is_kept():
    assert public_records.as_text(public_records.read_clone(Path(CLONE), REMARKS)) == public_records.FACTS.read_text()
