"""Takes over an optimizer and a DataLoader that were made for one device, for a distributed model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from convoy.checkpoint.tensors import ModelShards
from convoy.comm.control_messages import agree_on, from_first
from convoy.data.datasets import own_random_numbers
from convoy.errors import InputError
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import described
from convoy.runtime.shards import check_not_distributed, guard_state
from convoy.train.loader import Loader

# --- the optimizer ---------------------------------------------------------------------------------------------------


StateRows = Mapping[str, Mapping[str, dict[str, Any]]]
"""Optimizer state, as `described` returns it, by parameter and state name."""


def state_rows(optimizer: Optimizer, names: Mapping[Tensor, str]) -> StateRows:
    """Describe the optimizer state of a model's whole parameters, given by `names`.

    InputError if the optimizer has none of them, or state that cannot be split.
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
def rebind(optimizer: Optimizer, names: Mapping[Tensor, str], before: StateRows, part: Distributed) -> None:
    """Replace a model's parameters in an optimizer by this device's shards of them. Every device calls it.

    The optimizer stays the same object, so that its schedules continue to work. Its state (momentum) is taken from device 0
    and split like the parameters. Parameters of other modules, such as a loss, stay.

    Args:
        names: the model's parameters as they were before it was distributed.
        before: from `state_rows`.

    Raises:
        MismatchError: the devices' optimizers differ in settings, or in parameters that are not the model's.
    """
    guard_state(optimizer)
    parts, shards = ModelShards.of(part), dict(part.named_parameters())
    groups = [
        {k: repr(v) for k, v in group.items() if k != "params"}
        | {"params": [names[p] if p in names else p.detach().tolist() for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    agree_on(part.group, "prepare: optimizer", f"{type(optimizer).__name__} {groups}", "started with another optimizer")
    state = _moved_state(optimizer, names, before, parts)
    for group in optimizer.param_groups:
        # In place: LBFGS, for one, holds the list itself.
        group["params"][:] = [shards[names[p]] if p in names else p for p in group["params"]]
    for parameter, name in names.items():
        optimizer.state.pop(parameter, None)
        if name in state:
            optimizer.state[shards[name]] = state[name]


def _moved_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], before: StateRows, parts: ModelShards
) -> dict[str, dict[str, Any]]:
    """Return the local shards of device 0's optimizer state, by parameter."""
    own = {names[p]: state for p, state in optimizer.state.items() if p in names}
    rows: StateRows = from_first(parts.group, "prepare: optimizer state", lambda: before)
    result: dict[str, dict[str, Any]] = {}
    for key, named in rows.items():
        state: dict[str, Any] = {}
        for name, row in named.items():
            dtype = getattr(torch, str(row.get("dtype", "float32")))
            if row["kind"] == "tensor":
                given = own[key][name] if parts.is_first else torch.empty(0, dtype=dtype)
                shard = parts.scatter(key, given)
                state[name] = None if shard is None else shard.clone()
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
    """The batches of an ordinary DataLoader, the same on every device; or the local part of each.

    Its sampler draws the order on device 0, as on one device; all devices follow that order. Batch size, `drop_last` and worker
    options are those of the DataLoader.

    Args:
        source: made as for one device.
        parts: return only the local part of the inputs, and load only samples needed for returned inputs or labels. With a
            `collate_fn` other than the default it loads and collates the global batch, because that may mix samples.

    Raises:
        InputError: an iterable-style data set, no batches, or a DistributedSampler, which splits samples itself.
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
        """Return an attribute of the DataLoader, such as its sampler."""
        if "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, also of a sampler with `set_epoch`."""
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
        # All devices draw, so that their later random numbers stay equal. The order is that of the DataLoader's own iterator:
        # first the seed of its workers, then the sampler's numbers.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.source.generator))
        assert self.source.batch_sampler is not None
        drawn = seed, [[int(i) for i in batch] for batch in self.source.batch_sampler]
        if self.model is None:
            self.seed = drawn[0]
            return drawn[1]
        # Generators that the order depends on, except torch's default.
        sources = (self.source, self.source.sampler, self.source.batch_sampler)
        found = [getattr(each, "generator", None) for each in sources]
        own = list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
        order = from_first(self.model.group, "loader: order", lambda: [*drawn, [g.get_state().tolist() for g in own]])
        rows: list[list[int]]
        self.seed, rows, states = order
        # Every device may become device 0 later, also one that joined.
        for generator, state in zip(own, states, strict=True):
            generator.set_state(torch.tensor(state, dtype=torch.uint8))
        return rows

    def _required(self, model: Distributed) -> dict[str, Any]:
        # The seed is device 0's in every epoch.
        return {name: value for name, value in super()._required(model).items() if name != "seed"}

    def _check_sampler(self) -> None:
        """Raise InputError if a joining device cannot reproduce the sampler's state."""
        for each in (self.source.sampler, self.source.batch_sampler):
            if not type(each).__module__.startswith("torch.utils.data") and not hasattr(each, "set_epoch"):
                raise InputError(
                    f"the DataLoader's {type(each).__name__} is not torch's, and has drawn epochs before this device joined, "
                    "which may have changed its state: to let devices join, use a sampler of torch.utils.data, or give it a "
                    "set_epoch(epoch) that alone decides the order"
                )


def check_prepared(model: object, optimizer: object, loader: Any, more: Sequence[Any]) -> None:
    """Refuse arguments that `prepare` cannot take over.

    Raises:
        InputError: with the argument and the remedy.
    """
    if isinstance(model, nn.Module):
        check_not_distributed(model)
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer | None)):
        if not isinstance(given, kind):
            raise InputError(
                f"prepare takes a model, an optimizer and a loader, in this order; its {name} is a {type(given).__name__}"
            )
    is_dataset = not isinstance(loader, DataLoader) and hasattr(loader, "__getitem__")
    for each in more if is_dataset else (loader, *more):
        check_loader(each)


def in_batches(loader: DataLoader[Any] | Dataset[Any], batch_size: int | None) -> DataLoader[Any]:
    """Return a DataLoader unchanged, or make one from a data set."""
    if not isinstance(loader, DataLoader):
        if batch_size is None:
            raise InputError("prepare was given a data set and no batch_size: give one, in samples of the global batch")
        loader = DataLoader(loader, batch_size, shuffle=True)
        check_loader(loader)
    elif batch_size is not None and batch_size != batch_size_of(loader):
        raise InputError(
            f"batch_size={batch_size}, and the DataLoader has batches of {batch_size_of(loader)}: leave batch_size out, it is "
            "for a data set"
        )
    return loader


def check_loader(source: Any) -> None:
    """Refuse a DataLoader if its batches cannot be split. Raises InputError with the reason and the remedy."""
    kind = type(source)
    if not isinstance(source, DataLoader):
        raise InputError(f"prepare was given a {kind.__name__} as a loader: {_instead_of_loader(source)}")
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise InputError(
            f"{kind.__name__} overrides iteration, which would be lost: give a plain DataLoader, and move its changes "
            "of batches into the data set or collate_fn"
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
            "shuffle=True; Convoy splits each batch"
        )


def _instead_of_loader(given: object) -> str:
    if isinstance(given, Loader):
        return "it is prepared already; keep it, and give prepare the original DataLoader"
    if isinstance(given, LRScheduler | ReduceLROnPlateau):
        return "leave it out; it continues to work, since the optimizer stays the same object"
    if hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        return "only DataLoaders can be split; give the DataLoader inside it"
    return "give DataLoaders"


def batch_size_of(source: DataLoader[Any]) -> int:
    """Return the samples in a global batch. InputError if the batch sampler has no batch size."""
    size = source.batch_size or getattr(source.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise InputError(
            f"the batch sampler {type(source.batch_sampler).__name__} has no batch size: give it an attribute batch_size, in "
            "samples of the global batch"
        )
    return size


def first_samples(source: DataLoader[Any]) -> Tensor:
    """Return the inputs of a data set's first samples as a small batch, to get their shapes."""
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
