"""What has a state beside the model, the same on every device: taken after a step, and brought back."""

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class Stateful(Protocol):
    """What has a state beside the model: a schedule, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def take(
    place: Any, optimizers: Sequence[Optimizer], others: Sequence[Stateful], device: torch.device
) -> dict[str, Any]:
    """The place in the data, the optimizers' settings, the states of schedules and scaler, and those of random numbers."""
    settings = [
        [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    return {
        "place": place, "settings": settings, "others": [copy.deepcopy(each.state_dict()) for each in others],
        "random": torch.get_rng_state(),
        "there": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
    }  # fmt: skip


def restore(
    kept: dict[str, Any],
    optimizers: Sequence[Optimizer],
    others: Sequence[Stateful],
    device: torch.device,
    random: Tensor | None,
) -> Any:
    """Bring back what `take` took; gives back the place in the data.

    Args:
        random: torch's state of random numbers, where it is not the one that was taken.
    """
    for optimizer, rows in zip(optimizers, kept["settings"], strict=True):
        for group, settings in zip(optimizer.param_groups, rows, strict=True):
            group.update(settings)
    for each, state in zip(others, kept["others"], strict=True):
        each.load_state_dict(copy.deepcopy(state))
    torch.set_rng_state(kept["random"] if random is None else random)
    if kept["there"] is not None:
        torch.get_device_module(device).set_rng_state(kept["there"], device)
    return kept["place"]
