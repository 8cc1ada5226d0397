"""What Python keeps between steps: numbers of modules, of classes, of a script. On every device as on one, or refused."""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.beside_one import difference
from tests.support.one_device import EXACT, one_trace, part
from tests.support.slow import most_slow
from tests.support.threads import run_on_threads

SPEEDS = (Speeds((2.0, 1.0, 1.0)), Speeds((3.0, 0.0, 2.0)))


class Net(nn.Module):
    """A block with Python of its own between two convolutions, and a loss that feels all of it."""

    def __init__(self, block: nn.Module, through: Callable[[nn.Module, Tensor], Tensor] = lambda b, x: b(x)) -> None:
        super().__init__()
        self.stem, self.block, self.last, self.fc = nn.Conv2d(3, 4, 3), block, nn.Conv2d(4, 4, 1), nn.Linear(4, 5)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.last(self.through(self.block, self.stem(x))).mean((2, 3)))  # type: ignore[no-any-return]


class Noting(nn.Module):
    """Its batch norm is in evaluation mode in evaluation alone, and it takes off what the batch before was like."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.note = nn.BatchNorm2d(4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) - 0.1 * self.note
        self.note = float(x.detach().mean())
        return x


class Counting(nn.Module):
    """Each sample by itself, and the fourth call is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(4, 4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x if self.calls < 4 else x.tanh())  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """Of seed 53351 before it was made smaller: a dropout of nothing was taken for one that draws, and kept to one device."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.calls = nn.Dropout(0.0), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dropout(x - x.mean(0)) * self.calls


class Teaching(nn.Module):
    """Of seed 50201: a teacher that follows its student in every forward, beside a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.teacher = copy.deepcopy(self.conv).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.conv.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        return self.conv(x) - 0.1 * self.teacher(x).detach()  # type: ignore[no-any-return]


class Losing(nn.Module):
    """Of seed 53351: it returns a value of the whole batch, so it cannot be tried sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.last: float | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x if self.last is None else x - self.last
        self.last = 0.5
        return x, x.square().mean()


def with_loss(block: nn.Module, x: Tensor) -> Tensor:
    x, loss = block(x)
    return x + loss


class CountingTwice(nn.Module):
    """Of seed 54384: Python state in training, a buffer in both modes, of a block whose samples depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.factor *= 0.9
        return (x - x.mean(0)) * self.factor / float(self.calls)


class Sharing(nn.Module):
    """Two blocks, one of which reads a number that the other counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Noting()
        self.reads = Reading(self.counts)
        self.between = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self.between(self.counts(x)))  # type: ignore[no-any-return]


class Reading(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.others[0].note)  # type: ignore[operator]


def twice(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)  # type: ignore[no-any-return]


def scaled_late(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    return y * 2 if block.calls > 3 else y  # type: ignore[no-any-return, operator]


NETS: dict[str, Callable[[], nn.Module]] = {
    "of seed 40718: computed by all in training, by one in evaluation": lambda: Net(Noting(), twice),
    "of seed 50201: weights that all changed in training, and one in evaluation": lambda: Net(Teaching()),
    "a count, where a device has no samples": lambda: Net(Counting()),
    "of seed 53351: noted beside a loss": lambda: Net(Losing(), with_loss),
    "of seed 54384: a buffer of what every device computes in training": lambda: Net(CountingTwice()),
    "a count beside dropout": lambda: Net(Dropping()),
    "a count that the net reads when it is large": lambda: Net(Counting(), scaled_late),
    "a number of another block": lambda: Net(Sharing()),
}


def numbers(model: nn.Module) -> dict[str, float]:
    rows = ((f"{path}.{k}", v) for path, m in model.named_modules() for k, v in vars(m).items())
    return {key: float(v) for key, v in rows if type(v) in (int, float)}


def images(samples: int) -> Tensor:
    own = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 6, 6, generator=own, dtype=torch.float64)


def trained(model: Any, call: Callable[[Tensor], Tensor], inner: nn.Module) -> dict[str, Any]:
    """Losses, weights and numbers after steps of whole and of small batches, with evaluations between them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for samples in (6, 2, 6):
        optimizer.zero_grad()
        loss = call(images(samples)).square().mean()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses += [loss.detach(), call(images(5)).sum()]
        model.train()
    weights = model.full_state_dict() if isinstance(model, Distributed) else model.state_dict()
    return {"losses": losses, "weights": dict(weights), "numbers": numbers(inner)}


@functools.cache
def graph_of(name: str) -> Graph:
    torch.manual_seed(0)
    return trace(NETS[name]().double(), images(6)).graph


@pytest.mark.parametrize("plan", most_slow(2, ["data", "data-by-speed", "model", "hybrid", "sharded", "master"]))
@pytest.mark.parametrize("name", NETS)
def test_numbers_are_those_of_one_device(name: str, plan: str) -> None:
    for speeds in SPEEDS:
        torch.manual_seed(0)
        model = NETS[name]().double()
        chosen = named_plan(plan, graph_of(name), 6, speeds)

        def on_device(group: Group, model: nn.Module = model, plan: Any = chosen) -> dict[str, Any]:
            here = Distributed(model, plan, group, images(6))
            return trained(here, lambda x: here(part(here, x), batch=len(x)), here.module)

        with one_trace("python state", name):
            found = run_on_threads(3, on_device, timeout_s=30)
        expected = trained(model, model, model)
        for device in found:
            torch.testing.assert_close(device, expected, rtol=0, atol=1e-10)


SETTINGS, FACTOR = {"scale": 1.0}, 1.0


class BySettings(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SETTINGS["scale"]


class ByGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * FACTOR


class ByClass(nn.Module):
    factor: ClassVar[float] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class InDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"a": {"b": {"c": {"d": {"e": 1.0}}}}}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.settings["a"]["b"]["c"]["d"]["e"]


def change_settings(_: nn.Module) -> None:
    SETTINGS["scale"] *= 0.5


def change_global(_: nn.Module) -> None:
    global FACTOR
    FACTOR *= 0.5


def change_class(_: nn.Module) -> None:
    ByClass.factor *= 0.5


def change_in_depth(block: nn.Module) -> None:
    block.settings["a"]["b"]["c"]["d"]["e"] = 0.5  # type: ignore[operator, index]


# Mutable defaults, as in people's code.
def scaled(x: Tensor, by: dict[str, float] = {"k": 1.0}, *, again: dict[str, float] = {"k": 1.0}) -> Tensor:  # noqa: B006
    return x * by["k"] * again["k"] * scaled.k  # type: ignore[attr-defined, no-any-return]


scaled.k = 1.0  # type: ignore[attr-defined]


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


def change_default(_: nn.Module) -> None:
    scaled.__defaults__[0]["k"] *= 0.5  # type: ignore[index]


def change_keyword_default(_: nn.Module) -> None:
    scaled.__kwdefaults__["again"]["k"] *= 0.5


def change_scale(block: nn.Module) -> None:
    block.scale_factor = 3.0  # type: ignore[assignment]


def change_function(_: nn.Module) -> None:
    scaled.k *= 0.5  # type: ignore[attr-defined]


def change_norm(block: nn.Module) -> None:
    block.num_groups = 2  # type: ignore[assignment]


def stop_tracking(block: nn.Module) -> None:
    block.track_running_stats = False  # type: ignore[assignment]


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "SETTINGS": (BySettings, change_settings),
    "FACTOR": (ByGlobal, change_global),
    "ByClass.factor": (ByClass, change_class),
    "'settings' of module 'block'": (InDepth, change_in_depth),
    "scaled.__defaults__": (ByFunction, change_default),
    "scaled.__kwdefaults__": (ByFunction, change_keyword_default),
    "scaled.k": (ByFunction, change_function),
    "'scale_factor' of module 'block'": (lambda: nn.Upsample(scale_factor=2), change_scale),
    "'num_groups' of module 'block'": (lambda: nn.GroupNorm(4, 4), change_norm),
    "'track_running_stats' of module 'block'": (lambda: nn.BatchNorm2d(4), stop_tracking),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_a_trace_read_and_a_script_changes_is_refused_by_name(what: str) -> None:
    """A trace reads it once: training went on with the old number."""
    make, change = OUTSIDE[what]
    model = Net(make()).double()
    plan = named_plan("data", trace(model, images(6)).graph, 6, Speeds((1.0,)))

    def on_device(group: Group) -> None:
        here = Distributed(model, plan, group, images(6))
        here(images(6), batch=6)
        change(here.module.block)
        here(images(6), batch=6)

    with pytest.raises(InputError, match=f"{what}.*changed after distribute"):
        run_on_threads(1, on_device, timeout_s=20)


def test_inputs_of_a_live_module_require_a_gradient_only_if_they_do_on_one_device() -> None:
    """Seed 91124: every input of a module with state was made to require one."""

    class Asking(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (2 if x.requires_grad else 3) / self.calls

    for model in (
        nn.Sequential(Asking(), nn.Flatten(), nn.Linear(192, 4)),
        nn.Sequential(nn.Conv2d(3, 3, 1), Asking(), nn.Flatten(), nn.Linear(192, 4)),
    ):
        assert difference(model) < EXACT


def frozen(model: nn.Module, x: Tensor) -> Tensor:
    model.norm.eval()  # type: ignore[operator, union-attr]
    return model.norm(model.conv(x))  # type: ignore[no-any-return, operator]


def with_dilations(model: nn.Module, x: Tensor) -> Tensor:
    conv: Any = model.conv
    for d in (3, 2, 1):
        conv.dilation = conv.padding = (d, d)
        x = conv(x).tanh()
    return x


def partly_frozen(model: nn.Module, x: Tensor) -> Tensor:
    y = model.conv(x)  # type: ignore[operator]
    model.conv.requires_grad_(False)  # type: ignore[operator, union-attr]
    y = model.conv(y.tanh())  # type: ignore[operator]
    model.conv.requires_grad_(True)  # type: ignore[operator, union-attr]
    return y  # type: ignore[no-any-return]


def by_attribute_of_a_weight(model: nn.Module, x: Tensor) -> Tensor:
    weight: Any = model.conv.weight  # type: ignore[union-attr]
    weight.calls = 1 + getattr(weight, "calls", 0)
    return model.conv(x) / weight.calls  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize("change", [frozen, with_dilations, partly_frozen, by_attribute_of_a_weight])
def test_forwards_that_change_layers_of_torch_equal_one_device(change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """A trace saw the layers as they were at its end."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(192, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(change(self, x).flatten(1))  # type: ignore[no-any-return]

    assert difference(Changing()) < EXACT


class Configuration(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


CONFIGURATION = Configuration(gain=2.0)


def test_globals_may_refuse_attributes_with_other_errors() -> None:
    class Configured(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * CONFIGURATION.gain

    assert not trace(Net(Configured()).double(), images(6)).live


def test_a_forward_that_reads_the_environment_is_not_traced() -> None:
    class ByEnvironment(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(os.environ.get("GAIN", "1"))

    assert trace(Net(ByEnvironment()).double(), images(6)).live


def test_a_dropout_of_nothing_stays_one() -> None:
    """It is not taken for a layer that draws random numbers, so every device may compute it."""
    model = Net(Dropping()).double()
    plan = named_plan("data", trace(model, images(6)).graph, 6, Speeds((1.0,)))

    def on_device(group: Group) -> None:
        here = Distributed(model, plan, group, images(6))
        here(images(6), batch=6)
        here.module.block.dropout.p = 0.5
        here(images(6), batch=6)

    with pytest.raises(InputError, match=r"'p' of module 'block.dropout' changed after distribute"):
        run_on_threads(1, on_device, timeout_s=20)


CALLS = [0]


class InAList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return x * (1.0 if CALLS[0] < 100 else 2.0)


def test_a_forward_that_changes_a_global_is_refused() -> None:
    """Tracing would change it too, so that step 100 would come early."""
    with pytest.raises(InputError, match=r"changes '.*\.CALLS' outside of its module.*keep it in an attribute"):
        trace(Net(InAList()).double(), images(6))
