"""Times of day: what is written is what is read."""

import pytest

from bench.base import utc

ZONES = {"03": ("Z", "+00:00", ""), "04": ("+01:00",)}  # by the hour that is meant


@pytest.mark.parametrize("text", [f"2026-11-21T{hour}:15:00.123{zone}" for hour in ZONES for zone in ZONES[hour]])
def test_every_way_of_writing_a_moment_is_read_as_the_same_one(text):
    assert utc.seconds(text) == 1795230900.123
    assert utc.text(utc.parse(text)) == "2026-11-21T03:15:00.123Z"


def test_now_is_a_number_of_seconds_ago_and_what_is_no_time_is_refused():
    assert utc.seconds(utc.now()) - utc.seconds(utc.now(before_s=60)) == pytest.approx(60, abs=1)
    with pytest.raises(ValueError):
        utc.parse("yesterday")
