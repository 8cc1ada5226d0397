"""Objects a script keeps from before `prepare` (parameters, modules, shared objects) act as on one device, or raise."""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from tests.support.small_script import ALONE, SPEEDS, images, net, seeded, shuffled
from tests.support.threads import run_on_threads

Parameters = list[nn.Parameter]


def add_noise(parameters: Parameters) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=seeded())


LOSSES: dict[str, Callable[[nn.Module, Parameters, Tensor], Any]] = {
    "penalty": lambda _model, parameters, _x: 1e-2 * sum(p.norm() for p in parameters),
    "call": lambda model, _parameters, x: 0.1 * model(x).square().mean(),
    "call of a part": lambda model, _parameters, x: 0.1 * model.get_submodule("0")(x).square().mean(),
    "copy": lambda model, _parameters, x: 0.1 * copy.deepcopy(model)(x).square().mean(),
    "state_dict": lambda model, _parameters, _x: sum(t.sum() for t in model.state_dict().values()),
}
"""What a loop adds to its loss, of a model and a list of its parameters from before `prepare`."""

GRADIENTS: dict[str, Callable[[nn.Module, Parameters], Any]] = {
    "noise": lambda _model, parameters: add_noise(parameters),
    "clip": lambda _model, parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
    "clip as torch does": lambda model, _parameters: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clamp": lambda _model, parameters: [p.data.clamp_(-0.1, 0.1) for p in parameters],
    "hook": lambda _model, parameters: parameters[0].register_hook(lambda g: 0.5 * g),
    "init": lambda _model, parameters: nn.init.constant_(parameters[-1], 0.25),
    "optimizer": lambda _model, parameters: torch.optim.SGD(parameters, lr=0.05).step(),
}
"""What it does between backward and step."""

CHANGES: dict[str, Callable[[nn.Module, Parameters], Any]] = {
    "freeze": lambda model, _parameters: model.get_submodule("0").requires_grad_(False),
    "eval": lambda model, _parameters: model.eval(),
}
"""The same, under any plan."""

NEVER: dict[str, Callable[[nn.Module, Parameters], Any]] = {
    "float": lambda model, _parameters: model.float(),
    "submodule": lambda model, _parameters: model.add_module("2", nn.Tanh()),
}
"""The same, of what no step follows under any plan."""


def trained(group: Group | None, act: str, plan: str = "data") -> list[float]:
    """Return the losses of a loop that uses objects from before `prepare`."""
    model = net()
    before, parameters = model, list(model.parameters())
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), shuffled()
    prepared: Any = (model, optimizer, loader)
    if group is not None:
        prepared = convoy.prepare(model, optimizer, loader, plan=plan, speeds=SPEEDS, group=group)
    model, optimizer, loader = prepared
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if act in LOSSES:
            loss = loss + LOSSES[act](before, parameters, x)
        optimizer.zero_grad()
        loss.backward()
        if act not in LOSSES:
            (GRADIENTS | CHANGES | NEVER)[act](before, parameters)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("act", "plan"), [*((act, "data") for act in (*LOSSES, *GRADIENTS, *CHANGES)), *((act, "model") for act in CHANGES)]
)
def test_old_references_work(act: str, plan: str) -> None:
    expected = trained(None, act)
    for found in run_on_threads(3, lambda group: trained(group, act, plan)):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("act", "plan"),
    [*((act, "model") for act in (*LOSSES, *GRADIENTS)), ("clip", "sharded"), *((a, "data") for a in NEVER)],
)
def test_old_parameter_references_are_refused_on_sharded_plans(act: str, plan: str) -> None:
    with pytest.raises(InputError, match=r"shards|pieces|'0\.weight'|no longer torch.float|submodules\)' of module"):
        run_on_threads(3, lambda group: trained(group, act, plan))


def test_a_retired_parameter_names_itself_and_the_remedy() -> None:
    def work(group: Group) -> None:
        model = net()
        old = model.get_parameter("6.weight")
        convoy.prepare(model, None, shuffled(), plan="model", speeds=SPEEDS, group=group)
        with pytest.raises(InputError, match=r"norm on '6\.weight' .* model\.full_state_dict\(\) whole ones"):
            old.norm()

    run_on_threads(3, work)


# ----------------------------------------------------------------------------------------------------- shared objects


class Scaled(nn.Module):
    """A layer whose forward reads an object that the script also holds; Python branches prevent tracing."""

    def __init__(self, shared: Any, read: Callable[[Any], Any], opaque: bool) -> None:
        super().__init__()
        self.body, self.shared, self.read, self.opaque = net(), shared, read, opaque

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.opaque and y.detach().abs().max() > 1e9:
            return y  # type: ignore[no-any-return]
        return y * self.read(self.shared)  # type: ignore[no-any-return]


def raise_tau(args: Any) -> None:
    args.tau += 0.5


SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]] = {
    "args": (lambda: argparse.Namespace(tau=1.0), lambda args: args.tau, raise_tau),
    "dict": (lambda: {"tau": 1.0}, lambda d: d["tau"], lambda d: d.update(tau=d["tau"] + 0.5)),
    "tensor": (lambda: torch.ones((), dtype=torch.float64), lambda t: t, lambda t: t.add_(0.5)),
}


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("kind", [*SHARED])
def test_change_of_a_shared_object_applies_or_is_refused(kind: str, opaque: bool) -> None:
    make, read, anneal = SHARED[kind]

    def losses(group: Group | None) -> list[float]:
        shared = make()
        model: Any = Scaled(shared, read, opaque)
        loader: Any = shuffled()
        if group is not None:
            model, _, loader = convoy.prepare(model, None, loader, plan="data", speeds=SPEEDS, group=group)
        found = []
        for x, y in loader:
            found.append(F.cross_entropy(model(x), y).item())
            anneal(shared)
        return found

    if not opaque:  # its value was read once, by the trace
        with pytest.raises(InputError, match="'shared' of module 'the model itself' changed"):
            run_on_threads(3, losses)
        return
    expected = losses(None)
    for found in run_on_threads(3, losses):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("opaque", [False, True])
def test_attribute_set_on_the_prepared_model_applies_or_is_refused(opaque: bool) -> None:
    def losses(group: Group | None) -> list[float]:
        model: Any = Scaled(1.0, float, opaque)
        if group is not None:
            model, *_ = convoy.prepare(model, None, shuffled(), plan="data", speeds=(1.0,), group=group)
        found = []
        for tau in (1.0, 2.0):
            model.shared = tau
            found.append(F.cross_entropy(model(images()[:5][0]), images()[:5][1]).item())
        return found

    if opaque:
        assert losses(ALONE) == pytest.approx(losses(None), abs=1e-10)
    else:
        with pytest.raises(InputError, match="'shared' of module 'the model itself' changed"):
            losses(ALONE)


def test_prepared_model_cannot_be_distributed_again() -> None:
    model = net()
    convoy.prepare(model, None, shuffled(), plan="data", speeds=(1.0,), group=ALONE)
    for shared in (model, nn.Sequential(model, nn.Linear(3, 3).double())):
        with pytest.raises(InputError, match=r"distributed already, or shares parameters.* create model, optimizer"):
            convoy.prepare(shared, None, shuffled(), plan="data", speeds=(1.0,), group=ALONE)
