"""The results site: what it shows, what it survives, and what a reader's clicks and keys do in a Chromium."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import claimed
import pytest
import real_runs
import traces
from browser import browser, needs_browser  # noqa: F401  a fixture
from kept_records import EVIL, add, results  # noqa: F401  a fixture

from bench.claims import leaderboard, leaderboard_views
from bench.cli import race, table
from bench.cli import report as cli
from bench.record import store
from bench.report import table_groups
from bench.report.site import files, site
from bench.web import forest


def write(results, out=None):
    """Writes the site as the verb does."""
    contents = site.read(results)
    return site.write(contents, out or results / "site", lambda: leaderboard_views.standing(contents.runs, [results]))


def columns(results):
    return site.table_columns(site.read(results), {})


# ---- the rows


def test_a_short_id_is_time_config_and_seed_and_whole_only_where_two_would_be_alike():
    shorts = {
        "20261121T072021Z-gpt2-adamw-ecc04969-s0": "072021-ecc04969-s0",
        "20261121T072021Z-gpt2-adamw-ecc04969-s0-2": "072021-ecc04969-s0-2",
        "20261122T101010Z-gpt2-adamw-ecc04969-s1-m0a1b2c": "20261122T101010Z-gpt2-adamw-ecc04969-s1-m0a1b2c",
        "20261123T101010Z-gpt2-adamw-ecc04969-s1": "20261123T101010Z-gpt2-adamw-ecc04969-s1",
        "00000000T000000Z-2024-10-13_llmc-85ef0f26-r0": "85ef0f26-r0",
        "odd": "odd",
    }
    assert site.short_ids([*shorts]) == [*shorts.values()]


def test_the_groups_are_those_of_the_table(results):
    for seed, validity in ((1, "valid"), (2, "invalid"), (3, "suspect")):
        add(results, seed, validity=validity)
    shown = columns(results)
    rows = [row for _, row in site.read(results).runs]
    for group in table_groups.groups(rows):
        places = [shown["run_id"].index(run_id) for run_id in group["run_ids"]]
        assert len({shown["group"][place] for place in places}) == 1
        assert sum(shown["counts"][place] for place in places) == group["n"]


def test_a_warm_up_run_of_a_race_is_called_so_and_counts_nowhere(results):
    add(results, 4, race={"race_id": "r", "arm": "A", "position": 0, "attempt": 1, "discarded": True})
    shown = columns(results)
    place = shown["seed"].index(4)
    assert (shown["status"][place], shown["counts"][place]) == ("warm-up", False)


def test_a_copy_of_a_run_is_shown_once_and_said(results):
    shutil.copytree(results / "cpu_nano", results / "copied" / "cpu_nano")
    contents = site.read(results)
    assert (len(contents.runs), contents.num_copies) == (2, 2)
    assert "2 copies of a run not shown" in write(results).read_text()


def test_what_is_packed_is_what_was_there():
    packed = site._packed({"a": [1, 1, 1, None, 2, 1], "b": ["x", "y", "z", "u", "v", "w"]})
    assert packed["a"] == {"values": [1, None, 2], "codes": [0, 0, 0, 1, 2, 0]}
    assert packed["b"] == {"values": ["x", "y", "z", "u", "v", "w"]}


# ---- the pages of the runs


def page_of(out, run_id):
    path = out / "runs" / files.page_name(run_id)
    return path.read_text() if path.exists() else None


def test_the_site_has_a_page_for_every_run_and_makes_only_what_changed(results):
    out = results / "site"
    write(results)
    ids = [row["run_id"] for _, row in site.read(results).runs]
    assert all("<h1>" in page_of(out, run_id) for run_id in ids) and len(ids) == 2
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.html")}
    new = add(results, 9, config_id="0000beef")
    write(results)
    after = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.html")}
    written = {path.name for path in after if after[path] != before.get(path)}
    assert written == {f"{new.name}.html"} and page_of(out, new.name)
    report = traces.analysed([traces.write(results / "a.json", traces.launched("sgemm", 20, 10, 5, 1))])
    (new / "analysis.json").write_text(json.dumps(report))
    write(results)
    assert "sgemm" in page_of(out, new.name)
    shutil.rmtree(new)
    write(results)
    assert new.name not in (out / "index.html").read_text()


@pytest.mark.parametrize("linked", ["", "runs", "assets"])
def test_no_page_is_written_through_a_link_that_came_with_the_folder(results, tmp_path, linked):
    """A claim that somebody sends may hold site -> /home/reader/public_html."""
    elsewhere, out = tmp_path / "elsewhere", results / "site"
    elsewhere.mkdir()
    (out / linked).parent.mkdir(parents=True, exist_ok=True)
    (out / linked if linked else out).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link"):
        write(results, out)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("theirs", ["index.html", "runs/diary.html", "curves/app.js", "assets/site.css"])
def test_a_folder_of_other_pages_is_neither_written_to_nor_cleaned(results, tmp_path, theirs):
    out = tmp_path / "website"
    (out / theirs).parent.mkdir(parents=True)
    (out / theirs).write_text("mine")
    with pytest.raises(ValueError, match=r"website/\w+(.html)?: was there before .* name a new folder with --out"):
        site.write(site.read(results), out)
    assert [path.read_text() for path in out.rglob("*") if path.is_file()] == ["mine"]


def test_an_interrupted_site_is_made_by_the_same_command(results, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_pages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            site.write(site.read(results), tmp_path / "site")
    assert site.write(site.read(results), tmp_path / "site").is_file()


def test_what_others_put_beside_the_pages_of_runs_stays(results, tmp_path):
    site.write(site.read(results), tmp_path / "site")
    (tmp_path / "site/runs/diary.html").write_text("mine")
    site.write(site.read(results), tmp_path / "site")
    assert (tmp_path / "site/runs/diary.html").read_text() == "mine"


def test_beyond_a_number_only_the_newest_and_the_linked_runs_have_a_page(results, monkeypatch):
    """The others say how to get theirs."""
    ids, shown = [add(results, seed).name for seed in range(1, 9)], results / "site"
    assert cli.main([str(results)]) == 0 and all(page_of(shown, run_id) for run_id in ids)
    assert "The newest" not in (shown / "index.html").read_text()
    monkeypatch.setattr(files, "NUM_PAGES", 2)
    assert cli.main([str(results)]) == 0
    linked = leaderboard_views.standing(site.read(results).runs, [results]).linked
    assert linked and all((page_of(shown, run_id) is not None) == (run_id in {*ids[-2:], *linked}) for run_id in ids)
    assert "The newest 2 runs and those that the leaderboard links" in (shown / "index.html").read_text()
    for run_id in ids[-2:]:
        for link in re.findall(r'href="([^"]*)"', page_of(shown, run_id)):
            assert link.startswith(("#", "data:")) or (shown / "runs" / link).resolve().exists(), link


def test_an_id_that_is_no_plain_name_makes_no_path(results):
    """It is a stranger's text: it must not lead out of the folder."""
    assert [files.page_name(run_id) for run_id in ("a-s1", "r+1.5")] == ["a-s1.html", "r+1.5.html"]
    for run_id in ("../../x", "/etc/x", ".made", "", "a b", "x" * 300, EVIL):
        assert re.fullmatch("[0-9a-f]{32}.html", files.page_name(run_id))


# ---- damaged records (ux B1)


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("events.jsonl", b"[" * 100_000 + b"\n", "events.jsonl, line 1: is nested more"),
        ("events.jsonl", b'{"event": "\xff"}\n', "events.jsonl: byte 11 is damaged"),
        ("events.jsonl", b"7\n", "events.jsonl, line 1: expected object, got int"),
        ("run.json", b'{"a": \xff\xfe', "run.json: is not valid JSON"),
    ],
)
def test_a_damaged_record_has_a_row_that_says_why_and_all_else_is_written(results, name, content, why):
    damaged = add(results, 5)
    (damaged / name).write_bytes(content)
    html = write(results).read_text()
    assert why in html.replace("&#x27;", "'") and str(results) not in html
    data = json.loads(re.search(r'id="runs-data">(.*?)</script>', html)[1])["columns"]
    rows = {
        name: [table["values"][code] for code in table.get("codes", range(len(table["values"])))]
        for name, table in data.items()
    }
    place = rows["run_id"].index(damaged.name)
    assert rows["status"][place] == "damaged" and rows["page"][place] is None and len(rows["run_id"]) == 3
    assert (rows["val_loss"][place] is None) == (name == "run.json")  # what run.json says is shown
    assert sum(map(bool, rows["page"])) == 2
    assert all(page_of(results / "site", run_id) for run_id in rows["run_id"] if run_id != damaged.name)


def test_a_damaged_record_is_said_again_by_the_second_build_and_forgotten_once_mended(results):
    damaged = add(results, 5)
    events = (damaged / "events.jsonl").read_text()
    (damaged / "events.jsonl").write_text("7\n")
    for _ in range(2):
        assert "Damaged records" in write(results).read_text()
    (damaged / "events.jsonl").write_text(events)
    assert "Damaged records" not in write(results).read_text()


@pytest.mark.parametrize("name", ["ledger.jsonl", "config.yaml"])
def test_a_damaged_ledger_or_config_stops_no_site(raced, name):
    paths = [raced / name] if name == "ledger.jsonl" else list(raced.glob("cpu_nano/*/config.yaml"))
    for path in paths:
        path.write_bytes(b"model: 7\noptim: [\xff\n")
    assert cli.main([str(raced)]) == 0
    assert "<h2>Records</h2>" in (raced / "site" / "index.html").read_text()


def test_where_the_leaderboard_cannot_be_made_the_site_says_so(results, monkeypatch):
    def damaged(runs, paths):
        raise TypeError("'<' not supported")

    monkeypatch.setattr(leaderboard_views, "standing", damaged)
    assert cli.main([str(results)]) == 0
    html = (results / "site" / "index.html").read_text()
    assert "The leaderboard cannot be made: &#x27;&lt;&#x27; not supported." in html and "has no rules" not in html


# ---- many pages unasked


@pytest.fixture
def elsewhere(tmp_path, results, monkeypatch):
    monkeypatch.setattr(cli, "MAX_UNASKED", 1)
    shutil.copytree(results, tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def test_many_pages_of_a_folder_that_is_no_results_folder_are_not_made_unasked(elsewhere):
    with pytest.raises(ValueError, match=r"is not a results folder, and pages of 2 runs would go to .*--anyway"):
        cli.main([str(elsewhere)])
    assert not (elsewhere / "site").exists()


def test_many_pages_are_made_when_they_are_wanted(elsewhere, results):
    assert cli.main([str(elsewhere), "--anyway"]) == 0
    assert cli.main([str(results)]) == 0
    (elsewhere / "ledger.jsonl").write_text("")
    assert cli.main([str(elsewhere)]) == 0


# ---- the leaderboard


@pytest.fixture(scope="module")
def raced_once(tmp_path_factory):
    """Two records and a slower entry on one device, too few runs on another."""
    base, chance = tmp_path_factory.mktemp("raced"), random.Random(1)
    results, times = claimed.Results(base / "results"), {"A": 10.0, "B": 9.0, "C": 11.0}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_STATE_HOME", str(base / "state"))
        claimed.Racers(results, lambda arm, seed: times[arm] * (1 + chance.gauss(0, 0.002))).install(monkeypatch)
        assert race.main(["A=", "B=optim.beta2=0.99", "C=optim.beta1=0.8", "n=3"]) == 0
        results.add(50, train_s=1.0, change=lambda run: run["environment"].update(cpu_model="Fast CPU"))
    return results.folder


@pytest.fixture
def raced(raced_once, tmp_path, monkeypatch):
    """A copy of it, where this test's commands find their results."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    return shutil.copytree(raced_once, tmp_path / "results")


def test_the_leaderboard_is_that_of_the_table_by_device(raced, printed, capsys):
    capsys.readouterr()
    text = printed(table, "--leaderboard")
    (board,) = leaderboard.boards(store.read_rows([raced]), [raced])
    html = write(raced).read_text()
    assert [entry.number for entry, *_ in board.records] == [1, 2]
    for entry, *_ in board.records:
        assert re.search(rf"^ *{entry.number} .*{entry.train_s:,.3f}", text, re.M) and f"{entry.train_s:,.3f}" in html
    for entry in board.entries:
        assert entry.status in text and entry.status in html
    assert "<h3>cpu_nano on Example CPU</h3>" in html and "No record yet." in html.split("cpu_nano on Fast CPU")[1]
    assert html.count("<h3>cpu_nano on ") == 2 and html.count('data-chart="records-') == 1
    assert ">the first<" in html and ">optim.beta2 0.95 → 0.99<" in html
    assert re.search(r"^ +2  optim\.beta2 0\.95 → 0\.99$", text, re.M)


def test_what_changed_begins_with_what_is_trained_and_leaves_out_what_is_not(raced, monkeypatch):
    settings = ["hardware.stall_timeout_s", "instruments.telemetry.host_interval_ms", "hardware.dtype", "model.width"]
    differing = [{"kind": "config", "what": what, "a": [1], "b": [2]} for what in settings]
    monkeypatch.setattr(leaderboard_views.comparison, "differing_folders", lambda a, b: differing)
    (board,) = leaderboard.boards(store.read_rows([raced]), [raced])
    before, entry = (step[0] for step in board.records)
    assert leaderboard_views._what_changed(before, entry) == "model.width 1 → 2, hardware.dtype 1 → 2"
    del differing[2:]  # only settings that change nothing: better these than none
    assert leaderboard_views._what_changed(before, entry).startswith("hardware.stall_timeout_s 1 → 2, instruments.")


def test_what_changed_begins_with_what_was_typed_and_then_names_the_choices(raced, monkeypatch):
    """Seven settings of Muon stood before optim.name, which was among "9 more settings"."""
    settings = ["data.source", "model.arch", "model.width", "optim.beta1", "optim.lr", "optim.name", "optim.eps", "x.y"]
    differing = [{"kind": "config", "what": what, "a": [1], "b": [2]} for what in settings]
    monkeypatch.setattr(leaderboard_views.comparison, "differing_folders", lambda a, b: differing)
    (board,) = leaderboard.boards(store.read_rows([raced]), [raced])
    before, entry = (step[0] for step in board.records)
    Path(entry.folders[0], "overrides.yaml").write_text("[track=cpu_nano, +optim.lr=2, optim=muon, seed=1]")
    listed = [change.partition(" ")[0] for change in leaderboard_views._what_changed(before, entry).split(", ")]
    assert listed == ["optim.name", "optim.lr", "model.arch", "model.width", "optim.beta1", "optim.eps", "2"]
    del differing[7:]  # one more is named
    assert leaderboard_views._what_changed(before, entry).endswith("optim.eps 1 → 2, data.source 1 → 2")


def test_who_made_a_record_is_what_the_readme_beside_its_ledger_says(raced):
    (raced / "README.md").write_text("# Mine\n\nBy: (to be written)\n")
    assert leaderboard_views._who(raced) is None
    (raced / "README.md").write_text("# Mine\n\nBy: @someone, @other\n")
    assert str(leaderboard_views.standing(store.read_rows([raced]), [raced]).records).count("@someone, @other") == 2
    (raced / "README.md").write_bytes(b"\xff")
    assert leaderboard_views._who(raced) is None


def test_what_cannot_be_a_record_is_found_without_reading_every_file(raced, monkeypatch):
    """10,000 copies of a record were judged for 22 s, to be refused for a ledger that is not there."""
    (raced / "ledger.jsonl").unlink()
    monkeypatch.setattr("bench.record.verification.report", lambda folder: pytest.fail("read"))
    entries = leaderboard.by_track(store.read_rows([raced]))["cpu_nano"]
    assert leaderboard.failed_rule(max(entries, key=lambda entry: len(entry.rows))) == "the ledger is whole"


def test_ticks_are_round_numbers_inside():
    assert forest.ticks(7.87, 8.83) == [8.0, 8.2, 8.4, 8.6, 8.8]
    assert forest.ticks(0.0, 1000.0) == [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]


def test_the_record_comes_down_in_steps_and_each_is_a_link(raced):
    (board,) = leaderboard.boards(store.read_rows([raced]), [raced])
    shown = leaderboard_views.standing(store.read_rows([raced]), [raced])
    (chart,) = shown.charts
    stepped, points = chart["series"]
    assert [line["kind"] for line in chart["series"]] == ["stepped", "points"] and chart["dates"]
    assert stepped["y"] == points["y"] == pytest.approx([entry.score for entry, *_ in board.records], rel=1e-4)
    run_id = board.records[1][0].rows[0]["run_id"]
    assert (
        points["links"][1] == f"runs/{run_id}.html" and run_id in shown.linked and points["labels"][1].startswith("#2")
    )


# ---- races


def test_races_stand_with_their_verdicts_the_newest_first(raced):
    (folder,) = (raced / "races").iterdir()
    older = raced / "races" / "20250101T000000Z-race-00000000"
    shutil.copytree(folder, older)
    facts = json.loads((older / "race.json").read_text())
    facts |= {
        "race_id": older.name,
        "started_at": "2025-01-01T00:00:00Z",
        "result": None,
        "status": "abandoned",
        "why": "rain",
    }
    (older / "race.json").write_text(json.dumps(facts))
    broken = raced / "races" / "20240101T000000Z-race-00000000"
    broken.mkdir()
    (broken / "race.json").write_text('{"arms": 3}')
    (older / "race.html").unlink(missing_ok=True)
    html = site.races(raced, raced / "site")
    assert html.index(folder.name) < html.index(older.name) < html.index(broken.name)
    time = json.loads((folder / "race.json").read_text())["result"]["against"]["B"]["time"]
    low, high = time["ci95_pct"]
    assert f"{time['change_pct']:+.2f} % [{low:+.2f}, {high:+.2f}]" in html
    assert "B against A" in html and "C against A" in html and ">faster<" in html and ">slower<" in html
    assert "rain" in html and ">damaged<" in html
    for link in re.findall(r'href="([^"]*)"', html):
        assert Path(os.path.normpath(raced / "site" / link)).exists()


# ---- in a browser


@pytest.fixture
def many(results):
    for seed in range(2, 12):
        add(results, seed, name=EVIL if seed == 3 else "gpt2-adamw", metrics={"train_s": 5.0 + seed / 10})
    write(results)
    return results / "site" / "index.html"


FIRST = "document.querySelector('.tabulator-row [tabulator-field={}]').textContent"
PAPER = "document.querySelector('.tabulator-print-table')"
SHOWN = (
    "[...document.querySelectorAll('.tabulator-col')]"
    ".filter(e => e.offsetWidth).map(e => e.getAttribute('tabulator-field'))"
)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_at_1300_px_every_headline_number_is_in_sight_in_its_order(browser, many, dark):
    page = browser.open(many, width=1300, dark=dark)
    fields = page.js(SHOWN)
    assert [field for field in fields if field] == [
        "val_loss", "train_s", "step_avg_ms", "tokens_per_s", "name", "device", "started_at", "run_id", "status",
    ]  # fmt: skip
    cells = "[...document.querySelectorAll('.tabulator-cell')].map(e => e.getBoundingClientRect().right)"
    assert page.js(f"Math.max(...{cells})") <= 1300 and page.js("document.documentElement.scrollWidth") == 1300
    page.js("dispatchEvent(new Event('beforeprint'))")  # the table on paper has all rows, and no HTML of a record
    assert page.js(f"{PAPER}.querySelectorAll('tr').length") == 13 and "status" in page.js(f"{PAPER}.innerText")
    assert page.js(f"{PAPER}.querySelectorAll('img, script').length") == 0
    assert page.errors == [] and page.js("document.title") == "Results"


@needs_browser
def test_at_400_px_a_run_is_a_card_and_the_page_does_not_scroll_sideways(browser, many):
    page = browser.open(many, width=400)
    page.until("document.querySelectorAll('.card').length > 3")
    assert page.js("document.documentElement.scrollWidth") == 400
    text = page.js("document.querySelector('.card').innerText")
    assert all(name in text for name in ("val_loss", "train_s", "step_avg_ms", "tokens_per_s")) and "6.10" in text
    page.js(
        "(() => { const s = document.getElementById('sort'); s.value = 'train_s';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    page.until("document.querySelector('.card').innerText.includes('0.22')")
    page.js("document.querySelector('.menu').open = true")
    assert page.js("document.documentElement.scrollWidth") == 400 and page.errors == []


@needs_browser
def test_the_site_filters_sorts_and_sets_ticked_runs_side_by_side(browser, many):
    page = browser.open(many, width=1300)
    assert "12 of 12 runs" in page.text
    page.js("document.getElementById('column-seed').click()")
    page.js("document.querySelector('.tabulator-col[tabulator-field=seed]').focus()")
    for wanted in ("0", "11"):  # Enter sorts, and again turns round
        page.press("Enter")
        page.until(f"{FIRST.format('seed')} === '{wanted}'")
    page.click("[tabulator-field=train_s] input")
    page.type(">5.75")
    page.until("document.getElementById('shown').textContent === '4 of 12 runs'")  # 5.8, 5.9, 6.0, 6.1
    page.click(".tabulator-col[tabulator-field=train_s] .tabulator-col-title")
    page.until(f"{FIRST.format('train_s')} === '5.80'")
    for place in (1, 3):
        page.click(f".tabulator-row:nth-child({place}) input[type=checkbox]")
    pair = page.js("document.getElementById('ticked').innerText")
    assert "./run.sh compare 20261122T000008Z" in pair and "+3.45 %" in pair  # 6.0 / 5.8
    assert "num_steps" not in pair  # what is alike is not said
    page.click("#reset")
    page.until("document.getElementById('shown').textContent === '12 of 12 runs'")
    assert page.js("document.getElementById('ticked').innerText") == ""
    assert page.js("document.title") == "Results" and page.js("document.querySelectorAll('img').length") == 0
    assert page.errors == []


@needs_browser
def test_what_is_seen_is_in_the_address_and_comes_back(browser, many):
    page = browser.open(many, width=1300)
    for step in ("column-seed", "group"):
        page.js(f"document.getElementById('{step}').click()")
    page.click("[tabulator-field=train_s] input")
    page.type(">5.75")
    page.until("document.getElementById('shown').textContent === '4 of 12 runs'")
    page.until("location.hash.includes('f.train_s')")
    address = page.js("location.href")
    again = browser.open(address.replace("#", "#ticked=20261122T000008Z-gpt2-adamw-48623a63-s8&"), width=1300)
    again.until("document.getElementById('shown').textContent === '4 of 12 runs'")
    assert again.js("document.getElementById('group').checked") and "seed" in again.js(SHOWN)
    assert again.js("document.querySelector('[tabulator-field=train_s] input').value") == ">5.75"
    assert "1 ticked" in again.text
    page.js("history.back()")  # before the grouping
    page.until("!document.getElementById('group').checked")
    assert "seed" in page.js(SHOWN)
    page.js("history.back()")
    page.until("!document.getElementById('column-seed').checked")
    assert page.js("document.getElementById('shown').textContent") == "12 of 12 runs"
    assert page.errors == [] and again.errors == []


@needs_browser
def test_groups_show_mean_sd_and_n_and_open_by_keyboard(browser, results):
    for seed, train_s in ((1, 5.0), (2, 6.0), (3, 7.0)):
        add(results, seed, metrics={"train_s": train_s}, config_id="aaaaaaaa")
    add(results, 4, metrics={"train_s": 99.0}, config_id="aaaaaaaa", validity="invalid")
    write(results)
    page = browser.open(f"file://{results}/site/index.html#group=config", width=1300)
    page.until("document.querySelectorAll('.tabulator-group').length === 2")
    head = page.js("document.querySelector('.tabulator-group').innerText")
    assert "aaaaaaaa" in head and "n = 3, 1 not counted" in head
    calc = page.js(
        "document.querySelector('.tabulator-calcs [tabulator-field=train_s]').innerText.replace(/\\s+/g, ' ')"
    )
    assert calc == "6.00 ± 1"
    assert (
        page.js("document.querySelectorAll('.tabulator-row:not(.tabulator-group):not(.tabulator-calcs)').length") == 0
    )
    page.js("document.querySelector('.group button').focus()")
    page.press("Enter")
    page.until("document.querySelectorAll('.tabulator-row:not(.tabulator-group):not(.tabulator-calcs)').length === 4")
    page.until("document.querySelector('.group button').getAttribute('aria-expanded') === 'true'")
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert "n = 3, 1 not counted" in page.js(f"{PAPER}.innerText")
    assert page.errors == []


def downloaded(path):
    real_runs.wait_for(path.exists, 10)
    return path.read_text()


@needs_browser
def test_a_file_holds_exactly_what_is_seen(browser, many, tmp_path):
    page = browser.open(f"{many.as_uri()}#cols=val_loss,train_s,run_id&sort=-train_s&f.train_s=>5.95", width=1300)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.until("document.getElementById('shown').textContent === '2 of 12 runs'")
    page.click("#csv")
    assert downloaded(tmp_path / "runs.csv").splitlines() == [
        "val_loss,train_s,run_id",
        "4.25,6.1,20261122T000011Z-gpt2-adamw-48623a63-s11",
        "4.25,6,20261122T000010Z-gpt2-adamw-48623a63-s10",
    ]
    page.js("document.getElementById('group').click()")
    page.click("#json")
    (group,) = json.loads(downloaded(tmp_path / "runs.json"))
    assert group["n"] == 2 and group["train_s_mean"] == pytest.approx(6.05) and group["config_id"] == "48623a63"
    assert group["train_s_sd"] == pytest.approx(0.1 / 2**0.5) and len(group["run_ids"]) == 2
    assert page.errors == []


@needs_browser
def test_a_short_id_copies_the_whole(browser, many):
    page = browser.open(many, width=1300)
    page.js("document.addEventListener('copy', (event) => (window.copied = event.clipboardData.getData('text/plain')))")
    page.js("document.querySelector('[tabulator-field=run_id] .copy').focus()")
    page.press("Enter")
    assert page.js("window.copied") == "20261122T000011Z-gpt2-adamw-48623a63-s11"
    page.js("window.copied = null; window.ids = document.querySelectorAll('[tabulator-field=run_id] .id')")
    page.js("getSelection().selectAllChildren(window.ids[1])")
    page.js("document.execCommand('copy')")
    assert page.js("window.copied") == "20261122T000010Z-gpt2-adamw-48623a63-s10"
    expected = "20261122T000011Z-gpt2-adamw-48623a63-s11"
    assert page.js("document.querySelector('[tabulator-field=run_id] .id').title") == expected


@needs_browser
def test_a_run_opens_with_its_charts_and_no_code_of_the_record(browser, many):
    page = browser.open(many, width=1300)
    page.click("[tabulator-field=run_id] .id a")
    page.until("document.querySelectorAll('.u-over').length >= 4")
    assert "s11" in page.text and page.errors == []
    evil = browser.open(f"{many.parent.as_uri()}/runs/20261122T000003Z-gpt2-adamw-48623a63-s3.html")
    evil.until("document.querySelectorAll('.u-over').length >= 4")
    assert evil.js("document.title").startswith("</script>") and evil.errors == []


@needs_browser
def test_ticked_runs_lead_to_their_curves(browser, many):
    page = browser.open(many, width=1300)
    assert page.js("document.getElementById('curves').getAttribute('href')") == "curves.html"
    for place in (1, 2, 3):
        page.click(f".tabulator-row:nth-child({place}) input[type=checkbox]")
        # the first tick moves the rows: a click that is on its way would miss
        page.until(f"document.getElementById('of-ticked').textContent.startsWith('{place} ticked')")
    page.click("#curves")
    page.until("document.querySelectorAll('.u-over').length === 1")
    page.until("document.querySelectorAll('#chosen tr').length === 3")
    assert page.js("document.querySelector('#chosen a').getAttribute('href')").startswith("runs/2026112")
    assert page.errors == []


@needs_browser
def test_the_records_are_drawn_on_the_index(browser, raced):
    page = browser.open(write(raced), width=1300)
    page.until("document.querySelectorAll('[data-chart=records-0] .u-over').length === 1")
    assert page.errors == []
