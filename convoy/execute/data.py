"""The loader: every device gets its part of the same batches. Which samples make step k depends on the seed and k alone."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from convoy.errors import InputError
from convoy.execute.module import Distributed
from convoy.layout import box


class _Sized(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Batches of a data set of (input, label) pairs, as one device of a fleet sees them.

    Iterating gives (x, y): x is this device's part of the inputs, in the layout that the plan's first layer wants (it may
    have zero samples); y holds the labels of the whole batch, on every device.

    Args:
        dataset: map-style; items are (tensor, label). Where it offers `targets` (as torchvision's do), labels are read
            there, unless it also has a `target_transform`; else a device loads every sample of the batch for its
            label's sake. What it draws at random while it loads a sample (crops, flips) depends on the seed, the epoch
            and the sample alone; where it offers `__getitems__`, on the seed, the epoch and the samples loaded at once.
        batch_size: global batch, in samples.
        model: the distributed model the batches are for; None: whole batches, for one device.
        shuffle: a new order in every epoch; False: the order of the data set.
        seed: with the epoch, decides the order.
        drop_last: leave out a last batch that is smaller.
        workers: processes that prepare batches ahead; 0: in this process.

    Raises:
        InputError: a batch below 1, an empty data set.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        model: Distributed | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"a batch of {batch_size}: a batch holds one sample at least; give 1 or more")
        if len(dataset) < 1:  # type: ignore[arg-type]
            raise InputError("the data set is empty: give one with samples")
        self.dataset, self.batch_size, self.model = dataset, batch_size, model
        self.shuffle, self.seed, self.drop_last, self.workers = shuffle, seed, drop_last, workers
        self.epoch = 0

    def __len__(self) -> int:
        """Batches in one epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def samples(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration plays; without it, each iteration plays the next one."""
        self.epoch = epoch

    def batches(self, epoch: int) -> list[list[int]]:
        """The sample indices of every batch of an epoch; the same on every device."""
        order: Sequence[int] = range(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.samples, generator=generator).tolist()
        starts = range(0, len(self) * self.batch_size, self.batch_size)
        return [list(order[start : start + self.batch_size]) for start in starts]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.batches(self.epoch)
        self.epoch += 1
        key = f"{self.seed}/{self.epoch - 1}"
        device = self.model.group.torch_device if self.model is not None else torch.device("cpu")
        while batches:
            done, reshares = 0, self._reshares
            for batch, (x, y) in zip(batches, self._prepared(batches, key), strict=True):
                if self.model is not None:
                    self.model.announce(len(batch))
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                done += 1
                if self._reshares != reshares:
                    break  # what is prepared already are parts of the old plan: the rest is prepared anew
            batches = batches[done:]

    @property
    def _reshares(self) -> int:
        return self.model.reshares if self.model is not None else 0

    def _prepared(self, batches: list[list[int]], key: str) -> DataLoader[Any]:
        parts = _Parts(self.dataset, batches, [self._part(len(b)) for b in batches], key)
        return DataLoader(parts, batch_size=None, shuffle=False, num_workers=self.workers, collate_fn=_as_it_is)

    def _part(self, batch: int) -> tuple[int, int]:
        """The samples of a batch that this device loads, as a range."""
        if self.model is None:
            return (0, batch)
        layouts = self.model.input_layouts(batch)
        if len(layouts) != 1:
            raise InputError(f"the model has {len(layouts)} inputs; the loader serves one: write a loader of your own")
        here = box(layouts[0], self.model.group.device, self.model.steps(batch).inputs[0].shape)
        return here[0] if here is not None else (0, 0)


class _Parts(Dataset[tuple[Tensor, Tensor]]):
    """Item k is this device's part of batch k: a data set that a DataLoader can prepare ahead, batch by batch."""

    def __init__(self, dataset: Dataset[Any], batches: list[list[int]], parts: list[tuple[int, int]], key: str) -> None:
        self.dataset, self.batches, self.parts, self.key = dataset, batches, parts, key
        self.targets = _targets(dataset)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        indices, (start, stop) = self.batches[k], self.parts[k]
        with _own_random_numbers():
            if self.targets is None:
                x, y = self._fetch(indices)
                return x[start:stop], y
            y = _chosen(self.targets, indices)
            if start == stop:
                # One sample shows the shape and dtype of none.
                return self._fetch(indices[:1])[0][:0], y
            return self._fetch(indices[start:stop])[0], y

    def _fetch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            rows: Any = [self._sample(i) for i in indices]
        else:
            _reseed(f"{self.key}/{indices}")
            rows = many(indices)
        # torch's protocol lets __getitems__ return a list of items; ours return the batch at once.
        x, y = rows if isinstance(rows, tuple) else default_collate(rows)
        return x, torch.as_tensor(y)

    def _sample(self, index: int) -> Any:
        _reseed(f"{self.key}/{index}")
        return self.dataset[index]


def _targets(dataset: Dataset[Any]) -> Any:
    """The labels as they are in the items, or None where only the items have them."""
    transforms = getattr(dataset, "transforms", None)
    changed = (
        getattr(dataset, "target_transform", None) is not None
        or getattr(transforms, "target_transform", None) is not None
        # A function of image and label together may change either.
        or (transforms is not None and not hasattr(transforms, "target_transform"))
    )
    return None if changed else getattr(dataset, "targets", None)


def _chosen(targets: Any, indices: list[int]) -> Tensor:
    if isinstance(targets, Tensor):
        return targets[indices]
    return torch.as_tensor(default_collate([targets[i] for i in indices]))


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Random numbers drawn inside leave no trace in the streams of the program."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _reseed(key: str) -> None:
    """Streams that depend on the key alone: devices that load the same sample load the same numbers."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)


def _as_it_is(item: Any) -> Any:
    return item
