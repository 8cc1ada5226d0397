"""torchvision, as the tests here use it."""

import pytest

from tests.support.model_zoo import make_importable


@pytest.fixture(scope="session", autouse=True)
def _torchvision() -> None:
    make_importable()
