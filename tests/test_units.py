"""Units: conversions and what a person reads."""

import pytest

from bench.base import units


def test_bytes_seconds_milliseconds_and_nanoseconds_convert():
    assert (units.GIB, units.gib_from_bytes(3 * 2**29)) == (1_073_741_824, 1.5)
    assert (units.ms_from_s(0.0125), units.ms_from_ns(2_500_000)) == (12.5, 2.5)
    assert units.s_from_ns(1_500_000_000) == 1.5


DURATIONS = {0.5: "0.50 s", 120: "120.00 s", 11.021: "11.02 s", 754: "12 min 34 s", 3599.6: "1 h 00 min"}


@pytest.mark.parametrize(("seconds", "text"), [*DURATIONS.items(), (3725, "1 h 02 min")])
def test_a_duration_changes_its_unit_where_a_person_would(seconds, text):
    assert units.format_s(seconds) == text


def test_sizes_and_times_carry_their_unit_and_what_was_not_measured_prints_as_nothing():
    assert units.format_ms(55.123) == "55.12 ms"
    assert units.format_bytes(512) == "512 B"
    assert units.format_bytes(65536) == "64.0 KiB"
    assert units.format_bytes(2402048) == "2.3 MiB"  # 2402048 / 2**20 = 2.29
    assert units.format_gib(79.647) == "79.65 GiB"
    for function in (units.format_s, units.format_ms, units.format_bytes, units.format_gib):
        assert function(None) == ""
