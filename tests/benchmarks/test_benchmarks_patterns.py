"""Bytes alone: which messages make a pattern, and when the last one is expected."""

import pytest

from benchmarks.configurations import fleet_named
from benchmarks.patterns import HEADERS, patterns, predicted_s, table
from convoy.simulate.network import network_of

MB = 1_000_000


def test_the_slow_card_rules_what_passes_it_and_nothing_else() -> None:
    """A message of 1 MB takes 80 ms at 12.5 MB/s and 8 ms at 125, and the headers."""
    network = network_of(fleet_named("slowcard4"))
    found = {name: predicted_s(network, flows, MB) * HEADERS for name, flows in patterns(4).items()}
    assert found == pytest.approx(
        {
            "one to the last": 0.08, "the last to one": 0.08, "the last and one, both ways": 0.08, "all to the last": 0.24,
            "the last to all": 0.24, "the last and all, both ways": 0.24, "a ring of all": 0.08, "each to all": 0.24,
            "a ring without the last": 0.008, "two others, both ways": 0.008,
        },
        rel=1e-6,
    )  # fmt: skip


def test_what_is_left_goes_faster_when_others_have_ended() -> None:
    """Two messages leave the first device, one of them to the slow card: it goes at 12.5 MB/s, the other at what is left."""
    network = network_of(fleet_named("slowcard4"))
    assert predicted_s(network, ((0, 1), (0, 3)), MB) * HEADERS == pytest.approx(0.08)
    assert predicted_s(network, ((0, 1), (0, 2)), MB) * HEADERS == pytest.approx(0.016)


def test_the_table_has_the_median_beside_the_prediction() -> None:
    network = network_of(fleet_named("slowcard4"))
    rows = table(network, {name: [9.0, 0.1, 0.2] for name in patterns(4)}, MB)
    assert list(rows.columns[2].cells) == ["0.200 s"] * 10
    assert next(iter(rows.columns[3].cells)) == f"{0.08 / HEADERS / 0.2:.2f}"
