"""./run.sh compare A B --html PATH: one file with the verdict, its picture and the curves, of logs as of runs."""

import re

import pytest
from browser import Browser, needs_browser

from bench.cli import compare as cli

NUM_STEPS = 20


def log(step_ms, final_loss):
    """A log as modded-nanogpt writes it: each step takes step_ms."""
    lines = [f"step:0/{NUM_STEPS} val_loss:10.8258 train_time:0ms step_avg:nanms"]
    for step in range(1, NUM_STEPS + 1):
        lines.append(
            f"step:{step}/{NUM_STEPS} train_loss:{10 - step / 4:.4f} train_time:{step * step_ms:.0f}ms "
            f"step_avg:{step_ms:.2f}ms"
        )
    end = f"train_time:{NUM_STEPS * step_ms:.0f}ms step_avg:{step_ms:.2f}ms"
    return "\n".join([*lines, f"step:{NUM_STEPS}/{NUM_STEPS} val_loss:{final_loss} {end}"]) + "\n"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Two folders of three logs each: theirs steps in 100 ms, ours in 90."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    for name, step_ms in (("theirs", 100), ("ours", 90)):
        (tmp_path / name).mkdir()
        for num in range(3):
            (tmp_path / name / f"{num}.txt").write_text(log(step_ms + num / 2, 5.0 + num / 100))
    return tmp_path


def page_of(logs, capsys):
    path = logs / "pages" / "verdict.html"
    assert cli.main([str(logs / "theirs"), str(logs / "ours"), "--html", str(path)]) == 0
    assert capsys.readouterr().out.strip().endswith("verdict.html")
    return path


def test_two_folders_of_logs_become_one_page_to_send(logs, capsys):
    html = page_of(logs, capsys).read_text()
    order = (">not interleaved</span>", "<dt>A</dt>", "<dt>B</dt>", "<svg", ">-9.95 %", "data-chart", "<h2>Runs</h2>")
    assert sorted(order, key=html.index) == list(order)  # 20 * 90.5 ms against 20 * 100.5 ms; no log has a date
    assert re.search(r"<dd>[^<]*/theirs</dd>", html) and str(logs) not in html  # no path of this machine
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)


@needs_browser
def test_the_page_shows_its_verdict_on_its_first_screen(logs, capsys):
    path = page_of(logs, capsys)
    with Browser() as browser:
        for width, height in ((1300, 900), (400, 800)):
            shown = browser.open(path, width=width, height=height)
            assert shown.errors == [] and len(shown.requests) == 1
            assert shown.js("document.querySelector('.verdict .badge').getBoundingClientRect().bottom < innerHeight")
            assert shown.js("document.documentElement.scrollWidth <= innerWidth")
            num_charts = shown.js("document.querySelectorAll('[data-chart]').length")
            assert num_charts >= 2 and shown.js("document.querySelectorAll('.u-over').length") == num_charts


def test_a_path_that_cannot_be_written_is_refused_by_its_option(logs):
    with pytest.raises(ValueError, match="--html .*0.txt/page.html: cannot be written"):
        cli.main([str(logs / "theirs"), str(logs / "ours"), "--html", str(logs / "ours" / "0.txt" / "page.html")])
