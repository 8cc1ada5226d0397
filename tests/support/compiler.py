"""torch's compiler in tests."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def compiler_imported() -> Iterator[None]:
    """Import torch's compiler, which leaves a progress-bar thread behind once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        torch.compile(nn.ReLU(), backend="aot_eager")(torch.ones(3, requires_grad=True)).sum().backward()
    importable: Any = pytest.importorskip("torch._dynamo")
    yield
    importable.reset()
