"""One Document, four forms: the verdict leads each, a fact is in all of them, and foreign text does nothing in any."""

import json

import pytest
from browser import Browser, needs_axe, needs_browser
from kept_records import EVIL

from bench.web import document
from bench.web.chart import chart, series_of
from bench.web.document import Document, Hint, Lines, Section, Table, Verdict, badge, code, link
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
    assert answer.markdown().startswith("# B against A\n\nverdict: **FASTER**  B is 2 % faster than A\n")
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
