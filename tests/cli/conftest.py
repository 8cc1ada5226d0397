"""The command is started by a person, not by a launcher or a terminal of some width."""

import pytest

from tests.support.processes import PLACE


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
