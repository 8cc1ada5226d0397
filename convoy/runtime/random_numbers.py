"""Keeps the random generators of torch, Python and numpy alike on all devices, whatever the model draws in forward.

A script draws random numbers too, to mix samples or to shuffle, and every device must draw the same ones.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from convoy.comm.collectives import gather
from convoy.comm.group import Group
from convoy.layout.layout import Replicated, holders
from convoy.model.graph import Graph
from convoy.plan.steps import ComputeStep, StepList


class RandomNumbers:
    """Which devices draw random numbers in a forward pass.

    Attributes:
        split: several devices draw, each for its part of the batch or of the channels (dropout).
        alone: the device that runs a module whole, and draws as one device would; None: there is no such module.
    """

    def __init__(self, steps: StepList, graph: Graph) -> None:
        drawing = [
            holders(step.writes.layout)
            for step in steps.phase("forward")
            if isinstance(step, ComputeStep)
            and (graph[step.layer].random or not graph[step.layer].per_sample)
            and not (isinstance(step.writes.layout, Replicated) and len(holders(step.writes.layout)) > 1)
        ]
        self.split = any(len(devices) > 1 for devices in drawing)
        self.alone = next((devices[0] for devices in drawing if len(devices) == 1), None)

    @contextmanager
    def alike(self, group: Group) -> Iterator[None]:
        """Run a forward pass after which every generator has the same state on all devices. Every device calls it.

        Devices that draw for parts draw from seeds of their own. Otherwise all take over the states of the device that drew,
        which are those of one device.
        """
        if group.devices == 1 or not (self.split or self.alone is not None):
            yield
            return
        before = None if self.alone is None else _states(group.torch_device)
        if self.split:
            seed = int(torch.randint(1 << 62, ()))
            kind = group.torch_device.type
            devices = [] if kind == "cpu" else [group.torch_device]
            with torch.random.fork_rng(devices, device_type=kind):
                torch.manual_seed(seed + group.device)
                yield
        else:
            yield
        if self.alone is not None:
            after = _states(group.torch_device)
            found = after if group.device == self.alone and after != before else None
            drawn = gather(group, "random numbers", found)[self.alone]
            if drawn is not None:
                _set_states(drawn, group.torch_device)


def _states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as JSON can hold them."""
    arrays: Any = np.random.get_state(legacy=False)
    states = {
        "cpu": torch.get_rng_state().numpy().tobytes().hex(),
        "python": random.getstate(),
        "numpy": arrays | {"state": arrays["state"] | {"key": arrays["state"]["key"].tolist()}},
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device).numpy().tobytes().hex()
    return states


def _set_states(states: dict[str, Any], device: torch.device) -> None:
    """Bring the states of another device; that of an accelerator only where both have one of the same type."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(tensor(states["cpu"]))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(tensor(states[device.type]), device)
