"""Searches plans for one set of devices, by dynamic programming over the layers of a model.

A state holds the layouts of the live tensors. A layer's choices are its possible strategies. A choice costs the seconds of
its arithmetic, of the moves of its inputs and their gradients, and of its gradient sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.layout.layout import Layout, OnOne, Partial, Split, everywhere
from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Layer
from convoy.plan.device_program import whole_size
from convoy.plan.placing import placements, unnamed
from convoy.plan.plan import Plan
from convoy.plan.presets import SHARE_UNITS
from convoy.plan.steps import by_samples
from convoy.plan.strategy import Batch, Channel, Filter, One, Placement, Sharding, Spatial, Strategy, follow, place
from convoy.planner.analytic import CostModel, Side

MANY_QUESTIONS = 400
"""Above this product of distinct layers and distinct devices, `_shares` samples time curves at fewer points."""

HALVINGS = 50
"""Bisection steps for the time at which the slowest device finishes."""

Seconds = npt.NDArray[np.float64]

BEAM = 48
"""States kept per layer. Residual nets need a handful; only dense concatenation needs more."""

SPATIAL_SAMPLES = 4
"""The search tries to split images if there are fewer samples per device. With more, a split by samples sends less."""

EVEN_DEVICES, EVEN_LAYERS = 8, 100
"""Up to these numbers of devices and layers, the search also tries to split filters evenly, not only by speed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted seconds.

    Attributes:
        devices: the number of devices that the plan may use; these are the fastest ones.
    """

    plan: Plan
    step_s: float
    devices: int


def in_order(found: Iterable[Candidate]) -> list[Candidate]:
    """Sort by seconds, then by the number of devices."""
    return sorted(found, key=lambda each: (each.step_s, each.devices))


def model_s(model: CostModel, order: Sequence[int], plan: Plan) -> float:
    """Return a plan's seconds by the analytic model, with the plan's `reduce`."""
    return Search(model.with_reduce(plan.reduce), order).step_s(plan)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A linked list of the strategies chosen so far, newest first."""

    layer: str
    strategy: Strategy
    before: "_Chosen | None"


_Available = tuple[int, ...]
"""Numbers of the layouts in which a tensor is available. The first one is its original layout."""

_States = dict[tuple[_Available, ...], tuple[float, _Chosen | None]]
"""The cheapest choices for each combination of the live tensors' layouts."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """One possible strategy of a layer for given layouts of its inputs, with its cost.

    Attributes:
        strategy: the strategy; None: the layer follows its input, and the plan omits it.
        gives: number of the output's layout.
        inputs: layouts in which the inputs are available after the layer.
    """

    strategy: Strategy | None
    cost: float
    gives: int
    inputs: tuple[_Available, ...]


class Search:
    """A search over the plans of one set of devices, in which weights used by several devices are copied, not sharded.

    Args:
        active: the devices that may take part; only the first may compute a layer alone.
        only: required strategies: layer -> strategy name.
        weights: by device, the proportions in which every axis is split; empty: choose shares so that devices finish together.
    """

    def __init__(
        self,
        model: CostModel,
        active: Sequence[int],
        only: Mapping[str, str] | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        self.model, self.graph, self.batch, self.devices = model, model.graph, model.batch, model.devices
        self.active, self.only, self.weights = tuple(active), only or {}, weights
        self.by_batch = Batch(apportion(self.batch, weights) if weights else batch_shares(model, active))
        self.speeds = [1 / (model.samples_s(d, self.batch) or 1.0) if d in active else 0.0 for d in range(self.devices)]
        # All layers split the batch in the same shares, so the device that is slowest over all layers determines the time.
        shared = len(active) > 1
        self.last = max(active, key=lambda d: model.samples_s(d, self.by_batch.shares[d], shared))
        # Layer outputs may be sent from every device to all others. If NICs are the bottleneck, even shares may be faster.
        few = 1 < len(active) <= EVEN_DEVICES and len(model.graph.layers) <= EVEN_LAYERS
        self.even = [float(d in self.active) for d in range(self.devices)] if few else None
        self.readers = {name: len(rows) + (name in self.graph.outputs) for name, rows in self.graph.readers.items()}
        self.numbers: dict[Layout, int] = {}
        self.layouts: list[Layout] = []
        # Layer shares depend on layer times only, so all searches for the same devices reuse them.
        self.splits: dict[tuple[str, str], Shares] = model.splits.setdefault(self.active, {})
        self.choices: dict[tuple[str, tuple[_Available, ...]], list[_Choice]] = {}
        self.worked: dict[tuple[str, int, int, Sharding | None], float] = {}
        self.between: dict[tuple[int, int, str, bool], float] = {}

    def run(self) -> list[Candidate]:
        """Return up to three best plans, which differ in their final layouts, fastest first."""
        states: _States = {(): (0.0, None)}
        live: tuple[str, ...] = ()
        left = dict(self.readers)
        for layer in self.graph.layers.values():
            for name in set(layer.inputs):
                left[name] -= 1
            after = tuple(sorted(name for name in (*live, layer.name) if left.get(name, 0) > 0))
            states = self._advance(layer, states, live, after)
            live = after
        rows = [(cost + self._end_s(live, where), chosen) for where, (cost, chosen) in states.items()]
        rows.sort(key=lambda row: row[0])
        return [Candidate(self._plan(chosen), cost, len(self.active)) for cost, chosen in rows[:3]]

    def _advance(self, layer: Layer, states: _States, live: tuple[str, ...], after: tuple[str, ...]) -> _States:
        inputs = tuple(dict.fromkeys(layer.inputs))
        places = [live.index(name) for name in inputs]
        # Where each live tensor's layouts come from: the layer's output, one of its inputs, or unchanged.
        sources = [
            (0, 0) if name == layer.name else (1, inputs.index(name)) if name in inputs else (2, live.index(name))
            for name in after
        ]
        # Equal layers have the same choices, unless the caller restricts layers by name.
        kind = layer.name if self.only else self.model.like(layer).name
        following: _States = {}
        for where, (cost, chosen) in states.items():
            available = tuple([where[place] for place in places])
            known = self.choices.get((kind, available))
            if known is None:
                held = zip(inputs, available, strict=True)
                layouts = {name: tuple(self.layouts[i] for i in numbers) for name, numbers in held}
                known = [self._price(layer, *each, inputs, available) for each in self._choices(layer, layouts)]
                self.choices[kind, available] = known
            for choice in known:
                total = cost + choice.cost
                key = tuple(
                    [
                        (choice.gives,) if origin == 0 else choice.inputs[place] if origin == 1 else where[place]
                        for origin, place in sources
                    ]
                )
                if key not in following or total < following[key][0]:
                    new = chosen if choice.strategy is None else _Chosen(layer.name, choice.strategy, chosen)
                    following[key] = (total, new)
        if len(following) <= BEAM:
            return following
        return dict(sorted(following.items(), key=lambda item: item[1][0])[:BEAM])

    def _plan(self, chosen: _Chosen | None) -> Plan:
        layers: dict[str, Strategy] = {}
        while chosen is not None:
            layers[chosen.layer] = chosen.strategy
            chosen = chosen.before
        ordered = {name: layers[name] for name in self.graph.layers if name in layers}
        return Plan(
            "auto", self.graph.fingerprint, self.devices, self.batch, ordered, self.by_batch, self.model.reduce,
            wire=self.model.request.wire, outputs=self.model.request.outputs,
        )  # fmt: skip

    def step_s(self, plan: Plan) -> float:
        """Return the seconds of any plan of these devices by the analytic model, with the model's `reduce`."""
        where: dict[str, _Available] = {}
        total = 0.0
        for name, placed in placements(plan, self.graph).items():
            layer = self.graph[name]
            inputs = tuple(dict.fromkeys(layer.inputs))
            available = tuple(where[i] for i in inputs)
            choice = self._price(layer, None, placed, inputs, available, plan.sharded.get(name))
            where |= dict(zip(inputs, choice.inputs, strict=True))
            where[name] = (choice.gives,)
            total += choice.cost
        return total + self._end_s(tuple(where), tuple(where.values()))

    # --- choices -----------------------------------------------------------------------------------------------------

    def _choices(
        self, layer: Layer, where: Mapping[str, tuple[Layout, ...]]
    ) -> Iterator[tuple[Strategy | None, Placement]]:
        """Yield a layer's possible strategies and placements; None: it follows its input, and the plan omits it."""
        if layer.kind == "input":
            yield None, Placement((), self._place(layer, self.by_batch).gives)
            return
        leading = next((where[i][0] for i in layer.inputs if self.graph[i].batched), None)
        if leading is not None and layer.batched and layer.weighted and layer.groups == 1:
            for strategy in self._weighted(layer, where[layer.inputs[0]]):
                if self.only.get(layer.name, strategy.name) == strategy.name:
                    yield strategy, self._place(layer, strategy)
            if (followed := follow(self.graph, layer, leading, self.devices)) is not None:
                yield None, followed
            return
        fallback, placed = unnamed(self.graph, layer, leading, self.by_batch, self.batch, self.devices)
        if fallback is None or leading is None or not layer.batched:
            yield None, placed
            return
        if layer.per_sample:
            yield None, placed
        if layer.per_sample or isinstance(leading, OnOne):
            fallback = One(self.active[0])
        yield fallback, self._place(layer, fallback)
        if isinstance(leading, Partial) and layer.kind in ("elementwise", "pool", "flatten", "batch_norm"):
            channels = self.graph[layer.inputs[0]].shape[0]
            split = Filter(apportion(channels, self.speeds))
            if not layer.shared and follow(self.graph, layer, Split(1, split.shares), self.devices) is not None:
                yield split, self._place(layer, split)

    def _place(self, layer: Layer, strategy: Strategy) -> Placement:
        return place(self.graph, layer, strategy, self.batch, self.devices)

    def _weighted(self, layer: Layer, available: tuple[Layout, ...]) -> Iterator[Strategy]:
        yield self.by_batch
        yield One(self.active[0])
        if layer.shared or len(self.active) == 1:
            return
        if layer.windows and self.batch < SPATIAL_SAMPLES * len(self.active):
            yield Spatial(apportion(SHARE_UNITS, self.weights or self.speeds))
        yield Filter(self._shares(layer, "outputs"))
        if self.even is not None:
            even = Filter(apportion(layer.channels_out, self.even))
            if even.shares != self._shares(layer, "outputs"):
                yield even
        if not layer.sums_channels:
            return
        axis = layer.feature_axis
        split = next((a for a in available if isinstance(a, Split) and a.axis == axis), None)
        yield Channel(self._shares(layer, "inputs") if split is None else split.shares)

    def _shares(self, layer: Layer, side: Side) -> Shares:
        if self.weights:
            return apportion(layer.channels_out if side == "outputs" else layer.channels_in, self.weights)
        key = (self.model.like(layer).name, side)
        if key not in self.splits:
            self.splits[key] = layer_shares(self.model, layer, side, self.active)
        return self.splits[key]

    # --- prices ------------------------------------------------------------------------------------------------------

    def _number(self, layout: Layout) -> int:
        """Return a number for a layout. Numbers compare faster: with a thousand devices layouts are long."""
        number = self.numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    def _price(
        self,
        layer: Layer,
        strategy: Strategy | None,
        placed: Placement,
        inputs: tuple[str, ...],
        available: tuple[_Available, ...],
        how: Sharding | None = None,
    ) -> _Choice:
        cost = 0.0
        where = dict(zip(inputs, available, strict=True))
        for name, wanted in zip(layer.inputs, placed.takes, strict=True):
            number = self._number(wanted)
            if number not in where[name]:
                cost += self._move_s(where[name][0], number, name, back=name in self.model.trains)
                where[name] = (*where[name], number)
        if layer.kind != "input":
            cost += self._work_s(layer, placed, how)
        return _Choice(strategy, cost, self._number(placed.gives), tuple(where[name] for name in inputs))

    def _move_s(self, src: int, dst: int, name: str, *, back: bool) -> float:
        key = (src, dst, name, back)
        if key not in self.between:
            self.between[key] = self.model.move_s(self.layouts[src], self.layouts[dst], self.graph[name], back=back)
        return self.between[key]

    def _work_s(self, layer: Layer, placed: Placement, how: Sharding | None) -> float:
        """Return a layer's cost: arithmetic, gradient sums and updates."""
        gives, leading = self._number(placed.gives), self._number(placed.takes[0]) if placed.takes else -1
        key = (self.model.like(layer).name, gives, leading, how)
        if key not in self.worked:
            cost = self.model.sums_s(layer, placed, how)
            if placed.gives == Split(0, self.by_batch.shares):
                cost += self.model.layer_s(layer, self.last, whole_size(layer, self.by_batch.shares[self.last]))
            else:
                cost += self.model.compute_s(layer, placed)
            self.worked[key] = cost
        return self.worked[key]

    def _end_s(self, live: tuple[str, ...], where: tuple[_Available, ...]) -> float:
        """Return the seconds to move outputs to every device or, if they stay local, to a split by samples."""
        stays = self.model.request.outputs == "where-computed"
        wanted = Split(0, self.by_batch.shares) if stays else everywhere(self.devices)
        to, found = self._number(wanted), dict(zip(live, where, strict=True))
        return self.model.live_s + sum(
            self._move_s(found[name][0], to, name, back=stays)
            for name in self.graph.outputs
            if to not in found[name] and not (stays and by_samples(self.layouts[found[name][0]]))
        )


# --- load balance: shares with which the slowest device finishes as early as possible -------------------------------------
#
# The analytic model gives each device's seconds at some shares, which are interpolated linearly. A device that cannot
# finish one sample or filter in time gets none.


def batch_shares(model: CostModel, active: Sequence[int]) -> Shares:
    """Return each device's number of samples that minimises the slowest device's time for the whole model."""
    shared = len(active) > 1
    return _shares(model, model.batch, active, lambda d, points: [model.samples_s(d, n, shared) for n in points])


def layer_shares(model: CostModel, layer: Layer, side: Side, active: Sequence[int]) -> Shares:
    """Return each device's number of filters or input channels that minimises the slowest device's time."""
    total = layer.channels_out if side == "outputs" else layer.channels_in
    return _shares(model, total, active, lambda device, points: model.curve_s(layer, side, device, points))


def _shares(
    model: CostModel, total: int, active: Sequence[int], curve_s: Callable[[int, Sequence[int]], list[float]]
) -> Shares:
    if len(model.counts) * len(set(model.alike)) <= MANY_QUESTIONS:
        steps = [total * i // 16 for i in range(1, 17)]
    else:  # many devices get small shares: sample the total, its half, its quarter, ... to below an even share
        steps = [total >> i for i in range(model.devices.bit_length() + 1)]
    points = tuple(sorted({0, total, *(max(1, step) for step in steps)}))
    curves = {kind: curve_s(kind, points) for kind in {model.alike[d] for d in active}}
    return balance(total, model.devices, active, points, np.array([curves[model.alike[d]] for d in active]))


def balance(total: int, devices: int, active: Sequence[int], points: Sequence[int], seconds: Seconds) -> Shares:
    """Return the shares of an axis that minimise the time of the slowest device in `active`.

    Args:
        points: ascending shares, from 0 to `total`.
        seconds: `seconds[i, j]` is the time of device `active[i]` for the share `points[j]`.
    """
    # Measured times may fall for a larger share; treat them as never falling.
    curves = np.maximum.accumulate(seconds, axis=1)
    sizes = np.array(points, dtype=np.float64)
    low_s, high_s = 0.0, float(curves.max())
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        if _finished(curves, sizes, middle_s).sum() >= total:
            high_s = middle_s
        else:
            low_s = middle_s
    parts = _finished(curves, sizes, high_s)
    # Apportion only to active devices, in device order: with a thousand devices this is much faster.
    order = sorted(range(len(active)), key=lambda i: active[i])
    weights = [float(parts[i]) for i in order]
    if not any(weights):
        weights = [float(i == 0) for i in order]
    result = [0] * devices
    for i, share in zip(order, apportion(total, weights), strict=True):
        result[active[i]] = share
    return tuple(result)


def _finished(curves: Seconds, sizes: Seconds, limit_s: float) -> Seconds:
    """Return the largest share that each device finishes within `limit_s`."""
    index = (curves <= limit_s).sum(axis=1) - 1
    after = np.minimum(index + 1, len(sizes) - 1)
    rows = np.arange(len(curves))
    begin, end = curves[rows, index], curves[rows, after]
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(end > begin, (limit_s - begin) / (end - begin), 0.0)
    result: Seconds = sizes[index] + np.clip(part, 0.0, 1.0) * (sizes[after] - sizes[index])
    return result
