"""The loss of a whole batch, where each device has the outputs of its own samples only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.execute.group import Group, Message
from convoy.execute.module import Distributed

Criterion = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> the mean over the samples, such as torch's `cross_entropy`."""


class MeanLoss:
    """The mean of a criterion over all samples of a batch.

    Attributes:
        own: this device's part of it, with its graph: the parts of all devices add up to the loss, and so do their gradients.
    """

    def __init__(self, own: Tensor, group: Group | None) -> None:
        """Tells the other devices this one's part, without waiting for theirs; group: None where the part is the whole."""
        self.own, self._total = own, own.detach()
        self._pending = None
        if group is not None:
            self._total = torch.zeros(group.devices, dtype=torch.float64, device=group.torch_device)
            self._total[group.device] = own.detach()
            mine = self._total[group.device : group.device + 1].clone()
            others = [device for device in range(group.devices) if device != group.device]
            receives = [Message(d, self._total[d : d + 1]) for d in others]
            self._pending = group.start([Message(d, mine) for d in others], receives)

    def backward(self) -> None:
        """As `Tensor.backward`: adds to the gradients of the parameters."""
        self.own.backward()  # type: ignore[no-untyped-call]

    def item(self) -> float:
        """The loss of the whole batch, the same number on every device; waits for what the others have told.

        Raises:
            DeviceLostError: a device did not tell.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return float(self._total.sum())


def mean_loss(model: nn.Module, outputs: Any, targets: Tensor, criterion: Criterion) -> MeanLoss:
    """The loss of one device, for a model that was distributed by a plan with outputs "own"; also for any other model.

    Nothing is waited for between forward and backward. Every device calls it, once for each forward pass in training mode.

    ::

        loss = convoy.mean_loss(model, model(x), y, torch.nn.functional.cross_entropy)
        loss.backward()
        print(loss.item())

    Args:
        outputs: what `model` returned: of this device's samples, or of all.
        targets: of the whole batch, a row for each sample, on every device.
        criterion: a mean over samples. One that looks at several samples at once (a contrastive loss, a sum) would be another
            number: take a plan with outputs "everywhere" for it.
    """
    rows = model.output_rows(len(targets)) if isinstance(model, Distributed) else None
    if rows is None or not isinstance(model, Distributed):
        return MeanLoss(criterion(outputs, targets), None)
    count = rows.stop - rows.start
    # Of no samples there is no mean; backward runs all the same, since others may wait for what this device passes on.
    own = criterion(outputs, targets[rows]) * (count / len(targets)) if count else _zero(outputs, targets, criterion)
    return MeanLoss(own, model.group)


def _zero(outputs: Any, targets: Tensor, criterion: Criterion) -> Tensor:
    """Zero, with the graph of those outputs that the criterion reads: to the others no gradient may come, on any device.

    Which those are, a made-up sample tells.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def probe(output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output.new_zeros((1, *output.shape[1:])) if isinstance(output, Tensor) else output
        pairs.append((output, output.detach().new_zeros((1, *output.shape[1:]), requires_grad=True)))
        return pairs[-1][1]

    made_up = criterion(fx.node.map_aggregate(outputs, probe), targets[:1])
    found = torch.autograd.grad(made_up, [sample for _, sample in pairs], allow_unused=True)
    read = [output for (output, _), gradient in zip(pairs, found, strict=True) if gradient is not None]
    return torch.stack([output.sum() for output in read]).sum()
