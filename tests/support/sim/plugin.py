"""A pytest plugin that runs thread groups on a fleet with simulated accelerators.

`python -m pytest -p tests.support.sim.plugin tests/parity/test_parity.py` runs tests that were written for CPUs on it. What
such a test does itself is brought to one device: the images that it gives, its labels, and what it compares. Nothing else is.
The environment variable SIM_FLEET names the fleet: "mixed" (the default) or "sims".
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.runtime.module import Distributed
from tests.support import losses, sim, threads

FLEETS = {
    "mixed": ("sim:0", "cpu", "sim:1", "cpu", "sim:2", "cpu", "sim:3", "cpu"),
    "sims": ("sim:0", "sim:1", "sim:2", "sim:3", "sim:4", "sim:5", "sim:6", "sim:7"),
}
"""No accelerator twice: in one process autograd gives each a single thread, which would wait for itself."""


def pytest_configure(config: pytest.Config) -> None:  # noqa: ARG001
    sim.load(devices=8)
    fleet = FLEETS[os.environ.get("SIM_FLEET", "mixed")]
    assert list(inspect.signature(threads.run_on_threads).parameters)[-1] == "on"
    threads.run_on_threads.__defaults__ = (60.0, fleet)  # type: ignore[attr-defined]
    losses.with_losses.__defaults__ = (fleet,)  # type: ignore[attr-defined]
    for holder, name in ((torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close")):
        setattr(holder, name, _on_cpu(getattr(holder, name)))
    cross_entropy, forward = F.cross_entropy, Distributed.forward
    F.cross_entropy = lambda x, y, *a, **k: cross_entropy(x, y.to(x.device), *a, **k)

    def forward_here(self: Distributed, *inputs: Any, **options: Any) -> Any:
        return forward(self, *(_at(x, self.group.torch_device) for x in inputs), **options)

    Distributed.forward = forward_here  # type: ignore[method-assign]


def _at(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _on_cpu(compare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compare)
    def brought(*values: Any, **options: Any) -> Any:
        return compare(*(_at(value, "cpu") for value in values), **options)

    return brought
