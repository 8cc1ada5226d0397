"""The loader: every device gets its local part of the same global batches. Step k's samples depend only on seed and k."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from convoy.comm.control_messages import difference, gather
from convoy.data.augment import Augment, read_augment
from convoy.data.datasets import own_random_numbers, reseed
from convoy.data.images import Images, Samples, naming
from convoy.errors import ConvoyError, DataError, InputError, MismatchError, shown
from convoy.layout.layout import box
from convoy.machine.accelerator import bring
from convoy.runtime.batches import mark_part
from convoy.runtime.module import Distributed, not_distributed


class Loader:
    """The local batches of one device, from a data set of (input, label) pairs.

    Iterating yields (x, y): x is the local batch, in the layout of the plan's first layer (it may have zero samples, and then
    none is loaded); y holds the labels of the global batch. If the plan leaves outputs with their samples, y holds the labels
    of those samples only, and no others are loaded.

    Args:
        dataset: map-style; items are (tensor, label). Labels come from `__getitem__`, never from an attribute such as
            `targets`, so a device loads every sample for which it returns a label. Random numbers drawn while a sample
            loads (crops, flips) depend only on the seed, the epoch, the sample and its position in the epoch; with
            `__getitems__`, on those of all samples of the call.
        batch_size: global batch, in samples.
        model: the distributed model the batches are for; None: one device.
        shuffle: a new order in every epoch, by `seed` and epoch; False: the order of the data set.
        drop_last: leave out a last batch that is smaller.
        workers: processes that prepare batches ahead, two each, for one iteration; 0: in this process.
        augment: changes the images of each batch, by the seed, the epoch and the sample; see `convoy.data.augment`.

    Attributes:
        collate: as a DataLoader's `collate_fn`; every device loads whole batches for it. None: stacks samples.
        options: more options of the DataLoader that prepares the local batches.

    Raises:
        InputError: a batch below 1, an empty data set. While iterating, a model with several inputs.
        DataError: while iterating: samples that do not make a batch, or an error of the data set.
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
        augment: Augment | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"a batch of {batch_size}: a batch holds one sample at least; give 1 or more")
        if len(dataset) < 1:  # type: ignore[arg-type]
            raise InputError("the data set is empty: give one with samples")
        if model is not None and not isinstance(model, Distributed):
            raise not_distributed("the loader", model)
        self.dataset, self.batch_size, self.model, self.augment = dataset, batch_size, model, augment
        self.shuffle, self.seed, self.drop_last, self.workers = shuffle, seed, drop_last, workers
        self.epoch, self.start = 0, 0
        self._agreed = False  # with the other devices, on an epoch
        self.collate: Collate | None = None
        self.options: Mapping[str, Any] = {}

    def __len__(self) -> int:
        """Batches in one epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def samples(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch of the next iteration; without it, each iteration is the next epoch.

        Args:
            start: the first batch; those before it are not loaded.

        Raises:
            InputError: the epoch has fewer batches.
        """
        if not 0 <= start <= len(self):
            raise InputError(f"start {start} in an epoch of {len(self)} batches: give 0 to {len(self)}")
        self.epoch, self.start = epoch, start

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the sample indices of every batch of an epoch; the same on every device."""
        order: Sequence[int] = range(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.samples, generator=generator).tolist()
        starts = range(0, len(self) * self.batch_size, self.batch_size)
        return [list(order[start : start + self.batch_size]) for start in starts]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        guard = None if self.model is None else self.model.guard
        self.seed, rows = self.begin() if guard is None else guard(self)
        epoch, first, batches = self.epoch, self.start, rows[self.start :]
        self.epoch, self.start = epoch + 1, 0
        device = self.model.group.torch_device if self.model is not None else torch.device("cpu")
        done = finished = 0  # batches returned, and those of finished steps
        while done < len(batches):
            reshards, steps, repeats = self._changes
            prepared = iter(self._prepared(batches[done:], epoch, sum(map(len, rows[: first + done]))))
            try:
                for batch, loaded in zip(batches[done:], prepared, strict=True):
                    if isinstance(loaded, ConvoyError):
                        raise loaded
                    if self.model is not None:
                        self.model.announce(len(batch))
                    x, y = (bring(each, device) for each in loaded)
                    if self.model is not None:
                        mark_part(x, len(batch))
                    yield x, y
                    done += 1
                    now = self._changes
                    if now[2] != repeats:  # the unfinished step is repeated
                        done = finished
                        break
                    if now[1] != steps:
                        finished, steps = done, now[1]
                    if now[0] != reshards:
                        break  # batches prepared so far are of the old plan
            finally:
                _end_workers(prepared)
        if self.model is not None:
            self.model.announce(None)

    def begin(self, *, joined: bool = False) -> tuple[int, list[list[int]]]:
        """Agree with the other devices on an epoch. Return its seed, and the samples of its batches.

        Args:
            joined: this device joined a running job, so the others know which epoch it is.
        """
        if self.model is not None:
            self._agree(self.model, adopts=joined and not self._agreed)
            self._agreed = True
        rows = self.batches(self.epoch)  # may choose the seed
        return self.seed, rows

    def _agree(self, model: Distributed, *, adopts: bool) -> None:
        """Check that every device iterates over the same epoch of the same loader, with the same weights: else MismatchError.

        Args:
            adopts: take the epoch of the other devices.
        """
        own = self._required(model)
        rows = gather(model.group, "loader", own | {"the epoch": None} if adopts else own)
        known = [row["the epoch"] for row in rows if row["the epoch"] is not None]
        if adopts and known:
            self.epoch = known[0]
        rows = [row | {"the epoch": known[0]} if row["the epoch"] is None and known else row for row in rows]
        for name in rows[0]:
            if found := difference([row.get(name) for row in rows]):
                raise MismatchError(
                    f"the devices iterate over loaders that differ: {name} is {found}; give all devices the same loader, and "
                    "iterate over it on all of them"
                )
        if model.training:
            model.check_copies()

    def _required(self, model: Distributed) -> dict[str, Any]:
        """Return the values that determine samples and their augmentation."""
        return {
            "the number of samples": self.samples, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed,
            "drop_last": self.drop_last, "the epoch": self.epoch, "the first batch": self.start,
            "augment": None if self.augment is None else repr(self.augment), "model.training": model.training,
        }  # fmt: skip

    @property
    def _changes(self) -> tuple[int, int, int]:
        """The numbers of reshards, of finished steps and of repeated steps."""
        m = self.model
        return (m.reshards, m.finished_steps, m.repeats) if m is not None else (0, 0, 0)

    def _prepared(self, batches: list[list[int]], epoch: int, position: int) -> DataLoader[Any]:
        """Load these batches ahead; `position` counts the samples of the epoch before them."""
        ranges = [(self._part(len(batch)), self._labelled(len(batch))) for batch in batches]
        key = f"{self.seed}/{epoch}"
        augment = None if self.augment is None else partial(self.augment, seed=self.seed, epoch=epoch)
        if self.model is None:
            empty = torch.empty(0)
        else:
            layer = self.model.traced[True].graph.inputs[0]
            empty = torch.empty((0, *layer.shape), dtype=getattr(torch, layer.dtype))
        rows = _Rows(batches, ranges, list(accumulate(map(len, batches), initial=position)))
        parts = _LocalBatches(self.dataset, rows, empty, augment, key, self.collate)
        # Labels in memory need no worker.
        workers = self.workers if parts.labels is None or any(start < stop for (start, stop), _ in ranges) else 0
        # A separate generator, because the seeds of workers must not change dropout's random numbers.
        options = {k: v for k, v in self.options.items() if workers or k == "pin_memory"}
        return DataLoader(
            parts, batch_size=None, num_workers=workers, collate_fn=_unchanged, generator=torch.Generator(), **options
        )

    def _part(self, batch: int) -> tuple[int, int]:
        """Return the range of a batch's samples that this device loads."""
        if self.model is None:
            return (0, batch)
        layouts = self.model.input_layouts(batch)
        if len(layouts) != 1:
            raise InputError(f"the model has {len(layouts)} inputs; the loader serves one: write a loader of your own")
        here = box(layouts[0], self.model.group.device, self.model.steps(batch).inputs[0].shape)
        return here[0] if here is not None else (0, 0)

    def _labelled(self, batch: int) -> tuple[int, int]:
        """Return the range of a batch's samples for which this device gets labels."""
        return (0, batch) if self.model is None else self.model.output_rows(batch)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The samples of some batches: indices, (loaded, labelled) ranges on this device, and the position of each in the epoch."""

    indices: list[list[int]]
    ranges: list[tuple[tuple[int, int], tuple[int, int]]]
    positions: list[int]


class _LocalBatches(Dataset[Any]):
    """A data set with the local part of batch k as item k, so that a DataLoader prefetches it."""

    def __init__(
        self,
        dataset: Dataset[Any],
        rows: _Rows,
        empty: Tensor,
        augment: Callable[[Tensor, Sequence[int]], Tensor] | None,
        key: str,
        collate: "Collate | None",
    ) -> None:
        self.dataset, self.rows, self.empty = dataset, rows, empty
        self.augment, self.key, self.collate = augment, key, collate
        # Images in memory draw no random numbers, and saving and restoring the generators takes longer than loading.
        self.draws = type(dataset) is not Images or augment is not None or collate is not None
        # Only Convoy's own classes are known to return `targets` as labels: a subclass or a wrapper may relabel, and collate_fn
        # may change labels.
        own = type(dataset) in (Images, Samples) and collate is None
        self.labels: Tensor | None = dataset.targets if own else None  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.rows.indices)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor] | ConvoyError:
        """Return the local batch or its error, because torch wraps an error raised in a worker in the worker's traceback."""
        try:
            with own_random_numbers() if self.draws else nullcontext():
                return self._load(k, *self.rows.ranges[k])
        except ConvoyError as error:
            return error

    def _load(self, k: int, here: tuple[int, int], labelled: tuple[int, int]) -> tuple[Tensor, Tensor]:
        (start, stop), (first, last), indices = here, labelled, self.rows.indices[k]
        if self.labels is None:
            # collate_fn may look at all samples of the batch.
            low, high = (0, len(indices)) if self.collate is not None else _hull(here, labelled)
            x, y = self._fetch(k, low, high)
            x, y = x[start - low : stop - low], y[first - low : last - low]
        else:
            y = self.labels[indices[first:last]]
            x = self._fetch(k, start, stop)[0] if start < stop else self.empty
        return (x if self.augment is None else self.augment(x, indices[start:stop])), y

    def _fetch(self, k: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        indices, position = self.rows.indices[k][low:high], self.rows.positions[k] + low
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            rows: Any = []
            for i, index in enumerate(indices):
                self._reseed(index, position + i)
                with naming(f"sample {index}"):
                    rows.append(self.dataset[index])
        else:
            self._reseed(indices, position)
            with naming(f"samples {shown(list(indices))}"):
                rows = many(indices)
        # Data sets of torch return a list of items from __getitems__; Convoy's return a batch.
        if self.collate is not None:
            self._reseed(indices, position)
            return _by_collate(self.collate, rows, indices)
        x, y = rows if isinstance(rows, tuple) else _collated(rows, indices)
        return x, torch.as_tensor(y)

    def _reseed(self, what: int | list[int], position: int) -> None:
        # By position too: a sample that is repeated in an epoch gets another crop each time.
        if self.draws:
            reseed(f"{self.key}/{position}/{what}")


def _hull(*ranges: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest range that contains these. If all are empty, the first sample, to get the shape of a label."""
    filled = [row for row in ranges if row[0] < row[1]] or [(0, 1)]
    return min(start for start, _ in filled), max(stop for _, stop in filled)


def _end_workers(prepared: Any) -> None:
    # Torch ends workers with the last reference to the iterator, which an error's traceback holds. No public API ends them.
    shutdown = getattr(prepared, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _collated(rows: list[Any], indices: Sequence[int]) -> tuple[Any, Any]:
    """Return the samples as one batch. Raises DataError if they are not pairs that can be stacked."""
    try:
        x, y = default_collate(rows)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        pairs = [(i, row) for i, row in zip(indices, rows, strict=True) if isinstance(row, Sequence) and len(row)]
        shapes = {tuple(row[0].shape): i for i, row in pairs if isinstance(row[0], Tensor)}
        if len(shapes) > 1:
            met = " and ".join(f"{shape} (sample {index})" for shape, index in list(shapes.items())[:2])
            raise DataError(
                f"samples of the shapes {met} do not make a batch: resize or crop in __getitem__, so that all have one shape"
            ) from None
        raise DataError(
            f"samples {indices[0]} to {indices[-1]} do not make a batch ({str(error).splitlines()[0]}): items are pairs "
            "(tensor, label); convoy.data.from_datasets takes PIL images too"
        ) from error
    return x, y


Collate = Callable[[list[Any]], Any]
"""A function from samples to a batch: a pair of tensors, inputs and labels."""


def _by_collate(collate: Collate, rows: list[Any], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    batch = collate(rows)
    pair = isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)
    if not pair or len(batch[0]) != len(indices):
        raise DataError(
            f"collate_fn gave {_kind(batch)} for {len(indices)} samples: return a pair of tensors, (inputs, labels), with one "
            "row of inputs for each sample"
        )
    return batch[0], batch[1]


def _kind(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"({', '.join(_kind(each) for each in batch)})"
    return f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"


def _unchanged(item: Any) -> Any:
    return item


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    model: Distributed | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
    augment: str | None = None,
) -> Loader:
    """Return a `Loader` of this device's part of each batch.

    Args:
        augment: how training images change from epoch to epoch, e.g. "crop,flip"; see `convoy.data.augment`.

    Raises:
        InputError: a batch below 1, an empty data set, an unknown augmentation.
    """
    steps = None
    if augment is not None:
        steps = read_augment(augment, getattr(dataset, "mean", ()), getattr(dataset, "std", ()))
    return Loader(
        dataset, batch_size, model, shuffle=shuffle, seed=seed, drop_last=drop_last, workers=workers, augment=steps
    )
