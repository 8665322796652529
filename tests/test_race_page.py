"""The page of a race: who the arms are, the verdict with its picture, links to the runs; in a browser at two widths."""

import json
import re
import shutil
from pathlib import Path

import pytest
from browser import Browser, needs_browser
from kept_records import EVIL, RECORDS, add

from bench.cli import report as cli
from bench.record import race_folder
from bench.report import basis, race_page, verdicts
from bench.web.document import Columns

TIME = {
    "change_pct": 5.0,
    "ci95_pct": [4.0, 6.0],
    "p": 0.001,
    "n": [2, 2],
    "cv_pct": [0.1, None],
    "mde_pct": 0.5,
    "mean_s": [5.15, 5.15],
    "floor_pct": 0.2,
}
LOSS = {"change": 0.25, "ci95": [0.1, 0.4], "p": 0.01, "n": [2, 2], "mean": [4.0, 4.25], "sd": [0.1, 0.1]}
LOSS |= {"margin": 0.002, "verdict": "worse", "reasons": []}
MEMORY = {"change_pct": -3.0, "ci95_pct": [-4.0, -2.0], "p": 0.01, "n": [2, 2], "cv_pct": [1.0, 1.0], "mde_pct": 2.0}
DIFFERENCE = {"kind": "config", "what": "optim.name", "a": ["adamw"], "b": [EVIL]}
EXCLUDED = {"arm": "A", "run_id": "an-excluded-run", "reasons": ["the GPU was throttled"]}


def candidate(**changes):
    return {
        "verdict": "slower",
        "words": "B is slower by 5 %",
        "flags": ["uncalibrated", "verdict-depends-on-exclusions"],
        "differences": [DIFFERENCE],
        "time": TIME,
        "val_loss": dict(LOSS),
        "memory": MEMORY | {"mean_gib": [1.0, 0.97]},
        "excluded": [EXCLUDED],
    } | changes


@pytest.fixture
def race(tmp_path):
    """A folder with a race of three arms, two runs each and a warm-up of A."""
    results = tmp_path / "results"
    shutil.copytree(RECORDS, results / "cpu_nano")
    runs = [add(results, seed, metrics={"train_s": 5.0 + seed / 10, "val_loss": 4.0}) for seed in range(7)]
    names = [f"cpu_nano/{run.name}" for run in runs]
    race_json = {
        "race_id": EVIL,
        "status": "complete",
        "why": None,
        "track": "cpu_nano",
        "unplanned_look": True,
        "looks": [{"at": "now"}],
        "plan": {"n": 2},
        "plan_sha256": "ab" * 32,
        "baseline": "A",
        "arms": {
            "A": {"overrides": ["goal.num_steps=4"], "warm_up_runs": names[6:], "runs": [names[0], names[3]]},
            "B": {"overrides": ["goal.num_steps=4", EVIL], "runs": names[1:3]},
            "C": {"overrides": ["goal.num_steps=4", "seed=1"], "runs": names[4:6]},
        },
        "result": {
            "baseline": "A",
            "against": {"B": candidate(), "C": candidate(verdict="inconclusive", words="inconclusive: C +5 %")},
        },
    }
    folder = results / "races" / "some-race"
    folder.mkdir(parents=True)
    (folder / "race.json").write_text(json.dumps(race_json))
    return folder


def test_its_curves_are_each_arms_without_its_warm_up_and_its_points_say_their_run(race):
    points, _, by_step, by_time, steps = race_page.document(race).charts
    assert [(arm["name"], len(arm["runs"])) for arm in by_step["arms"]] == [("A", 2), ("B", 2), ("C", 2)]
    assert by_time["arms"][0]["runs"][0] == {"x": [0.0, 0.102, 0.218], "y": [5.75, 4.75, 4.25]}
    assert steps["arms"][0]["runs"][0]["x"] == [1, 2, 4]  # the third was profiled
    first = points["series"][0]
    assert first["labels"][0].endswith("-s0\n5.0") and "links" in first and first["links"][0] is None
    cli.main([str(race)])  # now the runs have pages
    assert race_page.document(race).charts[0]["series"][0]["links"][0].endswith("-s0/report.html")


def test_it_begins_with_the_verdict_then_the_arms_and_the_picture(race):
    times = race_page.document(race).charts[0]
    expected = [[5.0, None, None, 5.3, None, None], [None, 5.1, 5.2, None, None, None]]
    assert [line["y"] for line in times["series"]][:2] == expected
    cli.main([str(race)])
    html = (race / "race.html").read_text()
    order = ("B is slower by 5 %", "<svg", "+4.00 to +6.00 %", "<dt>A</dt>", "<summary>B against A</summary>")
    order += ("what differs (config: 1)", "data-chart", "<summary>All 7 runs", "an-excluded-run", "<summary>plan.json")
    assert sorted(order, key=html.index) == list(order)
    assert "Interim looks that were not planned: 1." in html
    assert "Flags: uncalibrated, verdict-depends-on-exclusions" in html
    assert "with the excluded runs the times would give a different verdict" in html  # each flag with its meaning
    assert "All arms: <code>goal.num_steps=4</code>" in html  # what all share is said once
    assert "inconclusive</span>C +5 %" in html  # the word once
    assert html.count("+0.25000") == 2  # of both losses
    unfolded = re.sub(r"<details>.*", "", html, flags=re.S)  # of several candidates each has its own details
    assert "with the excluded runs" not in unfolded and "with the excluded runs" in html
    assert html.count("an-excluded-run") == 1  # of the baseline: excluded from both comparisons


@pytest.mark.parametrize("changes", [{}, {"on": "loss"}, {"comparable": False}, {"excluded": []}])
def test_the_first_lines_say_on_how_many_runs_a_verdict_rests_where_some_are_excluded(changes):
    facts = {"on": "time", "comparable": True, "arms": ["A", "B"], "started": [14, 2], "excluded": [EXCLUDED] * 12}
    (verdict,) = verdicts.verdicts({"B": candidate(**facts | changes)}, {})
    note = "It rests on 2 of 14 runs of A and 2 of 2 runs of B; 12 disturbed runs are excluded."
    for text in (verdict.text(False).splitlines()[-1], verdict.text(True).splitlines()[-1], verdict.html()):
        assert (note in text) == (not changes)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"all_disturbed": True}, "Every run was disturbed by the machine."),
        ({}, "Some runs were disturbed by the machine, and too few others remain."),
        ({"on": "loss"}, None),
    ],
)
def test_the_first_lines_say_if_disturbed_runs_are_counted(changes, note):
    facts = {"on": "time", "comparable": True, "arms": ["A", "B"], "started": [2, 2], "flags": ["suspect-runs"]}
    (verdict,) = verdicts.verdicts({"B": candidate(**facts | changes)}, {})
    needed = f"{note} They count here, but a claim needs undisturbed runs."
    assert [line.strip() for line in verdict.text(False).splitlines() if "machine" in line] == [needed] * bool(note)


def test_an_excluded_run_is_of_the_arm_that_its_comparison_names():
    named = candidate(arms=["B", "A"], excluded=[EXCLUDED])
    assert "<td>A</td><td><code>an-excluded-run</code>" in verdicts.excluded({"A": named}).html()


def test_the_change_of_the_loss_is_not_folded_away(race):
    html = race_page.document(race).html()
    unfolded = re.sub(r"<details>.*?</details>", "", html, flags=re.S)
    assert "+0.25000" in unfolded and "+0.10000 to +0.40000" in unfolded
    assert "B&#x27;s val_loss is worse throughout the 95 % interval" in unfolded


def test_each_line_below_the_numbers_of_several_candidates_says_whose_it_is():
    waived = candidate(val_loss=LOSS | {"verdict": "waived"})
    lines = verdicts.numbers("A", {"B": waived, "C": waived, "D": candidate()}).blocks[-1].lines
    same = "the losses of both arms are bit-identical: there is nothing to test"
    assert lines[0] == f"B, C: {same}" and lines[1].startswith("D's val_loss is worse") and len(lines) == 2
    assert verdicts.numbers("A", {"B": waived}).blocks[-1].lines == [same]


def test_a_text_on_several_candidates_says_once_what_holds_for_all_of_them():
    shared, own = "the machine was busy", "1 run of B cannot be trusted"
    change = {"files": [{"path": "a.py", "added": 1, "removed": 2}], "patch": "", "is_cut": False, "unknown": None}
    setting = {"kind": "config", "what": "optim.lr", "a": [1], "b": [2]}
    b = candidate(reasons=[shared, own, "of two"], differences=[setting], code_change=change, flags=["n=1", "forced"])
    against = {"B": b, "C": candidate(reasons=[shared], flags=["n=1"], differences=[])}
    against["D"] = candidate(reasons=[shared, "of two"])
    shown = Columns(basis.in_brief("A", against, {"B": ["slow"], "C": ["slow"], "D": []})).text(False)
    lines = [line.strip() for line in shown.splitlines()]
    assert lines.count(f"- {shared}") == 1 and {f"- {own}", "- B, D: of two", "B, C: slow"} <= {*lines}
    meanings = basis.wording.FLAGS
    assert {f"- B, C: n=1: {meanings['n=1']}", f"- B: forced: {meanings['forced']}"} <= {*lines}
    assert [line.split("  ")[0] for line in lines[-3:]] == ["B", "C", "D"]
    assert "optim.lr=2" in lines[-3] and lines[-3].endswith("a.py +1 -2") and "optim" not in lines[-2]


def test_a_candidate_that_is_a_commit_is_called_by_it():
    commit = "0123456789abcdef0123456789abcdef01234567"
    against = {"B": candidate(words="no verdict: few"), "C": candidate(words="no verdict: few")}
    b, c = verdicts.verdicts(against, {"B": f"script=a.py script.rev={commit}", "C": "seed=1"})
    assert b.text(False).endswith("  B (0123456): few") and "B (0123456): " in b.html()
    assert c.text(True).endswith("  C: few")
    (b,) = verdicts.verdicts({"B": candidate(words="B is slower than A")}, {"B": f"rev={commit}"})
    assert b.text(False).endswith("  B (0123456) is slower than A") and b.html().count("0123456") == 1


def test_the_flags_in_markdown_are_a_table_with_a_head():
    shown = "\n".join(block.text(True) for block in basis.basis(candidate(flags=["n=1"])))
    head, rule, row = shown.splitlines()[-3:]
    assert head.startswith("| flag | meaning") and set(rule) == {"|", "-"} and row.startswith("| n=1  | a single run")


def test_values_that_differ_are_cut_one_by_one_and_never_until_they_look_alike():
    """Shards as hashes: those of two runs that differ in one file, early or late, and a name that is long."""
    hashes = [f"{number:x}" * 64 for number in range(1, 10)]
    name = "instruments.a_setting_whose_name_is_longer_than_any_value"
    for nth in (2, 6):
        other = [*hashes[:nth], "f" * 64, *hashes[nth + 1 :]]
        data = {"kind": "data", "what": name, "a": [hashes, None], "b": [other, "a word"]}
        (section,) = basis.differences("A", "B", {"differences": [data]})
        row = section.text(True).splitlines()[-1]
        _, _, what, a, b, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        assert what == name and a != b and a.endswith("-") and b.endswith("a word")
        assert "1" * 12 in a and "1" * 13 not in a and section.html().count("f" * 64) == 1  # a page has all
    text = {"kind": "config", "what": "x", "a": ["a" * 99, "b" * 99], "b": ["c" * 99]}
    (section,) = basis.differences("A", "B", {"differences": [text]})
    shown = section.text(False)
    assert f"{'b' * 21} " in shown and "b" * 45 not in shown and "…" in shown


def test_a_race_without_a_verdict_says_its_unplanned_looks_too(race):
    race_json = race_folder.read(race) | {"result": None, "why": "it was abandoned"}
    sentence = "Interim looks that were not planned: 1."
    for shown in (race_page.document_of(race_json).markdown(), race_page.document_of(race_json, race).html()):
        assert "no verdict: it was abandoned" in shown and sentence in shown
        assert shown.count("it was abandoned") == 1


@pytest.mark.parametrize("missing", ["n", "looks", "alpha", "runs", "comparable", "steps", "time", None])
def test_an_older_race_that_lacks_a_key_is_drawn(race, missing):
    race_json = race_folder.read(race)
    race_json["plan"] = {"n": 2, "looks": [2], "alpha": 0.05}
    race_json["order"] = [{"arm": "A", "discarded": False}]
    for answer in race_json["result"]["against"].values():
        answer |= {"started": [2, 2], "steps": [4, 4], "comparable": True}
        answer.pop(missing, None)
    race_json["arms"]["A"].pop(missing, None), race_json["plan"].pop(missing, None)
    shown = race_page.document_of(race_json).markdown()
    assert ("planned 2 runs per arm" in shown) == (missing != "n") and "started " in shown
    assert ("alpha 0.05" in shown, "looks at 2" in shown) == (missing != "alpha", missing != "looks")
    assert ("2 runs, 4 steps" in shown) == (missing != "steps")


def test_the_picture_has_a_panel_a_measure_with_the_floor_and_the_margins(race):
    found = race_folder.read(race)
    found = {panel.title: panel for panel in verdicts.panels(found["result"]["against"], list(found["arms"]))}
    assert list(found) == ["Train time", "val_loss", "Peak memory"]
    assert (found["Train time"].floor, found["Train time"].margin) == (
        0.2,
        None,
    )  # it has a margin where one is recorded
    assert found["val_loss"].margin == (0.0, 0.002)
    assert [(row.label, row.low, row.high, row.colour) for row in found["val_loss"].rows] == [
        ("B", 0.1, 0.4, 1),
        ("C", 0.1, 0.4, 2),
    ]
    margins = verdicts.panels({"B": {"time": TIME | {"margin_pct": 0.5}}}, ["A", "B"])
    assert margins[0].margin == (-0.5, 0.5)


def test_every_link_of_a_race_and_of_its_runs_leads_to_a_file(race):
    cli.main([str(race)])
    pages = [race / "race.html", *race.parent.parent.glob("cpu_nano/*/report.html")]
    assert len(pages) == 8  # of its seven runs, the warm-up too
    for page in pages:
        links = [link for link in re.findall(r'href="([^"]+)"', page.read_text()) if link[0] not in "#d"]
        assert len(links) >= 3
        assert [link for link in links if not (page.parent / link).exists()] == []


def test_no_page_or_picture_of_a_race_is_written_through_a_link(race, tmp_path):
    """A race that somebody sends may hold runs, and plots/, that lead to the reader's own folders."""
    results = shutil.copytree(race.parent.parent, tmp_path / "theirs")
    assert cli.main([str(results / "races" / race.name)]) == 0
    pages = set(results.glob("cpu_nano/*/report.html"))
    first, elsewhere = min(pages).parent, tmp_path / "elsewhere"
    for page in pages:
        page.unlink()
    shutil.move(first, elsewhere)
    first.symlink_to(elsewhere)
    assert cli.main([str(results / "races" / race.name)]) == 0
    assert set(results.glob("cpu_nano/*/report.html")) == pages - {first / "report.html"}
    assert not (elsewhere / "report.html").exists()
    (results / "races" / race.name / "plots").symlink_to(elsewhere)
    with pytest.raises(OSError, match="it is a link, through which nothing is written.*plots"):
        cli.main([str(results / "races" / race.name), "--png"])


# ---- in a browser


@needs_browser
@pytest.mark.parametrize(("width", "height", "dark"), [(1300, 900, False), (400, 800, True)])
def test_the_verdict_is_on_the_first_screen_and_the_picture_can_be_read(race, width, height, dark):
    cli.main([str(race)])
    with Browser() as browser:
        shown = browser.open(race / "race.html", width=width, height=height, dark=dark)
        assert shown.errors == [] and len(shown.requests) == 1
        assert shown.js("document.documentElement.scrollWidth <= innerWidth")
        assert shown.js("document.querySelector('.verdict .badge').getBoundingClientRect().bottom < innerHeight")
        texts = "[...document.querySelectorAll('.forest text')].map(one => one.getBoundingClientRect())"
        assert shown.js(f"Math.min(...{texts}.map(one => one.height))") >= 11  # CSS pixels
        assert shown.js(f"{texts}.every(one => one.left >= 0 && one.right <= innerWidth)")
        if width > 1000:
            assert shown.js("document.querySelector('.forest svg').getBoundingClientRect().bottom < innerHeight")
        page, ink = (shown.js(f"getComputedStyle(document.querySelector('{what}')).{of}") for what, of in LOOK)
        assert (sum(map(int, re.findall(r"\d+", ink))) > sum(map(int, re.findall(r"\d+", page)))) == dark


LOOK = (("body", "backgroundColor"), (".forest text", "fill"))


@needs_browser
def test_the_pictures_of_a_race_have_the_verdict_too(race, tmp_path, printed):
    written = [Path(line).name for line in printed(cli, race, "--png", "--out", tmp_path / "plots").splitlines()]
    assert written == ["verdict.png", *(f"{spec['id']}.png" for spec in race_page.document(race).charts)]
    assert (tmp_path / "plots" / "verdict.png").stat().st_size > 20_000
