"""Fixtures: the command runs without a launcher's variables or a terminal width."""

import pytest

from tests.support.processes import PLACE


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
