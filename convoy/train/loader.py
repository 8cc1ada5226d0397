"""The loader: every device gets its local part of the same global batches. Step k's samples depend only on seed and k."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from convoy.comm.control_messages import difference, gather
from convoy.data.augment import Augment, augment_steps
from convoy.data.boxed import BoxedImage
from convoy.data.datasets import own_random_numbers, reseed
from convoy.data.images import Images, Samples, naming
from convoy.errors import ConvoyError, DataError, InputError, MismatchError, shown
from convoy.layout.layout import Shape, whole
from convoy.machine.accelerator import bring
from convoy.runtime.batches import BatchPart, mark_part
from convoy.runtime.module import Distributed, not_distributed
from convoy.train.random_states import generators_in

COMPARED, COMPARED_SAMPLES, SAMPLE_TOLERANCE = "compared", 8, 1e-3
"""Samples of a data set that the devices compare. Two versions of a JPEG decoder differ by less."""

SHARED_MEMORY = (
    "the shared memory in /dev/shm is too small for the batches that worker processes prepare: enlarge it (docker run "
    "--shm-size 2g; in Kubernetes an emptyDir with medium Memory), or use fewer workers, smaller batches or workers=0"
)


class Loader:
    """The local batches of one device, from a data set of (input, label) pairs; `convoy.loader` makes one.

    Iterating yields (x, y). x is the local batch, in the layout of the plan's first layer; it may have zero samples. y has the
    labels of the global batch. If outputs stay on the device that computes them, y has the labels of this device's samples
    only, and only these are loaded.

    Args:
        dataset: map-style; items are (tensor, label). Labels come from `__getitem__`, never from an attribute such as
            `targets`, so a device loads every sample for which it returns a label. Random numbers that a sample draws from
            torch, `random` or NumPy while it loads (crops, flips) depend only on the seed, the epoch, the sample and its
            position in the epoch; with `__getitems__`, on those of all samples of the call.
        batch_size: global batch, in samples.
        model: the distributed model the batches are for; None: one device.
        shuffle: a new order in every epoch, by `seed` and epoch; False: the order of the data set.
        drop_last: leave out a last batch that is smaller.
        workers: processes that prepare batches ahead, two each, for one iteration; 0: in this process.
        augment: how images change from epoch to epoch, e.g. "crop,flip"; see `convoy.data.augment`.

    Raises:
        InputError: a batch below 1, a data set that is empty or has a random generator, or a model with several inputs.
        DataError: while iterating: samples that do not make a batch, or an error of the data set.
        MismatchError: while iterating: the devices have different data sets or are at different epochs.
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
        augment: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"a batch of {batch_size}: a batch holds one sample at least; give 1 or more")
        self.samples = len(dataset)  # type: ignore[arg-type]
        if self.samples < 1:
            raise InputError("the data set is empty: give one with samples")
        if model is not None and not isinstance(model, Distributed):
            raise not_distributed("the loader", model)
        self.dataset, self.batch_size, self.model, self.augment = dataset, batch_size, model, None
        self._device = torch.device("cpu") if model is None else model.group.torch_device
        if augment is not None:
            self.augment = Augment(augment_steps(augment), getattr(dataset, "mean", ()), getattr(dataset, "std", ()))
        self.shuffle, self.seed, self.drop_last, self.workers = shuffle, seed, drop_last, workers
        self.epoch, self.start = 0, 0
        self._position: tuple[int, int] | None = None  # epoch, and batches returned
        self._agreed = False  # with the other devices, on an epoch
        self._check_data()

    def _check_data(self) -> None:
        if own := generators_in(self.dataset):
            raise InputError(
                f"the data set has a random generator (a {type(own[0]).__name__}), whose numbers would depend on which samples "
                "a device loads: draw from torch, random or numpy, seeded for each sample; or use convoy.prepare without parts"
            )

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch of the next iteration; without it, each iteration is the next epoch.

        Args:
            start: the first batch, at most the length of the epoch; those before it are not loaded.
        """
        if start and not 0 <= start <= len(self):
            raise InputError(f"start {start} in an epoch of {len(self)} batches: give 0 to {len(self)}")
        self.epoch, self.start, self._position = epoch, start, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration, for `save_checkpoint(..., loader=loader)`."""
        epoch, batch = self._position or (self.epoch, self.start)
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a saved position."""
        self.set_epoch(state["epoch"], state["batch"])

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the sample indices of every batch of an epoch; the same on every device."""
        order: Sequence[int] = range(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.samples, generator=generator).tolist()
        return [list(order[i : i + self.batch_size]) for i in range(0, len(self) * self.batch_size, self.batch_size)]

    def __iter__(self) -> Iterator[Any]:
        guard = None if self.model is None else self.model.guard
        begun = self.begin() if guard is None else guard(self)
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        return self._iterate(begun, epoch, start)

    def begin(self, *, joined: bool = False) -> Any:
        """Agree with the other devices on an epoch; a device that joins takes theirs. Return the order of samples as JSON."""
        if self.model is not None:
            self._agree(self.model, adopts=joined and not self._agreed)
            self._agreed = True
        return self.seed, self.batches(self.epoch)

    def _iterate(self, begun: Any, epoch: int, start: int) -> Iterator[Any]:
        seed, rows = begun
        batches, device = rows[start:], self._device
        done = finished = 0  # batches returned, and those of finished steps
        while done < len(batches):
            reshards, steps, repeats = self._changes
            position = sum(map(len, rows[: start + done]))
            shapes, loader = self._prepared(batches[done:], f"{seed}/{epoch}", position, epoch)
            prepared = iter(loader)
            try:
                for batch, shape, loaded in zip(batches[done:], shapes, prepared, strict=True):
                    if isinstance(loaded, ConvoyError):
                        raise loaded
                    if self.model is not None:
                        self.model.announce(len(batch))
                    x, y = (bring(each, device) for each in loaded)
                    if self.model is not None:
                        mark_part(x, shape or (len(batch), *x.shape[1:]))
                    done += 1
                    self._position = epoch, start + done
                    yield x, y
                    now = self._changes
                    if now[2] != repeats:  # the unfinished step is repeated
                        done = finished
                        break
                    if now[1] != steps:
                        finished, steps = done, now[1]
                    if now[0] != reshards:
                        break  # batches prepared so far are of the old plan
            finally:
                end_workers(prepared)
        self._position = epoch + 1, 0
        if self.model is not None:
            self.model.announce(None)

    def _agree(self, model: Distributed, *, adopts: bool) -> None:
        """Check that every device iterates over the same epoch of the same loader, with the same weights.

        Args:
            adopts: take the epoch of the other devices.
        """
        own = {  # all that determines samples and their augmentation
            "the number of samples": self.samples, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed,
            "drop_last": self.drop_last, "the epoch": self.epoch, "the first batch": self.start,
            "augment": None if self.augment is None else repr(self.augment), "model.training": model.training,
            "samples": self._compared if model.group.devices > 1 else [],
        }  # fmt: skip
        rows = gather(model.group, "loader", own | {"the epoch": None} if adopts else own)
        known = [row["the epoch"] for row in rows if row["the epoch"] is not None]
        if adopts and known:
            self.epoch = known[0]
        rows = [row | {"the epoch": known[0]} if row["the epoch"] is None and known else row for row in rows]
        samples = [row.pop("samples") for row in rows]
        for name in rows[0]:
            if found := difference([row.get(name) for row in rows]):
                raise MismatchError(
                    f"the devices iterate over loaders that differ: {name} is {found}; give all devices the same loader, and "
                    "iterate over it on all of them"
                )
        for device, there in enumerate(samples):
            if any(abs(a - b) > SAMPLE_TOLERANCE * size for (a, size), (b, _) in zip(samples[0], there, strict=True)):
                raise MismatchError(
                    f"device {device} has other data than device 0: give every device the same files in the same order, and "
                    "split or shuffle them with a generator of one seed"
                )
        if model.training:
            model.check_copies()

    @cached_property
    def _compared(self) -> list[tuple[float, float]]:
        """Return checksums to compare data sets: sum and absolute sum of the inputs and the labels of some samples."""
        indices = [*range(0, self.samples, -(-self.samples // COMPARED_SAMPLES))]
        rows = _Rows([indices], [(BatchPart(((0, len(indices)),)),) * 2], [0])
        loaded = _LocalBatches(self.dataset, rows, None, COMPARED)[0]
        if isinstance(loaded, ConvoyError):
            raise loaded
        tensors = [each.detach().double() for pair in zip(*loaded, strict=True) for each in pair]
        return [(each.sum().item(), each.abs().sum().item()) for each in tensors]

    @property
    def _changes(self) -> tuple[int, int, int]:
        """The model's counters of reshards, of finished steps and of repeated steps."""
        m = self.model
        return (m.reshards, m.finished_steps, m.repeats) if m is not None else (0, 0, 0)

    def _prepared(
        self, batches: list[list[int]], key: str, position: int, epoch: int
    ) -> tuple[list[Shape], DataLoader[Any]]:
        """Load these batches ahead, and return the shape of each global batch, if it is known before, with them.

        Args:
            position: number of samples of the epoch before these batches.
        """
        found = {size: self._parts(size) for size in {len(batch) for batch in batches}}
        wanted = [found[len(batch)] for batch in batches]
        augment = None if self.augment is None else partial(self.augment, seed=self.seed, epoch=epoch)
        rows = _Rows(batches, wanted, list(accumulate(map(len, batches), initial=position)))
        parts = _LocalBatches(self.dataset, rows, augment, key)
        # Labels in memory need no worker.
        workers = self.workers if parts.labels is None or any(here.rows for here, _ in wanted) else 0
        # A separate generator, because the seeds of workers must not change dropout's random numbers.
        return [here.shape for here, _ in wanted], DataLoader(
            parts, batch_size=None, num_workers=workers, collate_fn=_unchanged, generator=torch.Generator(),
            pin_memory=workers > 0 and self._device.type != "cpu",  # in a thread of the DataLoader
        )  # fmt: skip

    def _parts(self, batch: int) -> tuple[BatchPart, BatchPart]:
        """Return the parts of the inputs and of the labels of a batch that this device loads."""
        if self.model is None:
            return (BatchPart(((0, batch),)),) * 2
        return self.model.input_part(batch), self.model.output_part(batch)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sample indices of some batches, the parts of inputs and labels on this device, and the position of each in the epoch."""

    indices: list[list[int]]
    parts: list[tuple[BatchPart, BatchPart]]
    positions: list[int]


class _LocalBatches(Dataset[Any]):
    """A data set with the local part of batch k as item k, so that a DataLoader prefetches it."""

    def __init__(
        self,
        dataset: Dataset[Any],
        rows: _Rows,
        augment: Callable[..., Tensor] | None,
        key: str,
    ) -> None:
        self.dataset, self.rows, self.augment, self.key = dataset, rows, augment, key
        # Images in memory draw no random numbers, and saving and restoring the generators takes longer than loading.
        self.draws = type(dataset) is not Images or augment is not None
        # Only Convoy's own classes are known to return `targets` as labels: a subclass or a wrapper may relabel.
        own = type(dataset) in (Images, Samples)
        self.labels: Tensor | None = dataset.targets if own else None  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.rows.indices)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor] | ConvoyError:
        """Return the local batch or its error. (torch would add the worker's traceback to a raised error.)"""
        try:
            with own_random_numbers() if self.draws else nullcontext():
                loaded = self._load(k, *self.rows.parts[k])
            if get_worker_info() is not None:
                # Torch shares tensors in a thread of the worker, which would hide an error.
                for each in loaded:
                    each.share_memory_()  # type: ignore[no-untyped-call]
            return loaded
        except ConvoyError as error:
            return error
        except RuntimeError as error:
            if "No space left on device" in str(error):
                return DataError(SHARED_MEMORY)
            raise

    def _load(self, k: int, here: BatchPart, labelled: BatchPart) -> tuple[Tensor, Tensor]:
        indices, parts = self.rows.indices[k], (here, labelled) if self.labels is None else (here,)
        # If there are none, the first sample shows the shapes.
        filled = [part.rows for part in parts if part.rows] or [range(1)]
        low = min(rows.start for rows in filled)
        x, y = self._fetch(k, low, max(rows.stop for rows in filled))
        augment = None if self.augment is None else partial(self.augment, indices=[indices[i] for i in here.rows])
        own = self._cut(x, k, low, here, augment)
        if self.labels is not None:
            return own, self.labels[[indices[i] for i in labelled.rows]]
        return own, self._cut(y, k, low, labelled)

    def _cut(
        self, values: Any, k: int, low: int, part: BatchPart, augment: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Return this device's part of the inputs or the labels of some samples of batch k.

        Args:
            values: a tensor, or one value per sample.
            low: position of the first of these samples in the batch.
        """
        chosen, first = values[part.rows.start - low : part.rows.stop - low], values[0]
        if isinstance(first, BoxedImage):
            if augment is not None:
                raise InputError("augment= and images that are read by box: use their crop() and flip() in __getitem__")
            shape = (len(chosen), *first.shape)
            spans = tuple((0, min(8, n)) for n in first.shape) if self.key == COMPARED else part.spans(shape)
            read = [each.read(spans)[None] for each in chosen] or [torch.empty(shape, dtype=first.dtype)]
            return read[0] if len(read) == 1 else torch.cat(read)  # a copy of one large image would double the memory
        if not isinstance(values, Tensor):
            chosen = _collated(chosen or values[:1], self.rows.indices[k])[: len(chosen)]
        x: Tensor = chosen if augment is None else augment(chosen)
        spans = part.spans(x.shape)
        if spans == whole(x.shape[1:]):
            return x
        return x[(slice(None), *(slice(*span) for span in spans))].contiguous()

    def _fetch(self, k: int, low: int, high: int) -> tuple[Any, Any]:
        """Return the inputs and the labels of some samples of batch k, each as a tensor or with one value per sample."""
        indices, position = self.rows.indices[k][low:high], self.rows.positions[k] + low
        if type(self.dataset) is Images:
            return self.dataset.batch(indices)
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
        try:
            x, y = rows if isinstance(rows, tuple) else zip(*rows, strict=True)
        except (TypeError, ValueError) as error:
            raise _no_batch(indices, error) from error
        return x, torch.as_tensor(y) if isinstance(rows, tuple) else y

    def _reseed(self, what: int | list[int], position: int) -> None:
        # By position too: a sample that is repeated in an epoch gets another crop each time.
        if self.draws:
            reseed(f"{self.key}/{position}/{what}")


def end_workers(prepared: Any) -> None:
    # Torch ends workers with the last reference to the iterator, which an error's traceback holds. No public API ends them.
    getattr(prepared, "_shutdown_workers", lambda: None)()


def _collated(values: Sequence[Any], indices: Sequence[int]) -> Tensor:
    try:
        return torch.as_tensor(default_collate(list(values)))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        if "No space left on device" in str(error):
            raise
        raise _no_batch(indices, error) from error


def _no_batch(indices: Sequence[int], error: Exception) -> DataError:
    return DataError(
        f"samples {shown(list(indices))} do not make a batch ({str(error).splitlines()[0]}): items are pairs (tensor, "
        "label) of one shape; convoy.data.from_datasets takes PIL images too"
    )


def _unchanged(item: Any) -> Any:
    return item
