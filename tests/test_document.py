"""One Document in four forms, whose foreign text does nothing in any, and the forest plot: what is drawn where."""

import json
import re

import pytest
from browser import Browser, needs_axe, needs_browser
from kept_records import EVIL

from bench.web import document, forest
from bench.web.chart import chart, series_of
from bench.web.document import Document, Hint, Lines, Section, Table, Verdict, badge, code, link
from bench.web.forest import Panel, Row
from bench.web.page import Safe

ROWS = [[f"row {number}", f"{number}.5"] for number in range(5)]
SPEC = chart("c", "A chart", "", "x", "y", [1, 2], [series_of("s", [1.0, 2.0], "line")])
DRAWN = document.Drawn("d", "A drawing", Safe("<svg></svg>"), 100)


@pytest.fixture
def answer():
    blocks = [
        Lines([["all of it: ", code("lr=0.1")], "and more"]),
        Section("Numbers", [Table(("name", "value"), ROWS, (False, True), limit=3, more=": --json has all")]),
        Section("Folded", [Lines(["inside"])], is_folded=True),
        Section("Drawn", [document.Picture(DRAWN), document.Chart(SPEC)]),
        Section("Without anything", []),
        Section("For a page", [Lines(["page only"])], is_page_only=True),
        Hint("--why shows more"),
    ]
    verdict = Verdict("B is 2 % faster than A", "faster", notes=["seen before"])
    return Document("B against A", [verdict], blocks, {"n": 5})


def test_the_verdict_leads_every_form(answer):
    assert answer.terminal().startswith("verdict: FASTER  B is 2 % faster than A\n         seen before\n\n")
    first = "# B against A\n\nverdict: **FASTER**  B is 2 % faster than A  \nseen before\n\n"
    assert answer.markdown().startswith(first)
    page = answer.html()
    assert page.index("<h1>B against A</h1>") < page.index('<span class="badge good">faster</span>B is 2 %')
    assert page.index("seen before") < page.index("all of it")
    assert json.loads(answer.json()) == {"n": 5}


def test_a_text_is_short_and_a_page_is_whole(answer):
    for text in (answer.terminal(), answer.markdown()):
        assert "row 2" in text and "row 3" not in text and "and 2 more: --json has all" in text
        assert "inside" in text and "page only" not in text
        assert "Drawn" not in text and "Without anything" not in text  # no heading of nothing
    page = answer.html()
    assert "row 4" in page and '<td class="number">4.5</td>' in page and "page only" in page
    assert "<details><summary>Folded</summary>" in page and "Without anything" not in page
    assert "--why" in answer.terminal() and "--why" not in answer.markdown() and "--why" not in page
    assert "all of it: <code>lr=0.1</code><br>and more" in page and "all of it: lr=0.1\nand more" in answer.terminal()


def test_its_pictures_are_found_however_deep_they_lie(answer):
    assert [spec["id"] for spec in answer.charts] == ["c"] and [drawn.id for drawn in answer.drawings] == ["d"]


def test_no_verdict_and_several():
    none = Document("x", [Verdict("no verdict: it was abandoned", "")], [])
    assert none.terminal() == "no verdict: it was abandoned" and 'class="badge' not in none.html()
    c_verdict = Verdict("inconclusive: C is +1 %", "inconclusive", "C")
    both = Document("x", [c_verdict, Verdict("no verdict: n is 1", "inconclusive", "D")], [])
    assert both.terminal().splitlines()[1] == "verdict: NO VERDICT  D: n is 1"  # of which of the two
    assert "verdict: **NO VERDICT**  D: n is 1" in both.markdown()
    assert "C: " not in both.terminal()  # the sentence says it
    assert '<p class="verdict"><span class="badge doubt">inconclusive</span>C is +1 %' in both.html()  # each word once


def test_foreign_text_does_nothing_in_any_form():
    cells = [EVIL, code(EVIL), badge(EVIL), link(EVIL, "a b")]
    cells += [document.named(EVIL, EVIL), document.coloured(EVIL, "bad")]
    blocks = [Lines([EVIL]), document.Bullets([EVIL]), Table([EVIL] * 6, [cells]), Section(EVIL, [Hint(EVIL)])]
    blocks += [document.Arms([(EVIL, [EVIL], EVIL)]), document.Verbatim(f"{EVIL}\x1b[2J````", "diff")]
    foreign = f"{EVIL}\x1b[2J"
    blocks += [Table(["x"], [["1"], ["2"]], caption=foreign, limit=1, more=foreign)]
    verdicts = [Verdict(EVIL, "faster", EVIL, [EVIL]), Verdict("", foreign)]
    evil = Document(EVIL, verdicts, blocks, about=[EVIL])
    assert "<script>document" not in evil.html() and "<img" not in evil.html()
    assert "\x1b" not in evil.terminal() + evil.markdown()
    before, _, verbatim = evil.markdown().partition("````diff")
    inside, _, after = verbatim.partition("\n````\n")  # a fence is a line of its own, or it is not closed
    assert "<script" not in (before + after).replace("\\<", "").lower() and inside and "and 1 more" in after
    assert evil.markdown().count("````") == 2


@needs_browser
@needs_axe
def test_axe_passes_a_document_and_finds_an_empty_head_and_dark_words(answer, tmp_path):
    page, spoilt = tmp_path / "page.html", tmp_path / "spoilt.html"
    page.write_text(answer.html())
    spoilt.write_text(answer.html().replace(">name</th>", "></th>").replace("<h1", '<h1 style="color: #333"'))
    with Browser() as browser:
        assert browser.open(page).violations() == []
        with pytest.raises(AssertionError, match=r"(?s)color-contrast: .*empty-table-header: "):
            browser.open(spoilt)


TIME = Panel("Train time", "%", [Row("B", -0.5, -0.73, -0.27, 1)], (-0.5, 0.5), 0.25, ("faster", "slower"))


def marks(panel):
    """The shapes of the drawing -> {"class series": [attributes as a dict]}."""
    by_class = {}
    for attributes in re.findall(r"<(?:rect|line|circle|polyline) ([^>]*)>", forest.plot([panel])):
        named = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        series = re.findall(r"series-\d", named.get("style", ""))
        by_class.setdefault(" ".join([named["class"], *series]), []).append(named)
    return by_class


def test_a_change_and_its_interval_lie_where_the_scale_puts_them():
    """The scale is linear: the middle of the interval is the middle of its line, and zero that of the margin."""
    drawn = marks(TIME)
    ends = [float(drawn["interval series-1"][0][name]) for name in ("x1", "x2")]
    assert float(drawn["point series-1"][0]["cx"]) == pytest.approx(sum(ends) / 2, abs=0.1)
    margin, floor, (zero,) = drawn["band margin"][0], drawn["band floor"][0], drawn["zero"]
    for band in (margin, floor):
        assert float(band["x"]) + float(band["width"]) / 2 == pytest.approx(float(zero["x1"]), abs=0.15)
    assert float(margin["width"]) == pytest.approx(2 * float(floor["width"]), abs=0.2)  # 0.5 and 0.25


def test_what_is_drawn_is_said_in_words_too():
    assert forest.sentences(TIME) == ["B: -0.50 % [-0.73, -0.27]", "margin ±0.5, noise floor ±0.25"]
    html = forest.plot([TIME])
    assert '<desc id="forest-0-desc">B: -0.50 % [-0.73, -0.27]. margin ±0.5, noise floor ±0.25</desc>' in html
    assert 'role="img" aria-labelledby="forest-0-title forest-0-desc"' in html


def test_an_interval_that_leaves_the_drawing_ends_in_an_arrow_and_keeps_its_numbers():
    wide = Panel("Train time", "%", [Row("B", 5.0, -40.0, 4000.0, 1), Row("C", 3.0, 2.0, 4.0, 2)])
    drawn = marks(wide)
    edges = [mark["points"].split() for mark in drawn["interval series-1"] if "points" in mark]
    assert all(points[0].split(",")[0] != points[1].split(",")[0] for points in edges)  # two arrows
    inside = [float(mark["x2"]) - float(mark["x1"]) for mark in drawn["interval series-2"] if "x1" in mark]
    assert inside[0] > 15  # the other interval can still be seen
    assert "[-40.00, +4000.00]" in forest.plot([wide])


def test_without_an_interval_a_point_remains_and_without_rows_nothing():
    panel = Panel("val_loss", "nats per token", [Row("B", 0.01)], decimals=4)
    assert "interval" not in " ".join(marks(panel)) and "+0.0100 nats per token, no interval" in forest.plot([panel])
    assert forest.plot([Panel("Energy", "%", [])]) == ""
    assert marks(Panel("Train time", "%", [Row("B", 0.0, 0.0, 0.0)]))["point series-0"]  # nothing to scale by


def test_ticks_are_round_and_few():
    assert forest.ticks(-0.83, 0.61) == [-0.5, 0.0, 0.5]
    assert forest.ticks(-95.0, 230.0) == [0.0, 100.0, 200.0]
    assert len(forest.ticks(-1e-4, 1e-4)) <= 6


def test_a_name_is_escaped():
    assert "<i>" not in forest.plot([Panel("t", "%", [Row("<i>x", 1.0, 0.0, 2.0)])])
