"""Select which cases of a test run every day."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def most_slow(fast: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrised test, with those after the first `fast` marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if number >= fast else ())
        for number, case in enumerate(cases)
    ]


def each_value(*values: Sequence[Any]) -> list[Any]:
    """Return cases that cover each value of each parameter; the slow tests run all combinations."""
    most = max(map(len, values))
    daily = [tuple(number % len(each) for each in values) for number in range(most)]
    places = [*daily, *(place for place in itertools.product(*map(range, map(len, values))) if place not in daily)]
    cases = [tuple(each[number] for each, number in zip(values, place, strict=True)) for place in places]
    return most_slow(most, cases)
