"""Which cases of a test everybody runs every day."""

from collections.abc import Iterable
from typing import Any

import pytest


def most_slow(fast: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrised test: after the first `fast`, they run with the slow tests."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if number >= fast else ())
        for number, case in enumerate(cases)
    ]
