"""One small net of every convolutional family of torchvision and timm: three steps as on one device, in float64.

`python -m lab.families` writes the table of docs/families.md; what it says is held to here.
"""

import importlib.metadata
from dataclasses import replace

import pytest
import torch

from lab.families import page
from lab.families.registry import Member, names_by_family
from lab.families.trial import Row, try_family

KEPT = page.read()
ROWS = {row.family: row for row in KEPT.rows}
MEMBERS = {member.family: member for member in KEPT.members}
FAST = ("timm starnet",)
INSTALLED = all(
    importlib.metadata.version(name).startswith(version)
    for name, version in (pair.split() for pair in KEPT.versions.split(", ")[1:])
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(n, marks=() if n in FAST else pytest.mark.slow)
        for n, row in sorted(ROWS.items())
        if not row.untried
    ],
)
def test_a_family_trains_as_on_one_device(family: str) -> None:
    """Or fails as the table says. What is better than the table is an error, too: write the table anew."""
    torch.set_num_threads(1)
    found, told = try_family(MEMBERS[family]), ROWS[family]
    assert (found.error, found.exact) == (told.error, told.exact), found
    assert round(found.shared_out) == round(told.shared_out), found


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="other versions of torchvision and timm than those of the table")
def test_no_family_is_left_out() -> None:
    assert names_by_family().keys() == MEMBERS.keys()
    assert all(MEMBERS[family].name in names for family, names in names_by_family().items())
    assert ROWS.keys() == {name for name, member in MEMBERS.items() if member.convolutional}


def test_the_page_shows_what_was_found() -> None:
    assert page.PAGE.read_text() == page.text(KEPT)


def test_nearly_all_families_are_exact_and_shared_out() -> None:
    exact = [row for row in ROWS.values() if row.exact]
    assert len(exact) >= 0.95 * len(ROWS)
    assert sum(row.shared_out >= 95.0 for row in exact) >= 0.90 * len(ROWS)


def test_a_family_that_differs_is_not_called_exact() -> None:
    row = Row("timm none", "none", 1, by_filters={"filters": 60.0, "samples": 30.0, "one": 10.0}, apart=(1e-15, 2e-15))
    assert row.exact
    assert row.shared_out == 90.0
    assert not replace(row, apart=(1e-15, 2e-10)).exact
    assert not replace(row, apart=(float("inf"), 0.0)).exact
    assert not replace(row, error="InputError: no").exact


def test_an_error_is_a_row_of_the_table() -> None:
    assert try_family(Member("timm none", "no_such_net", 1, 4)).error.startswith("RuntimeError: Unknown model")
