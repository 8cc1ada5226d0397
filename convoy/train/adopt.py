"""Takes over an optimizer and a DataLoader that were made for the whole model, for one device's part of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from convoy.checkpoint.tensors import ModelShards
from convoy.comm.collectives import agree_on, from_first
from convoy.data.datasets import own_random_numbers
from convoy.errors import InputError
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import described
from convoy.train.loader import Loader

# --- the optimizer ---------------------------------------------------------------------------------------------------


Remembered = Mapping[str, Mapping[str, dict[str, Any]]]
"""What an optimizer remembers of each parameter, as `described` has it: by the parameter's name and its own."""


def remembered(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Remembered:
    """Describe what an optimizer remembers of a model's whole parameters, given by `names`.

    Raises:
        InputError: it works on none of them, or remembers something that cannot be split.
    """
    if not any(p in names for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            f"{type(optimizer).__name__} works on none of the {len(names)} parameters of the model: make it from "
            "model.parameters(), of the same model that you give to prepare"
        )
    rows = {names[p]: (p, state) for p, state in optimizer.state.items() if p in names and state}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, (p, state) in sorted(rows.items()):
        found[key] = {name: described(name, value, p) for name, value in sorted(state.items())}
        for row in found[key].values():
            row["near"] = row.get("near", False) and p.device.type != "cpu"
    return found


@torch.no_grad()
def rebind(optimizer: Optimizer, names: Mapping[Tensor, str], before: Remembered, part: Distributed) -> None:
    """Let an optimizer that was made from a model's parameters work on this device's shards of them. Every device calls it.

    It stays the same object, with its groups and settings, so that schedules that hold it continue. What it remembers
    (momentum) is split like the parameters; device 0's counts. Parameters that are not the model's (those of a loss, say)
    stay.

    Args:
        names: the model's parameters as they were before it was distributed.
        before: from `remembered`.

    Raises:
        MismatchError: the devices' optimizers have other settings, or other parameters beside the model's.
    """
    parts, pieces = ModelShards.of(part), dict(part.named_parameters())
    agree_on(part.group, "prepare: optimizer", _described(optimizer, names), "started with another optimizer")
    state = _moved_state(optimizer, names, before, parts)
    for group in optimizer.param_groups:
        # In place: LBFGS, for one, holds the list itself.
        group["params"][:] = [pieces[names[p]] if p in names else p for p in group["params"]]
    for parameter, name in names.items():
        optimizer.state.pop(parameter, None)
        if name in state:
            optimizer.state[pieces[name]] = state[name]


def _described(optimizer: Optimizer, names: Mapping[Tensor, str]) -> str:
    """Class, settings and parameters as a text that is the same on every device that was given the same."""
    groups = [
        {k: repr(v) for k, v in group.items() if k != "params"}
        | {"params": [names[p] if p in names else p.detach().tolist() for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"


def _moved_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], before: Remembered, parts: ModelShards
) -> dict[str, dict[str, Any]]:
    """What device 0's optimizer remembers of each parameter, as far as this device holds it, by the parameter's name."""
    own = {names[p]: state for p, state in optimizer.state.items() if p in names}
    rows: Remembered = from_first(parts.group, "prepare: optimizer state", lambda: before)
    result: dict[str, dict[str, Any]] = {}
    for key, named in rows.items():
        state: dict[str, Any] = {}
        for name, row in named.items():
            dtype = getattr(torch, str(row.get("dtype", "float32")))
            if row["kind"] == "tensor":
                given = own[key][name] if parts.is_first else torch.empty(0, dtype=dtype)
                piece = parts.scatter(key, given)
                state[name] = None if piece is None else piece.clone()
            elif row["kind"] == "number":
                near = parts.group.torch_device if row["near"] else torch.device("cpu")
                state[name] = torch.tensor(row["value"], dtype=dtype, device=near)
            else:
                state[name] = row["value"]
        if parts.has(key):
            result[key] = state
    return result


# --- the loader ------------------------------------------------------------------------------------------------------


class AdoptedLoader(Loader):
    """The batches of an ordinary DataLoader, the same on every device; or this device's part of each.

    Its sampler draws the order on device 0, with the random numbers that it would draw alone; all devices follow that order.
    Batch size, `drop_last`, `num_workers`, `worker_init_fn` and what concerns workers are those of the DataLoader.

    Args:
        source: made as for one device.
        model: the distributed model the batches are for.
        parts: hand out only this device's part of the inputs. It loads only the samples of which it hands out inputs or
            labels; with a `collate_fn` other than the default it loads and collates the whole batch, because that may join
            samples, and keeps its part.

    Raises:
        InputError: an iterable-style data set, no batches, or a DistributedSampler, which shares samples out itself.
    """

    def __init__(self, source: DataLoader[Any], model: Distributed | None, *, parts: bool = False) -> None:
        check_loader(source)
        super().__init__(
            source.dataset,
            batch_size_of(source),
            model,
            shuffle=False,
            drop_last=source.drop_last,
            workers=source.num_workers,
        )
        self.source, self.parts = source, parts
        if source.collate_fn is not default_collate:
            self.collate = source.collate_fn
        self.options = {
            "pin_memory": source.pin_memory,
            "worker_init_fn": source.worker_init_fn,
            "multiprocessing_context": source.multiprocessing_context if source.num_workers else None,
            "prefetch_factor": source.prefetch_factor,
            "timeout": source.timeout,
        }

    def __getattr__(self, name: str) -> Any:
        """What else the DataLoader has: scripts look at its sampler, and tell it the epoch."""
        if "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """As for any loader; a sampler that has a `set_epoch`, too, is told."""
        super().set_epoch(epoch, start)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _part(self, batch: int) -> tuple[int, int]:
        return super()._part(batch) if self.parts else (0, batch)

    def _labelled(self, batch: int) -> tuple[int, int]:
        return super()._labelled(batch) if self.parts else (0, batch)

    def begin(self, *, joined: bool = False) -> tuple[int, list[list[int]]]:
        if joined and not self._agreed:
            self._check_sampler()
        return super().begin(joined=joined)

    def batches(self, epoch: int) -> list[list[int]]:  # noqa: ARG002
        drawn = self._drawn()  # on all devices, so that random numbers drawn in the training loop stay alike
        if self.model is None:
            self.seed = drawn[0]
            return drawn[1]
        own = self._generators()
        told = from_first(self.model.group, "loader: order", lambda: [*drawn, [g.get_state().tolist() for g in own]])
        rows: list[list[int]]
        self.seed, rows, states = told
        # Every device may be the first one later, also one that joined.
        for generator, state in zip(own, states, strict=True):
            generator.set_state(torch.tensor(state, dtype=torch.uint8))
        return rows

    def _told(self, model: Distributed) -> dict[str, Any]:
        # The seed is device 0's in every epoch.
        return {name: value for name, value in super()._told(model).items() if name != "seed"}

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that the order is drawn with, beside torch's own."""
        sources = (self.source, self.source.sampler, self.source.batch_sampler)
        found = [getattr(each, "generator", None) for each in sources]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _check_sampler(self) -> None:
        """Raise InputError for a sampler whose state a device that joins later cannot have."""
        for each in (self.source.sampler, self.source.batch_sampler):
            if not type(each).__module__.startswith("torch.utils.data") and not hasattr(each, "set_epoch"):
                raise InputError(
                    f"the DataLoader's {type(each).__name__} is not torch's, and has drawn epochs before this device joined, "
                    "which may have changed its state: to let devices join, use a sampler of torch.utils.data, or give it a "
                    "set_epoch(epoch) that alone decides the order"
                )

    def _drawn(self) -> tuple[int, list[list[int]]]:
        # In the order in which the DataLoader's own iterator draws: first the seed of its workers, then the sampler's.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.source.generator))
        assert self.source.batch_sampler is not None
        return seed, [[int(i) for i in batch] for batch in self.source.batch_sampler]


def check_loader(source: Any) -> None:
    """
    Raises:
        InputError: a DataLoader whose batches cannot be shared out; says why and what to give.
    """
    kind = type(source)
    if not isinstance(source, DataLoader):
        raise InputError(f"prepare was given a {kind.__name__} as a loader: {_instead_of_loader(source)}")
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise InputError(
            f"{kind.__name__} has a way of its own to iterate, which would be lost: give a plain DataLoader, with what it does "
            "to batches in the data set or in collate_fn"
        )
    if isinstance(source.dataset, IterableDataset):
        raise InputError(
            f"the data set {type(source.dataset).__name__} is iterable-style: its samples have no numbers, so devices cannot "
            "load only their own; give a map-style one, with __len__ and __getitem__"
        )
    if source.batch_sampler is None:
        raise InputError("the DataLoader has batch_size=None, so it makes no batches: give it a batch_size")
    if isinstance(source.sampler, DistributedSampler):
        raise InputError(
            "the DataLoader has a DistributedSampler, which gives each device samples of its own: leave it out, with "
            "shuffle=True; Convoy shares out the samples of each batch"
        )


def _instead_of_loader(given: object) -> str:
    if isinstance(given, Loader):
        return "it is prepared already; go on with it, and give prepare what was there before"
    if isinstance(given, LRScheduler | ReduceLROnPlateau):
        return "leave it out; it goes on as it is, since the optimizer stays the same object"
    if hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        return "only DataLoaders can be shared out; give the DataLoader inside it"
    return "give DataLoaders"


def batch_size_of(source: DataLoader[Any]) -> int:
    """Samples in a whole batch.

    Raises:
        InputError: its batch sampler does not say.
    """
    size = source.batch_size or getattr(source.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise InputError(
            f"the batch sampler {type(source.batch_sampler).__name__} does not say how large a batch is: give it an attribute "
            "batch_size, that of a whole batch"
        )
    return size


def first_samples(source: DataLoader[Any]) -> Tensor:
    """The inputs of a data set's first samples as a small batch, for the shapes."""
    rows = [i % len(source.dataset) for i in range(2)]  # type: ignore[arg-type]
    with own_random_numbers():
        batch = source.collate_fn([source.dataset[i] for i in rows])
    x = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    if not isinstance(x, Tensor):
        raise InputError(
            f"the data set's batches are no pairs (inputs, labels) of tensors but {type(batch).__name__}: give items "
            "(tensor, label), or use convoy.distribute with a loader of your own"
        )
    return x
