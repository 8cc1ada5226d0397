"""Other shares in the middle of training: weights, gradients and optimizer state move to where the new plan wants them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.comm.collectives import agree_on, gather
from convoy.errors import InputError
from convoy.layout.layout import Layout, Replicated, box, dual, holders, local_shape
from convoy.layout.redistribute import schedule
from convoy.plan.plan import Plan
from convoy.runtime.elementwise import ELEMENTWISE, elementwise_names
from convoy.runtime.exchange import Moving, start_move
from convoy.runtime.marks import is_unsummed
from convoy.runtime.module import Distributed, not_distributed
from convoy.runtime.optimizer import described, number_of


def reshard(model: Distributed, plan: Plan, *optimizers: Optimizer) -> None:
    """Continue the training of a model by another plan, between two steps. Every device calls it with the same plan.

    Parameters, buffers, gradients and the optimizers' state move; parameter objects stay the same, so optimizers and
    schedulers go on as they are. A loader that serves the model hands out the parts of the new plan from its next batch on.
    The trajectory is that of one device, as before.

    Args:
        optimizers: all that work on the model's parameters; what they remember would be of the wrong pieces otherwise.

    Raises:
        PlanError: the plan is for another model or another number of devices.
        MismatchError: the devices were given different plans.
        InputError: an optimizer of another model, or one that is not known to be exact on pieces.
        DeviceLostError: a device that had to send or receive did not.
    """
    if not isinstance(model, Distributed):
        raise not_distributed("reshard", model)
    agree_on(model.group, "reshard", plan.to_json(), "was given another plan to continue with")
    plan.check(model.traced[True].graph, model.group.devices)
    before = model.layouts
    kept, held = model.plan, dict(model.named_parameters())
    model.follow(plan)
    moved = {key: (before[key], layout) for key, layout in model.layouts.items() if before[key] != layout}
    try:
        for optimizer in optimizers:
            _check(optimizer, held, moved)
    except InputError:
        model.follow(kept)
        raise
    _Reshare(model, moved, optimizers).run()
    model.mark_pieces()


def _check(optimizer: Optimizer, held: Mapping[str, nn.Parameter], moved: Mapping[str, Any]) -> None:
    name, keys = type(optimizer).__name__, {parameter: key for key, parameter in held.items()}
    worked_on = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in worked_on if p not in keys]
    if strange:
        raise InputError(
            f"{name} works on {len(strange)} parameters that this model does not have: give reshard() the optimizers that "
            "were made from its parameters()"
        )
    if type(optimizer) not in ELEMENTWISE and any(keys[p] in moved for p in worked_on):
        raise InputError(
            f"{name} is not known to treat each entry of a parameter by itself, and this plan moves parts of parameters: "
            f"use one of {elementwise_names()}, or convoy.train.ELEMENTWISE.add({name}) if it does"
        )


@dataclass(frozen=True, slots=True)
class _Route:
    """From where to where the pieces of one tensor go; a tensor of the shape of parameter `key`."""

    key: str
    src: Layout
    dst: Layout
    shape: tuple[int, ...]

    def start(self, model: Distributed, piece: Tensor | None, dtype: torch.dtype) -> Moving:
        group = model.group
        own = local_shape(self.src, group.device, self.shape)
        if piece is None or tuple(piece.shape) != own:
            piece = torch.zeros(own, dtype=dtype, device=group.torch_device)
        return start_move(group, schedule(self.src, self.dst, self.shape), piece, self.src, self.dst, self.shape)


class _Reshare:
    """Starts every move, then waits for all: many small tensors do not wait for each other."""

    def __init__(
        self, model: Distributed, moved: Mapping[str, tuple[Layout, Layout]], optimizers: tuple[Optimizer, ...]
    ) -> None:
        self.model, self.optimizers = model, optimizers
        shapes = {key: parameter.shape for key, parameter in model.parameters_by_key.items()}
        self.routes = [_Route(key, *moved[key], shapes[key]) for key in shapes if key in moved]

    @torch.no_grad()
    def run(self) -> None:
        known = self._agree()
        weights = [(route, self._start(route)) for route in self.routes]
        gradients = [
            (route, self._start_gradient(route) if route.key in known["gradients"] else None) for route in self.routes
        ]
        states = [
            self._start_state(i, route, known["state"]) for i in range(len(self.optimizers)) for route in self.routes
        ]
        for route, moving in weights:
            self.model.weights.put(route.key, moving.land().clone())
        for route, gradient in gradients:
            if not self.model.parameters_by_key[route.key].buffer:
                arrived = gradient.land().clone() if gradient is not None else None
                self._parameter(route).grad = arrived if self._keeps_gradient(route) else None
        for state in states:
            state.settle()

    def _agree(self) -> Any:
        """Which gradients there are, and what the optimizers remember of each parameter, as those know who hold a piece."""
        own: dict[str, Any] = {"gradients": [], "state": {}}
        for route in self.routes:
            if self.model.parameters_by_key[route.key].buffer or self.model.group.device not in holders(route.src):
                continue
            parameter = self._parameter(route)
            if parameter.grad is not None:
                own["gradients"].append(route.key)
            for i, optimizer in enumerate(self.optimizers):
                if parameter in optimizer.state:
                    rows = {name: described(name, v, parameter) for name, v in optimizer.state[parameter].items()}
                    own["state"][f"{i}/{route.key}"] = rows
        tables = gather(self.model.group, "reshard: gradients and state", own)
        state: dict[str, Any] = {}
        for table in reversed(tables):
            state |= table["state"]
        return {"gradients": {key for table in tables for key in table["gradients"]}, "state": state}

    def _start(self, route: _Route) -> Moving:
        tensor = self.model.weights.held(route.key)
        return route.start(self.model, tensor, tensor.dtype)

    def _start_gradient(self, route: _Route) -> Moving:
        parameter = self._parameter(route)
        if is_unsummed(parameter):
            route = replace(route, src=dual(route.src))
        return route.start(self.model, parameter.grad, parameter.dtype)

    def _start_state(self, i: int, route: _Route, known: Mapping[str, Any]) -> "_State":
        rows = known.get(f"{i}/{route.key}")
        if rows is None:
            return _State(self.optimizers[i], None, {}, {})
        parameter = self._parameter(route)
        own = self.optimizers[i].state.get(parameter, {})
        moves, numbers = {}, {}
        for name, row in sorted(rows.items()):
            if row["kind"] == "tensor":
                moves[name] = route.start(self.model, own.get(name), getattr(torch, row["dtype"]))
            else:
                numbers[name] = number_of(row, parameter)
        return _State(self.optimizers[i], parameter, moves, numbers if self._holds(route) else None)

    def _holds(self, route: _Route) -> bool:
        return box(route.dst, self.model.group.device, route.shape) is not None

    def _keeps_gradient(self, route: _Route) -> bool:
        """Of copies whose gradient has yet to be summed, the first alone has all of the sum so far."""
        if is_unsummed(self._parameter(route)) and isinstance(route.dst, Replicated):
            return holders(route.dst)[0] == self.model.group.device
        return self._holds(route)

    def _parameter(self, route: _Route) -> nn.Parameter:
        return self.model.module.get_parameter(route.key)


@dataclass(frozen=True, slots=True)
class _State:
    """What one optimizer remembers of one parameter, on its way.

    Attributes:
        parameter: None where no device remembers anything.
        moves: of the tensors in the parameter's shape.
        numbers: the rest, which is the same everywhere; None where this device holds no piece afterwards.
    """

    optimizer: Optimizer
    parameter: nn.Parameter | None
    moves: Mapping[str, Moving]
    numbers: Mapping[str, Any] | None

    def settle(self) -> None:
        if self.parameter is None:
            return
        arrived = {name: moving.land().clone() for name, moving in self.moves.items()}
        if self.numbers is None:
            self.optimizer.state.pop(self.parameter, None)
        else:
            self.optimizer.state[self.parameter] = {**self.numbers, **arrived}
