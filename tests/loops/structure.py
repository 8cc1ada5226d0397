"""Loops whose batches are dicts, data classes, named tuples or nested, whose models take keyword arguments, or draw numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.loops import Make, Prepare, batches, conv, encoder, endless, update


class Rows(Dataset[Any]):
    """60 samples as dicts: an image, a mask of its pixels, a number and a label."""

    def __init__(self) -> None:
        own = torch.Generator().manual_seed(1)
        self.images = torch.randn(60, 3, 8, 8, generator=own)
        self.masks = (torch.rand(60, 1, 8, 8, generator=own) > 0.3).double()
        self.ages = torch.rand(60, 1, generator=own)
        self.labels = torch.randint(0, 4, (60,), generator=own)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "image": self.images[i], "extra": {"mask": self.masks[i], "age": self.ages[i]}, "label": self.labels[i],
            "name": f"sample {i}",
        }  # fmt: skip


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 6), conv(6, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(9, 4)

    def forward(self, image: Tensor, mask: Tensor | None = None, *, age: Tensor) -> Tensor:
        if mask is not None:
            image = image * mask
        return self.head(torch.cat((self.body(image), age), 1))


class OfDict(Masked):
    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:  # type: ignore[override]
        out = super().forward(batch["image"], batch["extra"]["mask"], age=batch["extra"]["age"])
        return {"logits": out, "loss": F.cross_entropy(out, batch["label"])}


def dicts_and_keyword_arguments(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    def call(model: Any, batch: Any) -> Any:
        return model(batch["image"], mask=batch["extra"]["mask"], age=batch["extra"]["age"])

    net = Masked()
    net, steps, loader = prepare(net, optimizer(net.parameters()), DataLoader(Rows(), 12), call=call)
    for batch in endless(loader):
        extra = batch["extra"]
        loss = F.cross_entropy(net(batch["image"], extra["mask"], age=extra["age"]), batch["label"])
        assert len(batch["name"]) == len(batch["label"])
        yield update(steps, loss)


def whole_batch_as_a_dict(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    def call(model: Any, batch: Any) -> Any:
        return model({key: batch[key] for key in ("image", "extra", "label")})

    net = OfDict()
    net, steps, loader = prepare(net, optimizer(net.parameters()), DataLoader(Rows(), 12), call=call)
    for batch in endless(loader):
        loss = call(net, batch)["loss"]
        yield update(steps, loss)


@dataclass
class Sample:
    image: Tensor
    label: Tensor


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


def _with_dataclasses(rows: list[dict[str, Any]]) -> Sample:
    return Sample(torch.stack([row["image"] for row in rows]), torch.stack([row["label"] for row in rows]))


def _with_named_tuples(rows: list[dict[str, Any]]) -> tuple[Pair, list[str]]:
    sample = _with_dataclasses(rows)
    return Pair(sample.image, sample.label), [row["name"] for row in rows]


def data_classes(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = encoder()
    net, steps, loader = prepare(net, optimizer(net.parameters()), DataLoader(Rows(), 12, collate_fn=_with_dataclasses))
    for batch in endless(loader):
        loss = F.cross_entropy(net(batch.image), batch.label)
        yield update(steps, loss)


def named_tuples(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = encoder()
    net, steps, loader = prepare(
        net, optimizer(net.parameters()), DataLoader(Rows(), 12, collate_fn=_with_named_tuples)
    )
    for batch, names in endless(loader):
        loss = F.cross_entropy(net(batch.image), batch.label)
        assert len(names) == 12
        yield update(steps, loss)


class Images(Rows):
    def __getitem__(self, i: int) -> Tensor:  # type: ignore[override]
        return self.images[i]


def images_without_labels(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = nn.Sequential(conv(3, 6, 2), nn.ConvTranspose2d(6, 3, 4, 2, 1))
    net, steps, loader = prepare(net, optimizer(net.parameters()), DataLoader(Images(), 12))
    for x in endless(loader):
        loss = F.mse_loss(net(x), x)
        yield update(steps, loss)


def mixup_and_random_numbers_in_the_loop(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = nn.Sequential(conv(3, 6), nn.Dropout(0.0), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, y in endless(loader):
        share, order = torch.rand(()), torch.randperm(len(x))
        out = net(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
        yield update(steps, loss)


def mixup_with_dropout(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """Yield losses: the masks of dropout depend on the plan, the numbers that the script draws do not."""
    net = nn.Sequential(conv(3, 6), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, y in endless(loader):
        order = torch.randperm(len(x))
        loss = F.cross_entropy(net(0.4 * x + 0.6 * x[order]), y[order])
        yield update(steps, loss)


LOOPS = [
    dicts_and_keyword_arguments,
    whole_batch_as_a_dict,
    data_classes,
    named_tuples,
    images_without_labels,
    mixup_and_random_numbers_in_the_loop,
]
