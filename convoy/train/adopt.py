"""Adapts an optimizer and a DataLoader that were made for one device to a distributed model."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from convoy.checkpoint.run_folder import torch_dtype
from convoy.checkpoint.tensors import ModelShards
from convoy.comm.control_messages import agree_on, from_first
from convoy.data.boxed import BoxedImage
from convoy.errors import InputError
from convoy.machine.accelerator import bring, random_state_kept
from convoy.model.graph import Layer
from convoy.model.nested import Arguments, Example, map_tensors, tensors_of
from convoy.model.tracing import check_parameters, trace, unwrapped
from convoy.runtime.model_checks import ModelChecks, hook_tables, sample_of
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import described
from convoy.runtime.shards import ELEMENTWISE, check_not_distributed, guard_state, is_shard
from convoy.train.loader import SHARED_MEMORY, Loader, end_workers
from convoy.train.random_states import generators_in, read_states, set_states


def state_rows(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Mapping[str, Mapping[str, Any]]:
    """Describe the optimizer state of a model's unsplit parameters. `names`: their names.

    InputError if the optimizer has none of these parameters, or state that cannot be split.
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
def rebind(
    optimizer: Optimizer, names: Mapping[Tensor, str], before: Mapping[str, Mapping[str, Any]], part: Distributed
) -> None:
    """Replace a model's parameters in an optimizer by this device's shards of them. Every device calls it.

    The optimizer stays the same object, so that its schedules continue to work. Its state (such as momentum) comes from device
    0 and is split like the parameters. Parameters of other modules, such as a loss, stay. MismatchError if the devices'
    optimizers differ in settings, or in parameters of other modules.

    Args:
        names, before: the model's parameters as they were before it was distributed, and their `state_rows`.
    """
    guard_state(optimizer)
    parts, shards = ModelShards.of(part), dict(part.named_parameters())
    groups = [
        {k: repr(v) for k, v in group.items() if k != "params"}
        | {"params": [names[p] if p in names else is_shard(p) or sample_of(p.detach()) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    agree_on(part.group, "prepare: optimizer", f"{type(optimizer).__name__} {groups}", "started with another optimizer")
    own = {names[p]: state for p, state in optimizer.state.items() if p in names}
    rows = from_first(parts.group, "prepare: optimizer state", lambda: before)

    def whole(key: str, name: str) -> Tensor:
        dtype = torch_dtype(rows[key][name]["dtype"])
        return own[key][name] if parts.group.device == 0 else torch.empty(0, dtype=dtype)

    state = {key: parts.scatter_state(key, named, partial(whole, key)) for key, named in rows.items()}
    for group in optimizer.param_groups:
        # In place: LBFGS, for one, holds the list itself.
        group["params"][:] = [shards[names[p]] if p in names else p for p in group["params"]]
    for parameter, name in names.items():
        optimizer.state.pop(parameter, None)
        if name in state:
            optimizer.state[shards[name]] = state[name]


class AdoptedLoader(Loader):
    """The batches of an ordinary DataLoader, on every device as on one device.

    Every device iterates over the whole DataLoader, so samplers, worker processes and random numbers in the data set work as
    on one device. At the start of each iteration all devices get device 0's random states: of torch, Python, NumPy, and of
    generators that the DataLoader, its sampler and its data set hold.
    """

    def __init__(self, source: DataLoader[Any], model: Distributed | None) -> None:
        check_loader(source)
        self.source = source
        super().__init__(source.dataset, batch_size_of(source), model, shuffle=False, drop_last=source.drop_last)
        self._begun: str | None = None  # the random states at the start of the latest iteration
        self._resumed: tuple[int, int] | None = None  # the position of a loaded checkpoint in that iteration

    def _check_data(self) -> None: ...  # generators of the data set are right: every device draws all numbers

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the DataLoader, such as its sampler."""
        if "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, also of a sampler with `set_epoch`. `start`: the position from a loaded checkpoint, or 0."""
        if start and (epoch, start) != self._resumed:
            raise InputError(
                f"start {start} in epoch {epoch}: the order of a DataLoader depends on random states, which are not those of "
                "that epoch: save and load them with the checkpoint, save_checkpoint(..., loader=loader) and "
                "load_checkpoint(..., loader=loader)"
            )
        super().set_epoch(epoch, start)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the random states at the start of the epoch and now, for `save_checkpoint`."""
        self._refuse_persistent_workers("be saved")
        return super().state_dict() | {"begun": self._begun, "now": read_states(self._generators, self._device)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the random states, and let the next iteration continue from a saved position.

        The earlier batches of the epoch are loaded again, because samples may draw random numbers.
        """
        self._begun, self._resumed = state["begun"], (state["epoch"], state["batch"])
        super().load_state_dict(state)
        set_states(state["now"], self._generators, self._device)

    def __iter__(self) -> Iterator[Any]:
        if not self.start or self._begun is None:
            return super().__iter__()
        now = read_states(self._generators, self._device)
        set_states(self._begun, self._generators, self._device)
        batches = super().__iter__()
        set_states(now, self._generators, self._device)
        return batches

    def begin(self, *, joined: bool = False) -> Any:
        if joined and not self._agreed:
            self._refuse_persistent_workers("be given to a joining device")
            for each in (self.source.sampler, self.source.batch_sampler):
                if not type(each).__module__.startswith("torch.utils.data") and not hasattr(each, "set_epoch"):
                    raise InputError(
                        f"the DataLoader's {type(each).__name__} is not torch's, and has drawn epochs before this device "
                        "joined, which may have changed its state: to let devices join, use a sampler of torch.utils.data, "
                        "or give it a set_epoch(epoch) that alone decides the order"
                    )
        super().begin(joined=joined)
        states = read_states(self._generators, self._device)
        return states if self.model is None else from_first(self.model.group, "loader: random states", lambda: states)

    def batches(self, epoch: int) -> list[list[int]]:  # noqa: ARG002
        return []  # known to the DataLoader's sampler only

    def _iterate(self, begun: str, epoch: int, start: int) -> Iterator[Any]:
        self._begun = begun
        if self.model is not None:
            self.model.announce(None)
        set_states(begun, self._generators, self._device)
        batches = iter(self.source)
        for _ in range(start):
            next(batches)
        return self._yielded(batches, epoch, start)

    def _yielded(self, batches: Iterator[Any], epoch: int, done: int) -> Iterator[Any]:
        """Yield the batches; after a lost device, yield those of the unfinished step again."""
        kept: list[Any] = []  # since the last finished step
        again: list[Any] = []
        repeatable = self.model is not None and self.model.guard is not None
        try:
            while again or (batch := next(batches, None)) is not None:
                batch = again.pop(0) if again else batch
                if repeatable:
                    kept.append(batch)
                _, steps, repeats = self._changes
                done += 1
                self._position = epoch, done
                # A copy if the batch may be needed again, because the loop may change it in place.
                yield map_tensors(batch, lambda x: bring(x.clone() if repeatable else x, self._device))
                if self._changes[2] != repeats:
                    again, kept, done = kept + again, [], done - len(kept)
                elif self._changes[1] != steps:
                    kept = []
        except RuntimeError as error:
            if "No space left on device" in str(error):
                error.add_note(SHARED_MEMORY)
            raise
        finally:
            if not self.source.persistent_workers:
                end_workers(batches)
        self._position = epoch + 1, 0

    @property
    def _generators(self) -> list[Any]:
        return generators_in(self.source)

    @cached_property
    def _compared(self) -> list[tuple[float, float]]:
        return []  # the model compares global batches

    def _refuse_persistent_workers(self, what: str) -> None:
        if self.source.persistent_workers:
            raise InputError(
                f"the DataLoader has persistent_workers, whose random states cannot {what}: leave persistent_workers out"
            )


def check_prepared(model: object, optimizer: object, loader: Any, more: Sequence[Any]) -> None:
    """Raise InputError for arguments that `prepare` cannot take over."""
    if isinstance(model, nn.Module):
        check_not_distributed(model)
        check_parameters(unwrapped(model))
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer | None)):
        if not isinstance(given, kind):
            raise InputError(
                f"prepare takes a model, an optimizer and a loader, in this order; its {name} is a {type(given).__name__}"
            )
    is_dataset = not isinstance(loader, DataLoader) and hasattr(loader, "__getitem__")
    for each in more if is_dataset else (loader, *more):
        check_loader(each)


_refused: list[str] = []  # by all checks of this process


def list_refusals(model: nn.Module, optimizer: Any, loaders: Sequence[Any], batch_size: int | None, call: Any) -> None:
    """Print all that `prepare` refuses or does not split, and let the first forward of the model end the script."""
    refused: list[str] = []

    def tried(work: Callable[..., Any], *given: Any) -> Any:
        try:
            return work(*given)
        except InputError as error:
            refused.append(f"refused: {error}")

    def layers() -> tuple[list[Layer], str]:
        inner = unwrapped(model)
        traced = trace(inner, example_of(first_batch(in_batches(loaders[0], batch_size)), inner, call))
        checks = ModelChecks(inner)
        tried(checks.check, hook_tables(inner, traced), dict.fromkeys(checks.held, True))
        return [*traced.graph.layers.values()], traced.note

    tried(check_prepared, model, optimizer, loaders[0], ())
    found, note = ([], "") if refused else tried(layers) or ([], "")
    for each in loaders[1:]:
        tried(check_loader, each)
    if isinstance(optimizer, Optimizer) and isinstance(model, nn.Module):
        tried(state_rows, optimizer, {p: name for name, p in unwrapped(model).named_parameters()})
    flop = sum(layer.flop for layer in found) or 1
    whole = [each for each in found if each.kind == "opaque" and not each.per_sample]
    lines = [f"not split: {each.flop / flop:.0%} of the arithmetic, {each.name!r}: {each.reason}" for each in whole]
    if isinstance(optimizer, Optimizer) and type(optimizer) not in ELEMENTWISE:
        lines.append(f"{type(optimizer).__name__}: only with plans that copy parameters ('data', 'data-by-speed')")
    lines.append(f"checked prepare: {len(refused)} refused, {len(whole)} layers not split")
    print("\n".join([*refused, *filter(None, [note]), *lines]), flush=True)
    _refused.extend(refused)
    if not isinstance(model, nn.Module):
        sys.exit(1)
    unwrapped(model).register_forward_pre_hook(lambda *_: sys.exit(bool(_refused)))


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
    """Raise InputError for a DataLoader whose batches cannot be split."""
    if not isinstance(source, DataLoader):
        remedy = "give DataLoaders, not what wraps them"
        if isinstance(source, Loader):
            remedy = "it is prepared already; keep it, and give prepare the original DataLoader"
        elif isinstance(source, LRScheduler | ReduceLROnPlateau):
            remedy = "leave it out; it continues to work, since the optimizer stays the same object"
        raise InputError(f"prepare was given a {type(source).__name__} as a loader: {remedy}")
    if isinstance(source.dataset, data.IterableDataset):
        raise InputError(
            f"the data set {type(source.dataset).__name__} is iterable-style: its samples have no numbers, so devices cannot "
            "load only their own; give a map-style one, with __len__ and __getitem__"
        )
    if source.batch_sampler is None:
        raise InputError("the DataLoader has batch_size=None, so it makes no batches: give it a batch_size")
    refuse_distributed_sampler(source)


def refuse_distributed_sampler(source: Any) -> None:
    if isinstance(getattr(source, "sampler", None), data.DistributedSampler):
        raise InputError(
            "the DataLoader has a DistributedSampler, which gives each device samples of its own: leave it out, with "
            "shuffle=True; Convoy splits each batch"
        )


def batch_size_of(source: DataLoader[Any]) -> int:
    """Return the samples in a global batch. InputError if the batch sampler has no batch size."""
    size = source.batch_size or getattr(source.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise InputError(
            f"the batch sampler {type(source.batch_sampler).__name__} has no batch size: give it an attribute batch_size, in "
            "samples of the global batch"
        )
    return size


def first_batch(source: DataLoader[Any]) -> Any:
    """Return a batch of two samples of a loader. A worker process loads it, because the data set may count its calls."""
    rows = [i % len(source.dataset) for i in range(2)]  # type: ignore[arg-type]
    plain = type(source.dataset) is TensorDataset and source.collate_fn is default_collate

    def collate(items: Any) -> Any:
        boxed = isinstance(items, list) and read_by_box(items[0])
        return tuple(items[0]) if boxed else source.collate_fn(items)

    how: Any = {} if plain else {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 20.0}
    once = DataLoader(source.dataset, 2, sampler=rows, collate_fn=collate, generator=torch.Generator(), **how)
    try:
        batch = next(iter(once))
    except Exception:  # such as images on a GPU, which a worker cannot read
        generators, cpu = generators_in(source), torch.device("cpu")
        states = read_states(generators, cpu)
        batch = collate([source.dataset[i] for i in rows])
        set_states(states, generators, cpu)
    return map_tensors(batch, lambda t: t.detach().cpu().clone())


def read_by_box(item: Any) -> bool:
    """Return whether an item of a data set has images that are read box by box."""
    return isinstance(item, tuple | list) and any(isinstance(each, BoxedImage) for each in item)


def loader_of(source: DataLoader[Any], model: Distributed, *, boxed: bool) -> Loader:
    """Return the loader of a distributed model for an ordinary DataLoader, or for a data set of images that are read by box.

    A plain DataLoader makes no batches of such images. So the loader is `convoy.loader`, with the seed 0.
    """
    if not boxed:
        return AdoptedLoader(source, model)
    if source.collate_fn is not default_collate or type(source.sampler) not in (RandomSampler, SequentialSampler):
        raise InputError(
            "the DataLoader has its own collate_fn or sampler, and images that are read by box, of which each device loads "
            "only its part: use torch's samplers, and change images in __getitem__"
        )
    size, shuffle = batch_size_of(source), type(source.sampler) is RandomSampler
    return Loader(source.dataset, size, model, shuffle=shuffle, drop_last=source.drop_last, workers=source.num_workers)


def example_of(batch: Any, model: nn.Module, call: Callable[[Any, Any], object] | None) -> Example:
    """Return the arguments of the model for a batch.

    Args:
        call: calls the model, its first argument, as the loop does. None: of a dict that has the names of forward's required
            parameters, the model gets these; of a list of images all parts, of others as many tensors as forward requires.
    """
    if read_by_box(batch):  # only shapes and dtypes matter
        empty = (x if isinstance(x, BoxedImage) else torch.as_tensor(x) for x in batch)
        batch = tuple(torch.zeros((), dtype=x.dtype).expand(2, *x.shape) for x in empty)
    if call is not None:
        given: list[Arguments] = []
        try:
            with random_state_kept(torch.device("cpu")):
                call(lambda *args, **kwargs: given.append(Arguments(args, kwargs)), batch)
        except Exception:  # such as an item of the model's result, which is None here
            if not given:
                raise
        if not given:
            raise InputError("call= of prepare does not call its first argument, the model: call it as the loop does")
        return given[0]
    parameters = [*inspect.signature(type(model).forward).parameters.values()][1:]
    names = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if isinstance(batch, Mapping) and names and all(name in batch for name in names):
        return {name: batch[name] for name in names}
    tensors = tensors_of(batch)[: len(names) or 1]
    listed = len(names) < 2 and type(batch) in (tuple, list) and type(batch[0]) in (tuple, list)
    if listed and tensors and tensors[0].shape[:1] != (2,):  # a list of images, not one batch of two samples
        return tuple(batch[: len(parameters)])
    if len(tensors) < (len(names) or 1):
        raise InputError(
            f"the model takes {', '.join(names) or 'a tensor'}, and the data set's batches are {type(batch).__name__}s with "
            f"{len(tensors)} tensors: say how the loop calls it, e.g. prepare(..., call=lambda model, batch: model(batch[0]))"
        )
    return dict(zip(names, tensors, strict=True)) if names else tuple(tensors)
