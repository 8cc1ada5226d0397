"""Gradients of copied parameters: summed over the devices, never averaged. And the norm of all gradients together."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from convoy.execute.group import Group, Message
from convoy.execute.move import run_rounds
from convoy.steps import SumGradients

Found = dict[str, Tensor | None]
"""Gradients that backward reached, by `state_dict` key. None: reached, but this device has no part in it.
A key that is missing was reached on no device: the loss does not depend on that parameter."""


def sum_gradients(group: Group, model: nn.Module, step: SumGradients, found: Found, mixing_stage: int) -> None:
    """Run one SumGradients step; replaces the gradients in `found` by their sums."""
    if group.device not in step.devices:
        return
    if not any(key in found for key in step.keys):
        return
    parts = [_flat(found.get(key), model.get_parameter(key)) for key in step.keys]
    if step.flags:
        parts.append(torch.tensor([float(found.get(k) is not None) for k in step.keys]).to(parts[0]))
    if step.reduce == "inexact-butterfly-mixing":
        flat = _mix(group, model, step, parts, mixing_stage)
    else:
        flat = torch.cat(parts)
        run_rounds(group, step.schedule, flat)
    used = flat[-step.flags :].tolist() if step.flags else [1.0] * len(step.keys)
    start = 0
    for key, size, flag in zip(step.keys, step.sizes, used, strict=True):
        if key in found:
            # No device used it (control flow): then it has no gradient, as on one device.
            found[key] = flat[start : start + size].view_as(model.get_parameter(key)) if flag else None
        start += size


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).detach().view(-1) if gradient is None else gradient.reshape(-1)


def _mix(group: Group, model: nn.Module, step: SumGradients, parts: list[Tensor], stage: int) -> Tensor:
    """INEXACT. One stage of butterfly mixing: this device and one partner average their weights and their gradients.

    Zhao & Canny interleave each gradient step with one stage of the butterfly instead of a full reduction. The copies of
    a parameter are then no longer equal, and training no longer follows the single-device trajectory.
    """
    schedule = step.stage(stage)
    partner = next((t.receiver for t in schedule.rounds[0] if t.sender == group.device), None)
    both = [group.device] if partner is None else [group.device, partner]
    weights = [model.get_parameter(key) for key in step.keys]
    flat = torch.cat([w.detach().view(-1) / len(both) for w in weights] + parts)
    run_rounds(group, schedule, flat)
    count = sum(step.sizes)
    for weight, mixed in zip(weights, torch.split(flat[:count], list(step.sizes)), strict=True):
        weight.detach().copy_(mixed.view_as(weight))
    # The gradient parts are sums over samples, divided by the global batch: scale what two devices saw to a whole batch.
    samples = sum(step.samples[d] for d in both)
    flat[count : 2 * count] *= sum(step.samples) / samples if samples else 0.0
    return flat[count:]


def global_norm(group: Group, gradients: Iterable[tuple[Tensor, bool]], norm_type: float = 2.0) -> float:
    """Norm of all gradients together, of pieces and copies. The same number on every device.

    Args:
        gradients: each gradient held here, with whether this device is the one to count it (copies count once).
        norm_type: the p of the p-norm; infinity for the largest entry.
    """
    own = [g for g, counts in gradients if counts and g.numel()]
    powers = [torch.linalg.vector_norm(g.double(), norm_type) for g in own]
    if norm_type == float("inf"):
        # Not Python's max: it would lose what is not a number.
        here = float(torch.stack(powers).max()) if powers else 0.0
        return float(torch.tensor(share_numbers(group, here), dtype=torch.float64).max())
    here = float(sum(p**norm_type for p in powers)) if powers else 0.0
    return float(sum(share_numbers(group, here)) ** (1.0 / norm_type))


def share_numbers(group: Group, number: float) -> list[float]:
    """One number of each device, in the order of the devices, on every device."""
    table = torch.zeros(group.devices, dtype=torch.float64, device=group.torch_device)
    table[group.device] = number
    others = [d for d in range(group.devices) if d != group.device]
    mine = table[group.device : group.device + 1].clone()
    group.exchange([Message(d, mine) for d in others], [Message(d, table[d : d + 1]) for d in others])
    return [float(v) for v in table]
