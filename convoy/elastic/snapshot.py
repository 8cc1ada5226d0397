"""Takes snapshots of the state after a step, with copies of a neighbour's shards, and restores them in other layouts.

A device's snapshot has one buffer per dtype. The tensors that no other device has come first: this part of the buffer is sent
to the next device without further copies, during the next step.
"""

import copy
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.checkpoint import Stateful
from convoy.comm.control_messages import gather
from convoy.comm.group import Message, Pending
from convoy.layout.layout import Box, Shape, box, entries, intersection, local_shape, single, whole
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import described, number_of

Name = tuple[str, str]
"""A parameter's or buffer's key, and "" for the tensor itself or "0/momentum_buffer" for this state of optimizer 0."""

Rows = Mapping[str, Mapping[str, Any]]
"""Optimizer state as returned by `described`; the keys are "0/key" for optimizer 0 and the parameter `key`."""

NUMBERS: Name = ("", "numbers")
Boxes = Mapping[str, Sequence[Box]]  # the boxes of each tensor that one device holds, by key


@dataclass(frozen=True, slots=True)
class ShardTransfer:
    """A part of a tensor sent from one device to another, or kept (`sender == receiver`)."""

    key: str
    box: Box
    sender: int
    receiver: int


def without(box: Box, taken: Box) -> list[Box]:
    """Return the part of `box` outside `taken`, as disjoint boxes."""
    common = intersection(box, taken)
    if common is None:
        return [box]
    rest, left = [], list(box)
    for axis, ((start, stop), (lo, hi)) in enumerate(zip(box, common, strict=True)):
        for span in ((start, lo), (hi, stop)):
            if span[0] < span[1]:
                rest.append((*left[:axis], span, *left[axis + 1 :]))
        left[axis] = (lo, hi)
    return rest


def uncovered(wanted: Box, held: Iterable[Box]) -> list[Box]:
    """Return the parts of `wanted` that no held box covers."""
    rest = [wanted]
    for each in held:
        rest = [part for box in rest for part in without(box, each)]
    return rest


def newest_whole(kept: Sequence[Mapping[int, Boxes]], wanted: Mapping[str, Box]) -> int | None:
    """Return the last step for which the devices together hold every whole tensor; None if there is none.

    `kept` has the boxes that each device holds by step, `wanted` the box of each whole tensor.
    """
    for step in sorted({step for rows in kept for step in rows}, reverse=True):
        held = [rows[step] for rows in kept if step in rows]
        if not any(uncovered(box, (b for row in held for b in row.get(key, ()))) for key, box in wanted.items()):
            return step
    return None


def transfers(
    held: Sequence[Boxes], wanted: Sequence[Mapping[str, Box]], bytes_of: Mapping[str, int]
) -> tuple[ShardTransfer, ...]:
    """Return the transfers that give every device its wanted boxes. Of several senders, choose the one with the least traffic.

    Args:
        held: boxes on each device; together they cover all tensors.
        bytes_of: for each tensor, the bytes per entry including optimizer state.
    """
    found, sent = [], [0] * len(held)
    for receiver, boxes in enumerate(wanted):
        for key, wanted_box in boxes.items():
            rest = [wanted_box]
            while rest:
                part = rest.pop()
                order = sorted(range(len(held)), key=lambda d: (d != receiver, sent[d], d))
                sender, common = next(
                    (device, common)
                    for device in order
                    for mine in held[device].get(key, ())
                    if (common := intersection(mine, part)) is not None
                )
                found.append(ShardTransfer(key, common, sender, receiver))
                sent[sender] += (sender != receiver) * entries(common) * bytes_of[key]
                rest += without(part, common)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Entry:
    name: Name
    shape: Shape
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class Buffers:
    """Tensors stored in one flat buffer per dtype, in a fixed order."""

    def __init__(self, tensors: Sequence[Entry], device: torch.device) -> None:
        self.entries = tuple(tensors)
        self.flats: dict[torch.dtype, Tensor] = {}
        self.views: dict[Name, Tensor] = {}
        for dtype in dict.fromkeys(e.dtype for e in tensors):
            rows = [e for e in tensors if e.dtype == dtype]
            self.flats[dtype] = torch.empty(sum(e.count for e in rows), dtype=dtype, device=device)
            parts = torch.split(self.flats[dtype], [e.count for e in rows])
            self.views |= {e.name: part.view(e.shape) for e, part in zip(rows, parts, strict=True)}

    def first(self, tensors: Iterable[Entry]) -> list[Tensor]:
        """Return the starts of the buffers, up to the last of these first tensors, in a fixed order of dtypes."""
        counts: dict[torch.dtype, int] = {}
        for entry in tensors:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.count
        return [self.flats[dtype][: counts[dtype]] for dtype in sorted(counts, key=str)]


@dataclass(slots=True)
class Snapshot:
    """The state after a step on this device, with copies of the previous device's shards.

    Attributes:
        boxes, spare_boxes: the box of each parameter or buffer in `own` (this device's tensors) and `spare` (the copies).
        rows, spare_rows: the optimizer state of both, including numbers.
        others: the state that is the same on every device.
        complete: whether the copies have arrived.
    """

    step: int
    own: Buffers
    spare: Buffers
    boxes: dict[str, Box] = field(default_factory=dict)
    spare_boxes: dict[str, Box] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    spare_rows: Rows = field(default_factory=dict)
    others: Any = None
    complete: bool = False

    def parts(self, key: str) -> Iterable[tuple[Box, Buffers]]:
        """Yield the boxes held of a tensor, with the buffers that contain them."""
        if key in self.boxes:
            yield self.boxes[key], self.own
        if self.complete and key in self.spare_boxes:
            yield self.spare_boxes[key], self.spare

    def metadata(self) -> dict[str, Any]:
        """Return step, boxes and optimizer rows as JSON."""
        boxes = {key: [box for box, _ in self.parts(key)] for key in {**self.boxes, **self.spare_boxes}}
        rows = {**(self.spare_rows if self.complete else {}), **self.rows}
        return {"step": self.step, "boxes": {k: v for k, v in boxes.items() if v}, "rows": rows}


class SnapshotStore:
    """The last two snapshots of a model and its optimizers."""

    def __init__(self, model: Distributed, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, tuple(optimizers)
        self.kept: list[Snapshot] = []
        self._table: Rows = {}  # optimizer state of all parameters, without numbers
        self._signature = ""
        self._pending: Pending | None = None

    # --- taking -------------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Wait until the neighbour's shards of the last snapshot have arrived."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            kept = self.kept[-1]
            kept.spare_rows = _with_numbers(kept.spare_rows, kept.spare.views.get(NUMBERS))
        if self.kept:
            self.kept[-1].complete = True

    @property
    def has_changed(self) -> bool:
        """Whether names, kinds or dtypes in the optimizer state have changed since the last `share_forms`."""
        return json.dumps(_forms(self._rows()), sort_keys=True) != self._signature

    def share_forms(self) -> None:
        """Exchange the description of the optimizer state, without the values of numbers. Every device calls it."""
        rows = _forms(self._rows())
        tables = gather(self.model.group, "optimizer state", rows)
        self._table = {key: row for table in reversed(tables) for key, row in table.items()}
        self._signature = json.dumps(rows, sort_keys=True)

    @torch.no_grad()
    def take(self, step: int, others: Any) -> None:
        """Take a snapshot after a step, replacing the older one, and start to send copies to the neighbour.

        All devices must have the previous snapshot (see `arrived`), and have finished the same steps.
        """
        group = self.model.group
        rows, before = self._rows(), (group.device - 1) % group.devices
        sent, stays = self._entries(group.device, rows)
        tensors = {entry.name: self._tensor(entry.name) for entry in (*sent, *stays) if entry.name != NUMBERS}
        spare_table = self._table if group.devices > 1 else {}
        received = self._entries(before, spare_table)[0] if group.devices > 1 else []
        old = self.kept.pop(0) if len(self.kept) > 1 else None
        own = old.own if old and old.own.entries == (*sent, *stays) else Buffers([*sent, *stays], group.torch_device)
        spare = old.spare if old and old.spare.entries == tuple(received) else Buffers(received, group.torch_device)
        if tensors:  # a device may have no tensor
            torch._foreach_copy_([own.views[name] for name in tensors], list(tensors.values()))
        if NUMBERS in own.views:
            own.views[NUMBERS].copy_(torch.tensor(_numbers(rows, self._sent_keys(group.device)), dtype=torch.float64))
        kept = Snapshot(step, own, spare, self._boxes(group.device), rows=rows, others=others)
        if received:
            keys = self._sent_keys(before)
            kept.spare_boxes = {k: b for k, b in self._boxes(before).items() if k in keys}
            kept.spare_rows = {k: row for k, row in spare_table.items() if k.partition("/")[2] in keys}
        self.kept.append(kept)
        after = (group.device + 1) % group.devices
        sends = [Message(after, part) for part in own.first(sent)] if group.devices > 1 else []
        self._pending = group.start(sends, [Message(before, part) for part in spare.first(received)])

    def _boxes(self, device: int) -> dict[str, Box]:
        shapes, layouts = self.model.parameters_by_key, self.model.layouts
        found = {key: box(layouts[key], device, parameter.shape) for key, parameter in shapes.items()}
        return {key: here for key, here in found.items() if here is not None and entries(here)}

    def _sent_keys(self, device: int) -> list[str]:
        """Return the keys of tensors or shards that only this device has, in a fixed order."""
        return sorted(key for key in self._boxes(device) if single(self.model.layouts[key]))

    def _entries(self, device: int, rows: Rows) -> tuple[list[Entry], list[Entry]]:
        """Return the tensors that only this device has, plus the numbers of their optimizer state; and the other tensors."""
        sent = self._sent_keys(device)
        stays = [key for key in self._boxes(device) if key not in set(sent)]
        first = [entry for key in sent for entry in self._entries_of(key, device, rows)]
        if count := len(_numbers(rows, sent)):
            first.append(Entry(NUMBERS, (count,), torch.float64))
        return first, [entry for key in stays for entry in self._entries_of(key, device, rows)]

    def _entries_of(self, key: str, device: int, rows: Rows) -> list[Entry]:
        shape = local_shape(self.model.layouts[key], device, self.model.parameters_by_key[key].shape)
        found = [Entry((key, ""), shape, self.model.weights.own(key).detach().dtype)]
        for i in range(len(self.optimizers)):
            for name, row in sorted(rows.get(f"{i}/{key}", {}).items()):
                if row["kind"] == "tensor":
                    found.append(Entry((key, f"{i}/{name}"), shape, getattr(torch, row["dtype"])))
        return found

    def _tensor(self, name: Name) -> Tensor:
        key, state = name
        if not state:
            return self.model.weights.own(key).detach()
        i, _, name_there = state.partition("/")
        return self.optimizers[int(i)].state[self.model.module.get_parameter(key)][name_there]  # type: ignore[no-any-return]

    def _rows(self) -> dict[str, dict[str, Any]]:
        found = {}
        for key, parameter in self._parameters():
            for i, optimizer in enumerate(self.optimizers):
                if parameter.numel() and optimizer.state.get(parameter):
                    state = optimizer.state[parameter]
                    found[f"{i}/{key}"] = {name: described(name, value, parameter) for name, value in state.items()}
        return found

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for key, known in self.model.parameters_by_key.items():
            if not known.buffer:
                yield key, self.model.module.get_parameter(key)

    # --- restoring ----------------------------------------------------------------------------------------------------

    def gather_held(self) -> tuple[int | None, list[dict[str, Any]]]:
        """Return the last step whose whole state the devices hold, and for each device its boxes, its optimizer rows, and
        whether it "has" a snapshot of that step. Every device calls it, in a new group."""
        self._pending = None
        metadata = gather(self.model.group, "snapshots", [kept.metadata() for kept in self.kept])
        kept = [{row["step"]: _boxes_of(rows, row["step"]) for row in rows} for rows in metadata]
        shapes = {key: whole(tuple(p.shape)) for key, p in self.model.parameters_by_key.items()}
        step = newest_whole(kept, {key: each for key, each in shapes.items() if entries(each)})
        if step is None:
            return None, []
        rows_of = [{k: v for row in rows if row["step"] == step for k, v in row["rows"].items()} for rows in metadata]
        return step, [
            {"boxes": _boxes_of(rows, step), "rows": mine, "has": any(row["step"] == step for row in rows)}
            for rows, mine in zip(metadata, rows_of, strict=True)
        ]

    @torch.no_grad()
    def restore(self, step: int, held: Sequence[Mapping[str, Any]]) -> Any:
        """Restore the state after a step (see `gather_held`) in the current plan's layouts. Return this device's `others`."""
        group = self.model.group
        rows: dict[str, Any] = {}
        for each in reversed(held):
            rows |= each["rows"]
        wanted = [self._boxes(device) for device in range(group.devices)]
        sizes = {key: sum(e.dtype.itemsize for e in self._entries_of(key, 0, rows)) for key in wanted[0]}
        sizes = {key: sizes.get(key, 4) for boxes in wanted for key in boxes}
        plan = transfers([each["boxes"] for each in held], wanted, sizes)
        made = self._fresh(rows)
        self._move(step, plan, rows, made, wanted[group.device])
        self._install(made)
        for i, optimizer in enumerate(self.optimizers):
            for key, parameter in self._parameters():
                known = rows.get(f"{i}/{key}")
                if known is None:
                    optimizer.state.pop(parameter, None)
                    continue
                optimizer.state[parameter] = {
                    name: made[key, f"{i}/{name}"] if row["kind"] == "tensor" else number_of(row, parameter)
                    for name, row in known.items()
                }
        self.kept = [kept for kept in self.kept if kept.step <= step]
        return next((kept.others for kept in reversed(self.kept) if kept.step == step), None)

    @torch.no_grad()
    def forget(self) -> None:
        """Drop all state, and allocate empty shards for the current plan. The caller then loads a checkpoint."""
        self._install(self._fresh({}))
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.kept, self._pending = [], None

    def _fresh(self, rows: Rows) -> dict[Name, Tensor]:
        """Allocate all tensors of this device's entries; those without a shard are empty."""
        group = self.model.group
        wanted = [e for key in self.model.parameters_by_key for e in self._entries_of(key, group.device, rows)]
        return {e.name: torch.empty(e.shape, dtype=e.dtype, device=group.torch_device) for e in wanted}

    def _move(
        self, step: int, plan: Sequence[ShardTransfer], rows: Rows, made: Mapping[Name, Tensor], here: Mapping[str, Box]
    ) -> None:
        group = self.model.group
        outgoing: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        incoming: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for each in plan:
            for entry in self._entries_of(each.key, group.device, rows):
                if group.device == each.sender:
                    source = self._kept_part(step, entry.name, each.box)
                    if each.sender == each.receiver:
                        _part(made[entry.name], here[each.key], each.box).copy_(source)
                    else:
                        outgoing.setdefault((each.receiver, entry.dtype), []).append(source)
                elif group.device == each.receiver:
                    target = _part(made[entry.name], here[each.key], each.box)
                    incoming.setdefault((each.sender, entry.dtype), []).append(target)
        order = sorted(outgoing, key=lambda each: (each[0], str(each[1])))
        sends = [Message(peer, torch.cat([t.reshape(-1) for t in outgoing[peer, dtype]])) for peer, dtype in order]
        order = sorted(incoming, key=lambda each: (each[0], str(each[1])))
        sizes = {pair: sum(t.numel() for t in incoming[pair]) for pair in order}
        flats = {pair: torch.empty(sizes[pair], dtype=pair[1], device=group.torch_device) for pair in order}
        group.start(sends, [Message(pair[0], flats[pair]) for pair in order]).wait()
        for pair, flat in flats.items():
            parts = torch.split(flat, [t.numel() for t in incoming[pair]])
            for target, part in zip(incoming[pair], parts, strict=True):
                target.copy_(part.view(target.shape))

    def _kept_part(self, step: int, name: Name, wanted: Box) -> Tensor:
        for kept in self.kept:
            for held, buffers in kept.parts(name[0]) if kept.step == step else ():
                if all(lo <= start and stop <= hi for (lo, hi), (start, stop) in zip(held, wanted, strict=True)):
                    return _part(buffers.views[name], held, wanted)
        raise AssertionError(f"no snapshot here has {name} {wanted}")

    def _install(self, made: Mapping[Name, Tensor]) -> None:
        for key in self.model.parameters_by_key:
            self.model.weights.put(key, made[key, ""])


def _boxes_of(mine: Iterable[Mapping[str, Any]], step: int) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for row in mine:
        for key, boxes in row["boxes"].items() if row["step"] == step else ():
            found.setdefault(key, []).extend(tuple((int(a), int(b)) for a, b in each) for each in boxes)
    return found


def _part(tensor: Tensor, held: Box, wanted: Box) -> Tensor:
    """Return the box `wanted` of a tensor that holds the box `held`."""
    for axis, ((start, _), (lo, hi)) in enumerate(zip(held, wanted, strict=True)):
        tensor = tensor.narrow(axis, lo - start, hi - lo)
    return tensor


def _is_number(row: Mapping[str, Any]) -> bool:
    return row["kind"] == "number" and not isinstance(row.get("value", 0.0), list)


def _forms(rows: Rows) -> dict[str, Any]:
    """Return optimizer state without the values of numbers, which are sent with the tensors."""
    return {
        key: {n: {k: v for k, v in row.items() if k != "value"} if _is_number(row) else row for n, row in each.items()}
        for key, each in rows.items()
    }


def _numbers(rows: Rows, keys: Sequence[str]) -> list[float]:
    """Return the numbers in the optimizer state of these parameters, in a fixed order."""
    named = [each for each in sorted(rows) if each.partition("/")[2] in set(keys)]
    return [float(rows[k][n].get("value", 0.0)) for k in named for n in sorted(rows[k]) if _is_number(rows[k][n])]


def _with_numbers(rows: Rows, numbers: Tensor | None) -> Rows:
    values = iter([] if numbers is None else numbers.tolist())
    return {
        key: {
            n: {**rows[key][n], "value": next(values)} if _is_number(rows[key][n]) else rows[key][n]
            for n in sorted(rows[key])
        }
        for key in sorted(rows)
    }


def take(
    place: Any, optimizers: Sequence[Optimizer], others: Sequence[Stateful], device: torch.device
) -> dict[str, Any]:
    """Return the state other than the model: data position, optimizer settings, schedules, scaler, random number generators."""
    settings = [
        [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    return {
        "place": place, "settings": settings, "others": [copy.deepcopy(each.state_dict()) for each in others],
        "random": torch.get_rng_state(),
        "there": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
    }  # fmt: skip


def restore(
    kept: dict[str, Any],
    optimizers: Sequence[Optimizer],
    others: Sequence[Stateful],
    device: torch.device,
    random: Tensor | None,
) -> Any:
    """Restore the state returned by `take`, or another `random` state of torch. Return the position in the data."""
    for optimizer, rows in zip(optimizers, kept["settings"], strict=True):
        for group, settings in zip(optimizer.param_groups, rows, strict=True):
            group.update(settings)
    for each, state in zip(others, kept["others"], strict=True):
        each.load_state_dict(copy.deepcopy(state))
    torch.set_rng_state(kept["random"] if random is None else random)
    if kept["there"] is not None:
        torch.get_device_module(device).set_rng_state(kept["there"], device)
    return kept["place"]


MOST_PART = 0.02  # largest fraction of the time for snapshots
TIMED = 5  # snapshots and steps to time before choosing the interval; the first one also allocates memory


def interval_of(snapshots_s: Sequence[float], steps_s: Sequence[float]) -> int:
    """Return the steps per snapshot for which snapshots take at most `MOST_PART` of the time; 1 until enough are timed."""
    if min(len(snapshots_s), len(steps_s)) < TIMED:
        return 1
    snapshot_s, step_s = (statistics.median(each[:TIMED]) for each in (snapshots_s, steps_s))
    return max(1, math.ceil(snapshot_s / (MOST_PART * step_s))) if step_s else 1
