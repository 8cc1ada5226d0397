"""Hooks act as on one device, or are refused at the next step: never silently dropped, never given a shard."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import InputError, PlanError
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.one_device import EXACT, part
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

BATCH, DEVICES = 10, 3
EVEN, ONE_IDLE = Speeds((5.0, 3.0, 2.0)), Speeds((7.0, 0.0, 3.0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.act, self.fc = nn.Conv2d(3, 4, 3), Block(), nn.ReLU(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.block(self.stem(x))).mean((2, 3)))


X = torch.randn(3, BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 5, (3, BATCH), generator=torch.Generator().manual_seed(2))


@functools.cache
def _net() -> nn.Module:
    with torch_seed(0):
        return Net().double()


_net()  # not in a thread: they share one state of random numbers


def net() -> nn.Module:
    return copy.deepcopy(_net())


def train(model: Any, given: Callable[[Tensor], Tensor], **size: int) -> Tensor:
    """Train three steps and return the last output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        out = model(given(x), **size)
        F.cross_entropy(out, y).backward()
        optimizer.step()
    return out.detach()


def plan_of(name: str, model: nn.Module, speeds: Speeds = ONE_IDLE) -> Plan:
    return named_plan(name, trace(model, X[0][:2]).graph, BATCH, speeds)


def assert_as_on_one_device(
    hang: Callable[[nn.Module, list[Any]], None],
    plan: str,
    *,
    after: bool = False,
    top: bool = False,
    speeds: Speeds = ONE_IDLE,
) -> None:
    """Check that every device's numbers and hook records match one device."""
    alone, expected = net(), []
    hang(alone, expected)
    out = train(alone, lambda x: x)
    assert expected, "the hook was not called on one device either"
    chosen = plan_of(plan, hung(lambda model: hang(model, []), after), speeds)

    def work(group: Group) -> None:
        model, seen = net(), []
        if not after:
            hang(model, seen)
        here = Distributed(model, chosen, group, X[0][:2])
        if after:
            hang(here if top else here.module, seen)
        found = train(here, lambda x: part(here, x), batch=BATCH)
        torch.testing.assert_close(found, out, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(here.full_state_dict(), alone.state_dict(), rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(seen, expected, rtol=EXACT, atol=EXACT)

    run_on_threads(DEVICES, work, timeout_s=30)


def hung(hang: Callable[[nn.Module], Any], after: bool) -> nn.Module:
    """Return a model with its hooks attached, unless they come after `Distributed`."""
    model = net()
    if not after:
        hang(model)
    return model


def assert_refused(hang: Callable[[nn.Module], Any], plan: str, match: str, *, after: bool) -> None:
    chosen = plan_of(plan, hung(hang, after))

    def work(group: Group) -> None:
        here = Distributed(hung(hang, after), chosen, group, X[0][:2])
        if after:
            hang(here.module)
        with pytest.raises(InputError, match=match):
            here(part(here, X[0]), batch=BATCH)

    run_on_threads(DEVICES, work, timeout_s=30)


# --- hooks on modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "plan"),
    [
        *(("block", plan) for plan in ("data-by-speed", "hybrid", "model")),
        *(("stem", "hybrid"), ("block.norm", "data-by-speed"), ("act", "model"), ("fc", "hybrid")),
    ],
)
def test_observing_forward_hook_sees_the_global_batch(path: str, plan: str) -> None:
    """Regression: on a layer it saw local samples; on a container it never ran."""

    def hang(model: nn.Module, seen: list[Any]) -> None:
        def note(module: nn.Module, given: Any, out: Tensor) -> None:
            seen.append([tuple(given[0].shape), out.mean().item(), sum(p.sum().item() for p in module.parameters())])

        model.get_submodule(path).register_forward_hook(note)

    assert_as_on_one_device(hang, plan)


@pytest.mark.parametrize("path", ["block", "fc"])
def test_hooks_that_mix_samples_match_one_device(path: str) -> None:
    def hang(model: nn.Module, seen: list[Any]) -> None:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda _m, given: (given[0] - given[0].mean(0),))
        module.register_forward_hook(lambda _m, _given, out: out * out.std())
        seen.append(1.0)

    assert_as_on_one_device(hang, "data-by-speed")


class Observer:
    """A callable object, which a model copy would copy, unlike a function."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, _module: nn.Module, _given: Any, out: Tensor) -> None:
        self.note(out)

    def note(self, out: Tensor) -> None:
        self.seen.append(out.sum().item())

    def hook(self, _module: nn.Module, _given: Any, out: Tensor) -> None:
        self.note(out)


@pytest.mark.parametrize("bound", [False, True])
def test_observer_object_is_not_copied_and_sees_training_only(bound: bool) -> None:
    """Regression: the model's copy had its own observer, and tracing showed it random numbers."""

    def hang(model: nn.Module, seen: list[Any]) -> None:
        observer = Observer(seen)
        model.get_submodule("block").register_forward_hook(observer.hook if bound else observer)

    assert_as_on_one_device(hang, "data-by-speed")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_the_distributed_model() -> None:
    def hang(model: nn.Module, seen: list[Any]) -> None:
        model.register_forward_hook(lambda _m, _given, out: out + 1)
        model.register_full_backward_hook(lambda _m, _gx, gy: seen.append(gy[0].sum().item()))

    assert_as_on_one_device(hang, "hybrid", after=True, top=True)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("block", kind) for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")),
        *(("stem", "forward_pre"), ("block.norm", "full_backward"), ("act", "full_backward_pre"), ("fc", "forward")),
    ],
)
def test_a_hook_on_a_module_after_distribute_is_refused(path: str, kind: str) -> None:
    def hang(model: nn.Module) -> None:
        getattr(model.get_submodule(path), f"register_{kind}_hook")(lambda *_: None)

    name = {"forward": "forward hook", "forward_pre": "forward-pre", "full_backward": "backward"}.get(
        kind, "backward-pre"
    )
    assert_refused(hang, "data-by-speed", f"module '{path}' has a .*{name}.*distributed model itself", after=True)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_on_the_model_before_distribute_is_refused(kind: str) -> None:
    assert_refused(lambda m: getattr(m, f"register_{kind}_hook")(lambda *_: None), "data-by-speed",
                   "distributed model", after=False)  # fmt: skip


def test_removed_hook_no_longer_runs() -> None:
    expected = train(net(), lambda x: x)

    def work(group: Group) -> None:
        model = net()
        handles = [
            model.get_submodule("block").register_forward_hook(lambda _m, _x, y: 5 * y),
            model.get_submodule("stem").weight.register_hook(lambda g: 7 * g),  # type: ignore[operator, union-attr]
        ]
        here = Distributed(model, plan_of("data", model, EVEN), group, X[0][:2], takes_over=True)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(train(here, lambda x: part(here, x), batch=BATCH), expected, rtol=EXACT, atol=EXACT)

    run_on_threads(DEVICES, work, timeout_s=30)


def test_a_hook_for_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert_refused(lambda _m: None, "data-by-speed", "registered for all modules", after=True)
    finally:
        handle.remove()


def test_a_hook_may_change_shapes() -> None:
    def hang(model: nn.Module, seen: list[Any]) -> None:
        model.get_submodule("stem").register_forward_hook(lambda _m, _x, y: y[:, :, 1:])
        seen.append(1.0)

    assert_as_on_one_device(hang, "data-by-speed")


@pytest.mark.parametrize("path", ["stem", "block", "fc"])
@pytest.mark.parametrize("plan", ["data", "model"])
def test_a_loss_on_a_tensor_that_a_hook_kept_has_its_gradients(plan: str, path: str) -> None:
    """Regression: it lost the gradients of the layers before it."""

    def gradient(here: nn.Module, inner: nn.Module, seen: list[Tensor], **size: int) -> Tensor:
        given = part(here, X[0]) if isinstance(here, Distributed) else X[0]
        (F.cross_entropy(here(given, **size), Y[0]) + seen[-1].square().mean()).backward()
        found = inner.get_submodule("stem").weight.grad
        return here.gather("stem.weight", found) if isinstance(here, Distributed) else found  # type: ignore[arg-type, return-value]

    def kept(model: nn.Module) -> list[Tensor]:
        seen = list[Tensor]()
        model.get_submodule(path).register_forward_hook(lambda _m, _x, y: seen.append(y))
        return seen

    def work(group: Group) -> Tensor:
        model = net()
        seen = kept(model)
        here = Distributed(model, chosen, group, X[0][:2])
        return gradient(here, here.module, seen, batch=BATCH)

    alone = net()
    expected = gradient(alone, alone, kept(alone))
    chosen = plan_of(plan, hung(kept, False), EVEN)
    for found in run_on_threads(DEVICES, work, timeout_s=30):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("path", ["block", "act"])
def test_backward_hooks_see_the_gradients_of_the_global_batch(path: str) -> None:
    def hang(model: nn.Module, seen: list[Any]) -> None:
        module = model.get_submodule(path)
        module.register_full_backward_pre_hook(lambda _m, gy: seen.append(gy[0].sum().item()))
        module.register_full_backward_hook(lambda _m, _gx, gy: seen.append(gy[0].square().sum().item()))

    assert_as_on_one_device(hang, "data-by-speed")


# --- hooks on parameters ---------------------------------------------------------------------------------------------


def hang_on_parameter(model: nn.Module, seen: list[Any]) -> None:
    """Attach a hook that is not elementwise: a shard of the gradient would be scaled by another norm."""

    def shorten(g: Tensor) -> Tensor:
        seen.append(g.norm().item())
        return g / g.norm()

    weight = dict(model.named_parameters())["block.conv.weight"]
    weight.register_hook(shorten)  # type: ignore[no-untyped-call]

    def decay(p: Tensor) -> None:
        seen.append(p.grad.norm().item() if p.grad is not None else None)
        p.grad = None if p.grad is None else p.grad + 0.1 * p.detach()

    weight.register_post_accumulate_grad_hook(decay)


@pytest.mark.parametrize(
    ("plan", "speeds", "after"),
    [
        *(("data", EVEN, False), ("data", EVEN, True), ("hybrid", EVEN, False), ("hybrid", EVEN, True)),
        *(("model", ONE_IDLE, False), ("data-by-speed", ONE_IDLE, False)),
    ],
)
def test_parameter_hooks_see_the_summed_gradient(plan: str, speeds: Speeds, after: bool) -> None:
    """Regression: hooks from before `distribute` were dropped; later ones saw partial sums."""
    assert_as_on_one_device(hang_on_parameter, plan, after=after, speeds=speeds)


def test_plan_that_shards_a_hooked_parameter_is_refused() -> None:
    plan, model = plan_of("model", net()), net()
    model.get_submodule("stem").weight.register_hook(lambda _: None)  # type: ignore[operator, union-attr]
    with pytest.raises(PlanError, match=r"layer 'stem', strategy 'filter': its parameters .* have hooks"):
        run_on_threads(DEVICES, lambda group: Distributed(model, plan, group, X[0][:2]))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("plan", ["model", "data-by-speed"], ids=["split", "copied to some devices"])
def test_hook_on_a_shard_is_refused(plan: str, kind: str) -> None:
    def hang(model: nn.Module) -> None:
        getattr(dict(model.named_parameters())["stem.weight"], kind)(lambda _: None)

    assert_refused(hang, plan, "parameter 'stem.weight' has a .*hook.*a plan that copies", after=True)


def test_an_optimizer_in_a_hook_steps_as_on_one_device() -> None:
    """Step each parameter once its gradient is ready, as in the memory-saving tutorial."""

    def hang(model: nn.Module, seen: list[Any]) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]
            seen.append(1)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)

    assert_as_on_one_device(hang, "data", after=True, speeds=EVEN)
