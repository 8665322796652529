"""Pages of traces: what is drawn, by hand and from the shared traces, and the page in a browser."""

import json

import pytest
import traces
from browser import Browser, needs_browser
from traces import event, launched, step, write

from bench.analysis.trace import analysis, load, window
from bench.analysis.trace.device_time import types
from bench.cli import analyze
from bench.report import trace_page
from bench.web import document, waterfall

MAX_PAGE_BYTES = 3_000_000
SETS = sorted(path.name for path in (traces.SHARED / "files").iterdir()) if traces.SHARED.is_dir() else []


def two_ranks(folder):
    """Rank 1 computes until 140 and comes last: rank 0 waits for it from 100 on; both end 10 after it came."""
    for number, (busy, start, dur) in enumerate(((40, 100, 50), (60, 140, 10))):
        work = [*launched("gemm", 60, busy, 50, 1), *launched("ncclDevKernel_AllReduce", start, dur, 55, 2, stream=9)]
        meta = {"distributedInfo": {"rank": number, "world_size": 2}}
        write(folder / f"rank{number}.json", [*work, *launched("after", 151, 4, 146, 3)], **meta)
    return load.find(folder)


def test_ranks_stand_side_by_side_around_the_collective_for_which_one_waited_longest(tmp_path):
    (report,) = analysis.analyze_files(two_ranks(tmp_path)).values()
    picture = report["overall"]["pictures"]["collective"]
    assert (picture["name"], picture["late_rank"], picture["wait_us"]) == ("ncclDevKernel_AllReduce", 1, 40.0)
    # half of the longest kernel's 50 us is shown before it, 7.5 after it: from 75 us on each rank's own clock
    bars = [
        [(picture["names"][name], kind, round(start), round(us)) for start, us, kind, name in lane["bars"]]
        for lane in picture["lanes"]
    ]
    assert picture["us"] == pytest.approx(82.5, abs=0.01)
    assert bars == [
        [("gemm", 0, 0, 25), ("after", 0, 76, 4), ("ncclDevKernel_AllReduce", 1, 25, 50)],
        [("gemm", 0, 0, 45), ("after", 0, 76, 4), ("ncclDevKernel_AllReduce", 1, 65, 10)],
    ]


def test_bars_too_thin_to_see_are_one_bar_that_says_how_many_it_holds(tmp_path):
    """1,000 kernels of 1 us in 4 us each, before a collective of 100 ms, around which is shown."""
    for rank, late_us in enumerate((0, 50_000)):
        rows = [row for n in range(1000) for row in launched("k", 4 * n, 1, 4 * n - 1, n + 1)]
        rows += launched("ncclDevKernel_AllReduce", 4000 + late_us, 100_000 - late_us, 3999 + late_us, 2000)
        write(tmp_path / f"rank{rank}.json", rows, distributedInfo={"rank": rank, "world_size": 2})
    picture = traces.analysed(load.find(tmp_path))["overall"]["pictures"]["collective"]
    bars = picture["lanes"][0]["bars"]
    assert 3900 < sum(us for _, us, kind, _ in bars if kind == 0) <= 4000
    assert len(bars) < 20 and any(name.endswith("of these") for name in picture["names"])


def test_a_waterfall_goes_from_one_total_to_the_other():
    steps = [("grew", 1.5, ""), ("shrank", -2.5, "")]
    drawn = waterfall.from_changes("t", "", (("A", 10.0), ("B", 9.0)), steps)
    assert drawn.low == 6.5  # the smallest total, less the reach of the changes
    ends = [(round(bar.begin, 6), round(bar.end, 6), bar.kind) for bar in drawn.bars]
    assert ends == [(6.5, 10, "total"), (10, 11.5, "more"), (11.5, 9, "less"), (6.5, 9, "total")]
    assert 'style="margin-left:70.00%;width:30.00%"' in drawn.html(), "from 10 to 11.5 of a scale from 6.5 to 11.5"
    signs = [line.split()[-1] for line in drawn.text(is_md=False).splitlines()[2:]]
    assert signs == ["#" * 21, "." * 21 + "#" * 9, "." * 15 + "#" * 15, "#" * 15]
    assert drawn.text(is_md=True).splitlines()[3].startswith("|--------|---")  # a table of Markdown has a head
    assert waterfall.Waterfall("t", "", []).text(False) == waterfall.Waterfall("t", "", []).html() == ""


def test_foreign_names_become_no_markup(tmp_path):
    bad = "<script>alert(1)</script>"
    rows = [*launched(bad, 20, 10, 5, 1), *launched(bad, 90, 10, 80, 2), event("cpu_op", bad, 0, 100)]
    report = traces.analysed([write(tmp_path / "a.json", rows)])
    html = trace_page.document({bad: report}).html()
    assert bad not in html and "&lt;script&gt;alert" in html


def test_a_trace_of_the_cpu_alone_has_a_page_of_its_operators(tmp_path):
    rows = [step(1, 0, 100), event("cpu_op", "aten::mm", 10, 50), event("user_annotation", "forward", 5, 60)]
    report = traces.analysed([write(tmp_path / "a.json", rows)])
    assert [panel.id for panel in trace_page.panels_of(report, "")] == ["operators", "phases"]
    assert "no device rows, only operators" in trace_page.document({"x": report}).html()


def test_the_page_of_a_run_has_the_sections_of_its_analysis_and_says_when_it_is_an_older_one(tmp_path):
    (report,) = analysis.analyze_files(two_ranks(tmp_path)).values()
    (tmp_path / "analysis.json").write_text(json.dumps(report))
    part = trace_page.section_of_run(tmp_path)
    html = part.html()
    assert "Ranks around the slowest collective" in html and "<h2>Trace</h2>" in html
    assert "trace-collective" in [panel.id for panel in document.Document("", [], [part]).drawings]
    for old in ({"ranks": {"0": {"kernels": []}}}, {"ranks": {}}, {"ranks": 3}):
        (tmp_path / "analysis.json").write_text(json.dumps(old))
        assert "not of this version" in trace_page.section_of_run(tmp_path).html()
    (tmp_path / "analysis.json").unlink()
    part = trace_page.section_of_run(tmp_path)
    assert part.html() == "" and document.Document("", [], [part]).drawings == []


def test_analyze_writes_a_page_and_markdown(tmp_path, capsys):
    folder = two_ranks(tmp_path)[0].parent
    page, markdown = tmp_path / "out" / "page.html", tmp_path / "out" / "words.md"
    assert analyze.main([str(folder), "--html", str(page), "--md", str(markdown)]) == 0
    assert "Who waited for whom" in page.read_text() and markdown.read_text().startswith("# Trace analysis: ")
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="explain A B"):
        analyze.main(["diff", str(folder), str(folder)])


# ---- real ones


@pytest.mark.slow
@traces.needs_shared
def test_every_shared_trace_has_a_page_of_bounded_size():
    for name in SETS:
        for report in analysis.analyze_files(load.find(traces.SHARED / "files" / name)).values():
            assert len(trace_page.document({name: report}).html()) < MAX_PAGE_BYTES / 3, name


@traces.needs_shared
@needs_browser
def test_the_page_of_eight_ranks_in_a_browser_wide_and_narrow_light_and_dark(tmp_path):
    page = tmp_path / "page.html"
    assert analyze.main([str(traces.SHARED / "files" / "modded_8xh100"), "--html", str(page)]) == 0
    with Browser() as browser:
        for width, dark in ((1300, False), (400, True)):
            shown = browser.open(page, dark=dark, width=width)
            shown.until("document.querySelectorAll('.lanes .lane svg').length > 40")
            assert shown.errors == []
            assert shown.js("document.documentElement.scrollWidth") <= width  # nothing sticks out
            # the eight ranks of the timeline, and the words of the one that was late
            assert "rank 1 came last" in shown.text and "waited 6.01 ms" in shown.text


# ---- reading


@traces.needs_shared
def test_files_analysed_by_processes_of_their_own_give_the_same_answer(monkeypatch):
    paths = load.find(traces.SHARED / "files" / "param_dlrm_8rank")[:3]
    alone = traces.analysed(paths)
    monkeypatch.setattr(load, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(load, "usable_cpus", lambda: 2)
    (report,) = analysis.analyze_files(paths).values()
    assert report == alone


def test_a_rank_of_device_rows_alone_has_their_names(tmp_path):
    rank = load.load(write(tmp_path / "a.json", [*launched("x", 20, 10, 5, 1), *launched("y", 40, 10, 6, 2)]))
    rows = window.device_rows(rank)
    few = rank.only(rows[1:])
    assert (few.names, few.name.tolist(), few.ts.tolist()) == (["y"], [0], [40_000])
    assert types(few, window.device_rows(few)).tolist() == [0]
