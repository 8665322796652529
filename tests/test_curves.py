"""Curves of many runs: what is read and thinned, what a site keeps, what overlay and charts do in a browser."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from browser import browser, needs_browser  # noqa: F401  a fixture
from kept_records import COMPLETE, EVIL

from bench.base import atomic
from bench.cli import report as cli
from bench.compare import selection
from bench.record import step_files, store
from bench.report import curves
from bench.report.site import files
from bench.web.chart import chart, series_of
from bench.web.page import ASSETS, figure, page, table, tag

HEAD = "step,flags,tokens,lr,train_loss,val_loss,step_ms\n"


def steps(folder, num, ms=100.0, loss=4.0, val_every=10):
    """Writes steps.csv of a run whose train_loss falls by 0.01 a step from `loss`, and whose val_loss is the same."""
    lines = [f"0,,0,,,{loss},"]
    for step in range(1, num + 1):
        now = loss - 0.01 * step
        lines.append(f"{step},,{step * 1024},0.001,{now!r},{now if step % val_every == 0 else ''},{ms}")
    (folder / "steps.csv").write_text(HEAD + "\n".join(lines) + "\n")


def add(results, seed, config="48623a63", name="gpt2-adamw", race=None, **options):
    """Makes a run folder with these steps.  race: (race id, arm)."""
    run = json.loads((COMPLETE / "run.json").read_text())
    run |= {"seed": seed, "name": name, "config_id": config, "started_at": f"2026-11-22T00:00:{seed:02d}.000Z"}
    run["run_id"] = f"20261122T0000{seed:02d}Z-run-{config}-s{seed}"
    run["race"] = race and {"race_id": race[0], "arm": race[1], "discarded": False}
    folder = results / "cpu_nano" / run["run_id"]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    steps(folder, **({"num": 20} | options))
    return folder


# ---- steps.csv -> curves


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "0,,0,,,5.5,\n1,profiled,1024,0.1,5.0,,50.5\n",
        HEAD + "0,,0,,,5.5,\n1,,1024,0.1,5.0,,50.5\n2,,2048,0.1,4.0,,60",  # cut within its last number
        HEAD + "0,,0,,,5.5,\n1,,1024,0.1,5.0,,50.5\n1,,1024,,,4.5,\n",  # twice the same step
        HEAD + "2,,0,,,5.5,\n1,,1024,0.1,5.0,,50.5\n",  # not in order
        HEAD,
        "",
        None,
    ],
)
def test_columns_are_those_of_the_rows(tmp_path, text):
    if text is not None:
        (tmp_path / "steps.csv").write_text(text)
    rows = step_files.read(tmp_path)
    columns = step_files.read_columns(tmp_path, ["step", "flags", "tokens", "train_loss", "step_ms", "grad_norm"])
    assert columns == {name: [row.get(name) for row in rows] for name in columns}


def test_a_runs_curves_have_its_time_and_its_tokens_and_no_flagged_step_time():
    curve = curves.curves_of_run(COMPLETE)  # 50, 52, 60 (profiled) and 56 ms
    assert curve["every"] == 1
    assert curve["train"] == {
        "step": [1, 2, 3, 4],
        "tokens": [1024, 2048, 3072, 4096],
        "train_s": [0.05, 0.102, 0.162, 0.218],
        "train_loss": [5.0, 4.5, 4.0, 3.5],
        "step_ms": [50.0, 52.0, None, 56.0],
    }
    assert curve["val"]["step"] == [0, 2, 4] and curve["val"]["val_loss"] == [5.75, 4.75, 4.25]
    assert curve["val"]["train_s"] == [0.0, 0.102, 0.218]


def test_thinned_points_are_means_of_as_many_steps_and_the_last_validation_stays(tmp_path):
    steps(tmp_path, 20, val_every=1)
    curve = curves.curves_of_run(tmp_path, 5)
    assert curve["every"] == 4 and curve["train"]["step"] == [4, 8, 12, 16, 20]
    assert curve["train"]["train_loss"][0] == pytest.approx(3.975)  # mean of 3.99, 3.98, 3.97, 3.96
    assert curve["val"]["step"] == [0, 5, 10, 15, 20] and curve["val"]["val_loss"][-1] == pytest.approx(3.8)


def test_a_logs_time_is_the_printed_one_without_what_its_clock_took_back():
    rows = [
        {"step": 0, "val_loss": 10.0, "train_time_ms": 278.0},
        {"step": 1, "train_loss": 9.0, "train_time_ms": 42000.0, "flags": "untimed"},
        {"step": 2, "train_loss": 8.0, "step_ms": 176.0, "train_time_ms": 176.0},
        {"step": 3, "val_loss": 7.0, "step_ms": 176.0, "train_time_ms": 352.0, "train_time_at_val_ms": 353.0},
    ]
    curve = curves.curves_of_rows(rows)
    assert curve["train"]["train_s"] == [0.176, 0.176, 0.352] and curve["val"]["train_s"] == [0.176, 0.353]
    assert curves.curves_of_rows([{"step": 0, "val_loss": 3.0}])["val"]["train_s"] is None  # no time is known


def test_a_log_that_prints_the_time_of_some_steps_only_has_no_train_time_so_far():
    tenth = [{"step": 10 * num, "train_loss": 5.0, "step_ms": 100.0} for num in range(5)]
    assert curves.curves_of_rows(tenth)["train"]["train_s"] is None  # 100 ms were of one step in ten
    hole = [{"step": num, "train_loss": 5.0, "step_ms": None if num == 2 else 100.0} for num in range(1, 5)]
    assert curves.curves_of_rows(hole)["train"]["train_s"] is None
    hole[1]["flags"] = "untimed"  # its program's clock has it not either
    assert curves.curves_of_rows(hole)["train"]["train_s"] == [0.1, 0.1, 0.2, 0.3]


def test_a_site_of_many_runs_has_fewer_points_of_each():
    assert [curves.points_of(num) for num in (0, 1, 500, 2000, 10_000)] == [512, 512, 512, 128, 32]


def test_an_arm_is_drawn_from_its_runs_by_step_and_by_time(results):
    folders = [add(results, seed, ms=100.0 + seed, loss=4.0 + seed) for seed in range(2)]
    specs = curves.arm_charts({"A": folders, "B": []})
    assert [spec["title"] for spec in specs] == ["val_loss by step", "val_loss by time", "Step time"]
    assert specs[0]["arms"][0]["runs"][1] == {"x": [0, 10, 20], "y": [5.0, 4.9, 4.8]}
    assert specs[1]["arms"][0]["runs"][1]["x"] == [0.0, 1.01, 2.02]
    assert "band: minimum to maximum" in specs[0]["caption"]
    assert curves.arm_charts({"A": []}) == []


# ---- what a site keeps


def written(site):
    return {path.name: path.stat().st_mtime_ns for path in (site / "curves").glob("*.js")}


def test_only_files_with_a_changed_run_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "NUM_CURVE_FILES", 10)
    for seed in range(40):
        add(tmp_path, seed)
    runs, site = store.read_rows([tmp_path / "cpu_nano"]), tmp_path / "site"
    files.write_curves(site, runs)
    before = written(site)
    assert 8 <= len(before) <= 10
    files.write_curves(site, runs)
    assert written(site) == before
    steps(Path(runs[7][0]), 30)
    files.write_curves(site, runs)
    assert len(set(before.items()) ^ set(written(site).items())) == 2  # one file, as it was and as it is
    changed = written(site)
    files.write_curves(site, runs[:20] + runs[21:])  # a run is gone: the files of others stay
    assert len(set(changed.items()) ^ set(written(site).items())) <= 3
    files.write_curves(site, runs[:1])
    assert len(written(site)) == 1  # nothing stays of runs that are gone


def test_a_damaged_steps_file_costs_only_its_own_curves(tmp_path):
    for seed in range(2):
        add(tmp_path, seed)
    runs = store.read_rows([tmp_path / "cpu_nano"])
    (Path(runs[0][0]) / "steps.csv").write_bytes(b"step,\xff\n")
    assert files.write_curves(tmp_path / "site", runs).exists() and written(tmp_path / "site")


# ---- words


def test_each_word_is_an_arm_and_a_race_is_its_arms(results):
    a, b = add(results, 1), add(results, 2, config="aaaaaaaa")
    race = {"arms": {"A": {"runs": [f"cpu_nano/{a.name}"]}, "B": {"runs": [f"cpu_nano/{b.name}"]}}}
    folder = results / "races" / "some-race"
    folder.mkdir(parents=True)
    atomic.write_json(folder / "race.json", race)
    arms = selection.arm_from_each(["some-race", "aaaaaaaa", str(a)])
    expected = [("some-race:A", 1), ("some-race:B", 1), ("aaaaaaaa", 1), (str(a), 1)]
    assert [(arm.name, len(arm.rows)) for arm in arms] == expected


def test_several_words_make_one_page_and_markdown_is_refused(results, capsys, monkeypatch):
    for seed in (1, 2):
        add(results, seed)
    (results / "curves.html").symlink_to(results.parent / "elsewhere.html")
    with pytest.raises(ValueError, match="curves.html: is a link, through which no page is written"):
        cli.main(["s1", "s2"])
    (results / "curves.html").unlink()
    assert cli.main(["s1", "s2"]) == 0 and not (results.parent / "elsewhere.html").exists()
    html = (results / "curves.html").read_text()
    assert "curves.html" in capsys.readouterr().out and not re.search(r"""(src|href)=["']?(https?:)?//""", html)
    with pytest.raises(ValueError, match="--md with several words: it prints one run or race"):
        cli.main(["s1", "s2", "--md"])
    with pytest.raises(ValueError, match="no runs in .* yet"):
        monkeypatch.setenv("SPEEDRUN_RESULTS", str(results / "none"))
        cli.main(["--curves"])
    with pytest.raises(ValueError, match="nosuch: is not a path"):
        cli.main(["nosuch", "s1"])


# ---- colours

MACHADO = {  # Machado, Oliveira and Fernandes 2009, severity 1.0: linear RGB as it is seen
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour):
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour)))


def lab(rgb):
    red, green, blue = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_series_stand_out_from_the_page_and_from_each_other_with_every_colour_vision(block):
    """WCAG asks for a contrast of 3 of what is drawn; two colours 10 apart in Lab are distinguished side by side."""
    css = (ASSETS / "style.css").read_text()
    pages, colours = re.findall(r"--page: (#\w+)", css), re.findall(r"--series-\d: (#\w+)", css)
    ground, series = pages[block], colours[8 * block : 8 * block + 8]
    for colour in series:
        low, high = sorted((luminance(ground), luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour
    for vision, matrix in MACHADO.items():
        seen = {c: lab([sum(m * p for m, p in zip(row, linear(c))) for row in matrix]) for c in series}
        for first, second in itertools.combinations(series, 2):
            apart = sum((p - q) ** 2 for p, q in zip(seen[first], seen[second])) ** 0.5
            assert apart >= 10, (vision, first, second)


# ---- charts in a browser


def drawn(browser, tmp_path, *specs, **options):
    """A page with these charts; its global plots are what uPlot has of them."""
    path = tmp_path / "charts.html"
    path.write_text(page("charts", *map(figure, specs), data={"charts": specs}))
    shown = browser.open(path, **options)
    shown.js(
        "globalThis.plots = Object.fromEntries(JSON.parse(document.getElementById('charts').textContent).map((spec) =>"
        " [spec.id, charts.draw(document.querySelector(`[data-chart=${spec.id}]`), spec)])), 0"
    )
    return shown


@needs_browser
def test_axes_fit_the_data(browser, tmp_path):
    now_s = 1_795_305_600
    dates = {"dates": True}
    shown = drawn(
        browser,
        tmp_path,
        chart("one", "", "", "date", "s", [now_s], [series_of("r", [3.0], "points")]) | dates,
        chart("same", "", "", "date", "s", [now_s, now_s], [series_of("r", [3.0, 4.0], "points")]) | dates,
        chart("day", "", "", "date", "s", [now_s, now_s + 50_000], [series_of("r", [3.0, 4.0], "stepped")]) | dates,
        chart("cpu", "", "", "s", "CPU, %", [0.0, 1.5], [series_of("cpu", [100.0, 100.0], "line")]),
        chart("runs", "", "", "run", "s", [1, 2, 3], [series_of("A", [5.0, 5.5, 5.2], "points")]),
        chart("far", "", "", "step", "s", [0.0, 1.0], [series_of("A", [3.27, 3.29], "line")]),
        chart("log", "", "", "step", "s", [0.0, 1.0], [series_of("A", [3.27, 9.0], "line")]) | {"log_y": True},
    )

    def scale(id, axis):
        return shown.js(f"[plots.{id}.scales.{axis}.min, plots.{id}.scales.{axis}.max]")

    assert scale("one", "x") == [now_s - 43_200, now_s + 43_200]
    assert scale("same", "x")[1] - scale("same", "x")[0] <= 86_400
    low, high = scale("day", "x")
    assert now_s - 2_000 <= low <= now_s and now_s + 50_000 <= high <= now_s + 52_000
    assert scale("cpu", "y") == [0, 105]
    ticks = shown.js("plots.runs.axes[0]._splits")
    assert ticks and all(tick == int(tick) for tick in ticks)
    assert 3.26 < scale("far", "y")[0] < 3.27 and 3.29 < scale("far", "y")[1] < 3.30
    assert len(shown.js("plots.log.axes[1]._values.filter(Boolean)")) >= 3  # not only powers of ten
    assert shown.errors == []


@needs_browser
def test_a_point_says_its_label_and_opens_its_link(browser, tmp_path):
    (tmp_path / "run.html").write_text("<title>the run</title>")
    (tmp_path / "other.html").write_text("<title>other</title>")
    links, labels = ["other.html", "run.html", None], ["first", f"second {EVIL}", None]
    spec = chart("one", "", "", "run", "s", [1, 2, 3], [series_of("A", [5.0, 5.5, 5.2], "points", labels, links)])
    shown = drawn(browser, tmp_path, spec)
    x, y = shown.js(
        "(() => { const over = plots.one.over.getBoundingClientRect();"
        " return [over.x + plots.one.valToPos(2, 'x') + 5, over.y + plots.one.valToPos(5.5, 'y') + 5]; })()"
    )
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown.until("!document.querySelector('.tip').hidden")
    assert shown.js("document.querySelector('.tip').textContent") == labels[1]
    assert shown.js("document.title") == "charts"
    for kind in ("mousePressed", "mouseReleased"):
        shown.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    shown.until("document.title === 'the run'")
    shown = drawn(browser, tmp_path, spec)
    shown.js("document.querySelector('[data-chart=one]').focus()")
    shown.press("ArrowRight")
    shown.press("Enter")
    shown.until("document.title === 'other'")


@needs_browser
def test_the_legend_hides_a_series_with_its_band_by_mouse_and_by_key(browser, results, tmp_path):
    folders = [add(results, seed, loss=4.0 + seed) for seed in range(2)]
    shown = drawn(browser, tmp_path, curves.arm_charts({"A": folders})[0])
    assert shown.js("plots['arms-val_loss-step'].series.map((one) => one.show)") == [True] * 4
    head = ".u-series:nth-child(4) th"  # after x and the edges of the band
    assert shown.js(f"getComputedStyle(document.querySelector('{head}'), '::after').content") == "none"  # no colon
    assert shown.js("document.querySelector('.u-series:nth-child(4) td').textContent") == ""  # without a cursor
    shown.click(head)
    shown.until("plots['arms-val_loss-step'].series.slice(1).every((one) => !one.show)")
    assert shown.js(f"document.querySelector('{head}').getAttribute('aria-pressed')") == "false"
    shown.js(f"document.querySelector('{head}').focus()")
    shown.press("Enter")
    shown.until("plots['arms-val_loss-step'].series.every((one) => one.show)")


# ---- the overlay in a browser

LEGEND = (
    "[...document.querySelectorAll('.u-series:not(.edge)')]"
    ".map((row) => row.querySelector('th').textContent + ' ' + row.querySelector('td').textContent + ';').join(' ')"
)


def three_configs(results):
    """Two runs of config a, from 4.0 and 5.0 on, one of config b, twice as slow, and a failed one of config a."""
    add(results, 1, config="aaaaaaaa", name="alpha", loss=4.0)
    add(results, 2, config="aaaaaaaa", name="alpha", loss=5.0)
    add(results, 3, config="bbbbbbbb", name=EVIL, ms=200.0)
    failed = add(results, 4, config="aaaaaaaa", name="alpha", num=3, loss=9.0)
    run = json.loads((failed / "run.json").read_text()) | {"status": "failed", "validity": "invalid"}
    (failed / "run.json").write_text(json.dumps(run | {"failure": {"kind": "nan", "message": "", "hint": ""}}))


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_overlay_shows_mean_and_band_of_a_config_and_keeps_its_state_in_the_address(browser, results, dark):
    three_configs(results)
    cli.main([str(results), "--curves"])
    shown = browser.open(results / "curves.html", width=400, dark=dark)
    assert shown.js("document.documentElement.scrollWidth <= innerWidth")
    assert shown.js("document.querySelectorAll('#chosen tr').length") == 4

    def choose(id, value):
        shown.js(
            f"(() => {{ const one = document.getElementById('{id}'); one.value = '{value}';"
            " one.dispatchEvent(new Event('change')); })()"
        )

    choose("group", "config")
    shown.until(f"{LEGEND}.includes('alpha aaaaaaaa, n=2')")
    assert "1 run not complete" in shown.js("document.querySelector('figcaption').innerText")
    shown.js("document.querySelector('[data-chart=overlay]').focus()")
    for _ in range(3):
        shown.press("ArrowRight")
    shown.until(f"{LEGEND}.includes('step 20;')")
    assert "n=2 4.3 (3.8 to 4.8)" in shown.js(LEGEND)  # 3.8 and 4.8 after 20 steps
    assert shown.js("document.querySelector('.tip').textContent") == "alpha aaaaaaaa, n=2: 4.3"  # the line it is on
    choose("band", "sd")
    choose("x", "time")
    shown.js("document.querySelector('[data-chart=overlay]').focus()")
    for _ in range(9):
        shown.press("ArrowRight")
    shown.until(f"{LEGEND}.includes('train time, s 4;')")  # the slower config's 20 steps of 200 ms
    assert "4.3 (3.5929 to 5.0071)" in shown.js(LEGEND)  # sd of 3.8 and 4.8, ddof 1: 0.7071
    choose("yscale", "log")
    choose("from", "half")
    choose("smooth", "5")
    choose("y", "train_loss")
    shown.until("document.querySelector('figcaption').innerText.includes('smoothed: centred mean of 5 points')")
    address = shown.js("location.hash")
    expected = {"y=train_loss", "x=time", "group=config", "band=sd", "smooth=5", "from=half", "yscale=log"}
    assert set(address[1:].split("&")) == expected
    again = browser.open(f"{(results / 'curves.html').resolve().as_uri()}{address}")
    assert again.js("document.getElementById('smooth').value + document.getElementById('y').value") == "5train_loss"
    assert again.js("document.querySelector('figcaption').innerText.startsWith('train_loss by train time')")
    assert shown.errors == [] and again.errors == [] and len(again.requests) == 1
    assert shown.js("document.title") == "Curves" and shown.js("document.querySelectorAll('img').length") == 0


@needs_browser
def test_a_sites_overlay_loads_what_is_chosen_and_links_the_runs_pages(browser, results):
    three_configs(results)
    site = results / "site"
    shutil.copytree(ASSETS, site / "assets")
    names = ["20261122T000001Z-run-aaaaaaaa-s1", "20261122T000003Z-run-bbbbbbbb-s3"]
    files.write_curves(site, store.read_rows([results]), names)
    at = f"{(site / 'curves.html').resolve().as_uri()}#runs=-s3,aaaaaaaa-s1&group=run"
    shown = browser.open(at, width=800)
    shown.until("document.querySelectorAll('.u-over').length === 1")
    assert len([url for url in shown.requests if "/curves/" in url]) == 2 and shown.errors == []
    links = shown.js("[...document.querySelectorAll('#chosen a')].map((a) => a.href)")
    assert [link.rpartition("/")[2] for link in links] == [f"{name}.html" for name in names]
    shown.js("document.getElementById('search').focus()")
    shown.type("alpha -s2")
    shown.until("document.getElementById('number').textContent === '1 run'")
    shown.click("#found input")
    shown.until("document.querySelectorAll('#chosen tr').length === 3 && location.hash.includes('aaaaaaaa-s2')")
    shown.click("#chosen tr:nth-child(1) button")
    shown.until("document.querySelectorAll('#chosen tr').length === 2")
    shown.click("#clear")
    shown.until("document.querySelector('[data-chart=overlay]').innerText.startsWith('No run is chosen')")
    assert shown.js("location.hash") == "#runs=&group=run" and shown.errors == []


@needs_browser
def test_a_word_is_one_line_in_the_order_of_the_words_and_different_configs_are_no_arm(browser, results):
    for seed, config in ((1, "aaaaaaaa"), (2, "aaaaaaaa"), (3, "bbbbbbbb"), (4, "cccccccc"), (5, "cccccccc")):
        add(results, seed, config=config, name=config[:4])
    page_of = {}
    for name, named in (("arms", ["cccccccc", "aaaaaaaa"]), ("runs", ["000001Z", "000002Z"]), ("all", [str(results)])):
        cli.main([*named, "--curves", "--out", str(results / f"{name}.html")])
        page_of[name] = browser.open(results / f"{name}.html")
    names = "[...document.querySelectorAll('.u-series:not(.edge) th')].slice(1).map((one) => one.textContent)"
    assert page_of["arms"].js(names) == ["cccccccc, n=2", "aaaaaaaa, n=2"]
    assert page_of["runs"].js(names) == ["aaaa s1", "aaaa s2"]  # each of them was named
    assert page_of["all"].js(names) == ["aaaa s1", "aaaa s2", "bbbb s3", "cccc s4", "cccc s5"]


@needs_browser
def test_a_legend_has_the_colour_of_its_line_also_when_the_theme_changes(browser, tmp_path):
    spec = chart("one", "", "", "s", "s", [0.0, 1.0], [series_of(name, [1.0, 2.0], "line") for name in "ab"])
    shown = drawn(browser, tmp_path, spec)
    shown.click("#theme")
    swatch = "getComputedStyle(document.querySelector('.u-series:nth-child(3) .u-marker')).backgroundColor"
    red, green, blue = (int(part, 16) for part in re.findall("..", shown.js("charts.colourOf(1)")[1:]))
    assert shown.js(swatch) == f"rgb({red}, {green}, {blue})"


@needs_browser
def test_the_curves_of_several_words_become_pictures(results, tmp_path):
    for seed in (1, 2):
        add(results, seed, config=f"aaaaaaa{seed}")
    assert cli.main(["aaaaaaa1", "aaaaaaa2", "--png", "--out", str(tmp_path / "plots")]) == 0
    bytes_by_name = {path.name: len(path.read_bytes()) for path in (tmp_path / "plots").iterdir()}
    assert set(bytes_by_name) == {"arms-val_loss-step.png", "arms-val_loss-train_s.png", "arms-step_ms-step.png"}
    assert min(bytes_by_name.values()) > 20_000  # a page without its chart has 6 KB


@needs_browser
def test_an_arms_mean_goes_on_to_the_end_of_its_longest_run(browser, tmp_path):
    """One run falls from 4 to 2 in 2 s, one from 4 to 0 in 4 s: their mean is 4 at the start, 2 at 2 s, 1 at 4 s."""
    (tmp_path / "page.html").write_text(page("t", tag("h1", "t")))
    shown = browser.open(tmp_path / "page.html")
    runs = "[{x: [0, 2], y: [4, 2]}, {x: [0, 4], y: [4, 0]}]"
    joined = shown.js(f'joinedArms({{arms: [{{name: "A", runs: {runs}}}], band: "range"}})')
    (series,) = joined["series"]
    assert joined["x"] == [0, 2, 4] and series["y"] == [4, 2, 1]
    assert (series["low"], series["high"]) == ([4, 2, 0], [4, 2, 2])


@needs_browser
def test_tab_reaches_every_control_in_order_and_paper_is_light(browser, tmp_path):
    spec = chart("c", "A chart", "", "x", "y", [1, 2], [series_of("s", [1.0, 2.0], "line")])
    html = page("t", tag("h1", "t"), figure(spec), table(["a"], [[1]]), data={"charts": [spec]})
    (tmp_path / "page.html").write_text(html)
    shown = browser.open(tmp_path / "page.html", dark=True)
    reached = []
    for _ in range(6):
        shown.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(
            shown.js("document.activeElement.className || document.activeElement.id || document.activeElement.tagName")
        )
        if len(reached) < 6:
            assert shown.js("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
    assert reached == ["skip", "theme", "chart", "TH", "scroll", "BODY"]
    shown.js("dispatchEvent(new Event('beforeprint'))")
    assert shown.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown.js("dispatchEvent(new Event('afterprint'))")
    assert shown.js("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
