"""A user's script for the engine tests, and the losses that plain PyTorch has on one device.

The script writes the losses of its two epochs into the file that its argument names.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import convoy
from tests.support.small_script import SPEEDS, net, shuffled


def _losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: object) -> list[float]:
    found = []
    for _ in range(2):
        for x, y in batches:  # type: ignore[attr-defined]
            loss: Tensor = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def plain_losses() -> list[float]:
    model = net()
    return _losses(model, torch.optim.SGD(model.parameters(), lr=0.1), shuffled())


def main() -> None:
    """Train on the devices of the job in unequal shares."""
    group, model = convoy.join(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"plan": "data-by-speed", "speeds": SPEEDS[: group.devices], "group": group}
    losses = _losses(*convoy.prepare(model, optimizer, shuffled(), **plan))
    seen = group.agree("threads", str(torch.get_num_threads()))
    if group.device == 0:
        Path(sys.argv[1]).write_text(json.dumps([seen, losses]))


if __name__ == "__main__":
    main()
