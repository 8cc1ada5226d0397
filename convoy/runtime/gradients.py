"""Gradients of copied parameters: summed over the devices, never averaged. And the norm of all gradients together."""

import queue
import threading
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from convoy.comm.agreement import share_number
from convoy.comm.group import Group
from convoy.plan.steps import SumGradients
from convoy.runtime.exchange import Landing, run_rounds

SUM_LANE = 1

Found = dict[str, Tensor | None]
"""Gradients that backward reached, by `state_dict` key. None: reached, but this device has no part in it.
A key that is missing was reached on no device: the loss does not depend on that parameter."""


class Sums:
    """The gradient sums of one backward. Each is begun as soon as its gradients are there, and runs while backward goes on.

    A thread takes them one after the other, in the order of the step list, on a lane of the group that is its own. It
    waits for the network, without a processor, and adds. Where a group has a single lane, sums are made at once.

    Args:
        model: holds this device's parameters.
        mixing_stage: for mixing, which counts its stages over training steps.
        landing: where summands arrive, step after step.
    """

    def __init__(self, group: Group, model: nn.Module, mixing_stage: int, landing: Landing) -> None:
        self.group, self.model, self.mixing_stage, self.landing = group, model, mixing_stage, landing
        self._begun: list[tuple[SumGradients, Tensor]] = []
        self._queue: queue.SimpleQueue[tuple[SumGradients, Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, step: SumGradients, found: Found) -> None:
        """Start one sum of what `found` holds."""
        if self.group.device not in step.devices or not any(key in found for key in step.keys):
            return
        parts = [_flat(found.get(key), self.model.get_parameter(key)) for key in step.keys]
        if step.flags:
            # Counts of devices: no wire format rounds one of them to zero.
            parts.append(torch.tensor([float(found.get(k) is not None) for k in step.keys]).to(parts[0]))
        if step.reduce == "inexact-butterfly-mixing":
            self._begun.append((step, _mix(self.group, self.model, step, parts, self.mixing_stage)))
            return
        flat = parts[0] if step.alone else torch.cat(parts)
        self._begun.append((step, flat))
        if self.group.lanes == 1:
            run_rounds(self.group, step.schedule, flat, wire=step.wire, landing=self.landing)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="convoy-sums", daemon=True)
            self._thread.start()
        self._queue.put((step, flat))

    def finish(self, found: Found) -> None:
        """Wait for all sums, and put them in the place of what they were made of.

        Raises:
            DeviceLostError: a device did not send its part.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()  # every wait in it has the group's own limit
            if self._error is not None:
                raise self._error
        for step, flat in self._begun:
            _replace(found, step, flat, self.model)

    def abandon(self) -> None:
        """Begin no more sums; what is under way ends with the group."""
        self._queue.put(None)

    @torch.no_grad()  # a thread of its own starts with autograd on
    def _work(self) -> None:
        try:
            while (each := self._queue.get()) is not None:
                step, flat = each
                run_rounds(self.group, step.schedule, flat, SUM_LANE, step.wire, self.landing)
        except BaseException as error:
            self._error = error


def _replace(found: Found, step: SumGradients, flat: Tensor, model: nn.Module) -> None:
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
        return float(torch.tensor(share_number(group, here), dtype=torch.float64).max())
    here = float(sum(p**norm_type for p in powers)) if powers else 0.0
    return float(sum(share_number(group, here)) ** (1.0 / norm_type))
