"""Pages of records: what they say, that no text of a record runs as code in them, and what a user's clicks do."""

import base64
import hashlib
import json
import pickle
import re
from pathlib import Path

import pytest
import snapshots
from browser import browser, needs_browser  # noqa: F401  a fixture
from kept_records import COMPLETE, EVIL, add, results  # noqa: F401  a fixture

from bench.cli import report as cli
from bench.report import png, run_charts, run_page
from bench.report.site import site
from bench.web import document
from bench.web.chart import thin
from bench.web.page import json_block, page, tag


def with_snapshots(results):
    """A run that recorded its memory: three readable snapshots of rank 0, one damaged, one of rank 1."""
    folder = results / "cpu_nano" / COMPLETE.name
    (folder / "memory").mkdir()
    for name in ("steps_rank0", "steps_rank1", "oom_rank0"):
        (folder / "memory" / f"{name}.pickle").write_bytes(pickle.dumps(snapshots.training()))
    (folder / "memory" / "alike_rank0.pickle").write_bytes(b"cut")
    return folder


# ---- what is drawn


def test_a_step_ends_when_the_steps_before_it_and_the_validations_have_ended():
    """Start at 1 s; validation until 2 s; two steps of 100 and 200 ms; validation until 4 s; a step of 300 ms."""
    rows = [{"step": 0}, {"step": 1, "step_ms": 100.0}, {"step": 2, "step_ms": 200.0}, {"step": 3, "step_ms": 300.0}]
    events = [
        {"event": "run_start", "t_ns": 1_000_000_000},
        {"event": "eval_stop", "t_ns": 2_000_000_000, "step": 0},
        {"event": "eval_stop", "t_ns": 4_000_000_000, "step": 2},
    ]
    assert run_charts.end_s(rows, events) == pytest.approx({0: 0.0, 1: 1.1, 2: 1.3, 3: 3.3})


def test_a_flagged_step_is_drawn_apart_and_in_no_median_or_distribution():
    steps = (1, 10.0, ""), (2, 30.0, "profiled"), (3, 20.0, "")
    rows = [{"step": step, "step_ms": ms, "flags": flags} for step, ms, flags in steps]
    chart = run_charts.step_time(rows, {1: 0.01, 2: 0.04, 3: 0.06})
    assert [line["y"] for line in chart["series"]] == [[10.0, None, 20.0], [None, 30.0, None]]
    assert chart["caption"].startswith("median 15.00 ms")
    plain = [{"step_ms": float(ms), "flags": ""} for ms in range(1, 101)]
    assert sum(run_charts.distribution([*plain, {"step_ms": 999.0, "flags": "profiled"}])["series"][0]["y"]) == 100
    assert run_charts.distribution([{"step_ms": 5.0}] * 3)["series"][0]["y"][0] == 3  # all alike: one bar


def test_thinning_keeps_the_extremes():
    values = [1.0] * 50_000
    values[33_333], values[44_444] = 9.0, -9.0
    keep = thin(values, 1000)
    assert len(keep) <= 1002 and {33_333, 44_444, 0, 49_999} <= set(keep)
    assert thin([1.0] * 1000, 1000) is None


# ---- what a page holds


def test_text_is_escaped_wherever_it_stands():
    html = page(EVIL, tag("p", EVIL, title=EVIL), data={"charts": [EVIL]})
    assert "<img" not in html and "<script>document" not in html
    assert "<" not in json_block({"a": "<!--<script>", "b": "\u2028"})


def test_only_the_pages_own_scripts_may_run():
    html = page("x")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    sources = re.findall(r"<script>(.*?)</script>", html, re.S)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'" for source in sources}
    assert sources and hashes == set(re.search(r"script-src ([^;]*);", policy).group(1).split())
    assert policy.startswith("default-src 'none'")


def test_the_page_of_a_run_begins_with_its_verdict_and_fits_in_a_mail():
    html = run_page.html(COMPLETE)
    assert len(html.encode()) < 2 * 2**20
    assert html.index("val_loss 4.2500 after 4 steps in 0.22 s") < html.index("data-chart") < html.index("Environment")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)


def test_a_run_that_recorded_its_memory_says_who_held_it(results):
    """The damaged one is named, and of what does not fit the number is shown."""
    html = run_page.html(with_snapshots(results))
    shown = html[html.index("<h2>Memory</h2>") : html.index("<h2>Files</h2>")]
    assert re.findall(r"<h3>(.*?)</h3>", shown) == ["alike_rank0.pickle", "oom_rank0.pickle", "steps_rank0.pickle"]
    assert "It cannot be read" in shown and "Not shown: 1 more in the folder." in shown
    assert shown.count("models/gpt2.py:45 forward") == 2 and shown.count("<dd>42.0 MiB</dd>") == 2
    assert "<h2>Memory</h2>" not in run_page.html(COMPLETE)


def test_a_run_without_a_gpu_shows_what_its_process_held(results):
    folder = results / "cpu_nano" / COMPLETE.name
    (folder / "memory").mkdir()
    marks = {
        "marks": [[1000.0, "step 1"], [3000.0, "backward"]],
        "rss_bytes": [2**20, 3 * 2**20],
        "what": "rss",
        "rank": 0,
    }
    (folder / "memory" / "steps_rank0.rss.json").write_text(json.dumps(marks))
    shown = run_page.memory_of_run(folder)
    (drawn,), html = document.Document("", [], [shown]).charts, shown.html()
    assert (drawn["x"], drawn["series"][0]["y"]) == ([0.0, 2.0], [1.0, 3.0])
    assert "largest 3.0 MiB" in html and "keeps no history of allocations" in html


def test_a_run_in_markdown_cannot_break_out_of_its_table(results, capsys):
    cli.main([str(add(results, 0, name="a|b\n<b>`x`")), "--md"])
    markdown = capsys.readouterr().out
    assert markdown.startswith("**a\\|b \\<b\\>\\`x\\`**, seed 0")
    assert re.search(r"^\| +4\.2500 \|", markdown, re.M)


def test_where_a_page_lies_is_json_alone_for_programs(results, tmp_path, monkeypatch, answer_of):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results))
    folder = add(results, 0)
    for arguments, key in (
        ([folder], "page"),
        ([results, "--out", tmp_path / "site"], "site"),
        ([folder, "--curves"], "page"),
    ):
        paths = answer_of(cli, *arguments)
        assert [*paths] == [key] and Path(paths[key]).is_absolute() and Path(paths[key]).is_file()


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run in it yet"):
        cli.main([str(tmp_path)])
    with pytest.raises(ValueError, match="nowhere: is not a path"):
        cli.main([str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="it works for a single run or race: name one"):
        cli.main([str(tmp_path), "--png"])
    for options in (["--png"], ["--out", "x.md"]):
        with pytest.raises(ValueError, match=f"{options[0]} with --md: they cannot be combined"):
            cli.main([str(COMPLETE), "--md", *options])


def test_the_vendored_scripts_are_the_published_ones():
    """Their sha256 is that of uplot-1.6.32.tgz and tabulator-tables-6.5.3.tgz of npm, source-map comments aside."""
    hashes = json.loads((site.ASSETS / "sha256.json").read_text())
    assert {name: hashlib.sha256((site.ASSETS / name).read_bytes()).hexdigest() for name in hashes} == hashes


# ---- in a browser


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_runs_page_draws_its_charts_offline_and_says_nothing_on_the_console(browser, results, tmp_path, dark):
    path = tmp_path / "report.html"
    cli.main([str(with_snapshots(results)), "--out", str(path)])
    assert path.stat().st_size < 2e6
    shown = browser.open(path, width=390, dark=dark)  # a narrow screen
    assert shown.errors == [] and len(shown.requests) == 1
    num_charts = shown.js("document.querySelectorAll('[data-chart]').length")
    assert num_charts >= 4 and shown.js("document.querySelectorAll('.u-over').length") == num_charts
    assert shown.js("document.documentElement.scrollWidth <= innerWidth")
    shown.js("document.querySelector('[data-chart=loss]').focus()")
    shown.press("ArrowRight")
    shown.until(
        "document.querySelector('[data-chart=loss] .u-legend').textContent.replace(/\\s+/g, '').startsWith('step0')"
    )
    before = shown.js("getComputedStyle(document.body).backgroundColor")
    shown.click("#theme")
    assert shown.js("getComputedStyle(document.body).backgroundColor") != before


# ---- pictures


@needs_browser
def test_every_chart_of_a_run_becomes_a_picture(results, tmp_path, capsys):
    folder, out = add(results, 1), tmp_path / "deep" / "plots"
    assert cli.main([str(folder), "--png", "--out", str(out)]) == 0
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(written) == {f"{spec['id']}.png" for spec in run_page.document(folder).charts} and len(written) >= 4
    assert len(capsys.readouterr().out.splitlines()) == len(written)
    for content in written.values():
        assert content.startswith(b"\x89PNG")
        width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
        assert width == 1920 and (height - 2 * png.HEIGHT_PX) % (2 * png.LEGEND_PX) == 0  # no blank space below
        assert len(content) > 20_000  # a page without its chart has 6 KB


def test_a_picture_replaces_a_picture_of_ours_alone(results, tmp_path, monkeypatch):
    picture = b"\x89PNG" + bytes(99)

    def take(command, **_):
        Path(next(word for word in command if "--screenshot=" in word).partition("=")[2]).write_bytes(picture)

    monkeypatch.setattr(png, "CHROMIUM", "chromium")
    monkeypatch.setattr(png.subprocess, "run", take)
    folder = add(results, 1)
    for _ in range(2):
        assert cli.main([str(folder), "--png", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").read_bytes().replace(png.MARK, b"") == picture
    (tmp_path / "loss.png").write_bytes(picture)
    with pytest.raises(ValueError, match="loss.png: would be replaced, and has no mark of this program"):
        cli.main([str(folder), "--png", "--out", str(tmp_path)])
    assert (tmp_path / "loss.png").read_bytes() == picture
    for _ in range(2):  # also over one that an earlier version made
        (folder / "plots").mkdir(exist_ok=True)
        (folder / "plots" / "loss.png").write_bytes(picture)
        assert cli.main([str(folder), "--png"]) == 0


def test_a_link_in_somebody_elses_record_takes_no_page(results, tmp_path):
    folder, page = add(results, 1), tmp_path / "report.html"
    (folder / "report.html").symlink_to(page)
    with pytest.raises(ValueError, match="report.html: is a link, through which no page is written"):
        cli.main([str(folder)])
    assert not page.exists()
    assert cli.main([str(folder), "--out", str(folder / "report.html")]) == 0 and page.exists()  # the user named it


def test_without_a_browser_pictures_are_refused_with_what_to_try(monkeypatch, tmp_path):
    monkeypatch.setattr(png, "CHROMIUM", None)
    with pytest.raises(ValueError, match="no chromium or google-chrome on PATH: install one, or open the page"):
        cli.main([str(COMPLETE), "--png", "--out", str(tmp_path)])
