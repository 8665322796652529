"""The forest plot: what is drawn where, in which words, and what it does with intervals that leave the drawing."""

import re

import pytest

from bench.web import forest
from bench.web.forest import Panel, Row

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
