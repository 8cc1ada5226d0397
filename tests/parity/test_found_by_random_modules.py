"""Silent differences that random modules found, each with its story."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.operation import Operation, Ref, call_operation
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.beside_one import difference
from tests.support.one_device import part
from tests.support.threads import run_on_threads


class Asking(nn.Module):
    """Its forward does something with the features that a function tells."""

    def __init__(self, change: Callable[["Asking", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.scale, self.change = 1.0, change

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.change(self, self.conv(x)).mean((2, 3)))


def images(samples: int) -> Tensor:
    # Devices are threads here: they would draw from torch's random numbers in turn, whatever the seed.
    own = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 6, 6, generator=own, dtype=torch.float64)


def on_two(model: nn.Module, work: Callable[[Callable[[int], Tensor], Distributed], Any]) -> list[Any]:
    """What two devices, one with two samples of three, make of a model; they are given calls by batch size."""
    plan = named_plan("data-by-speed", trace(model, images(6)).graph, 6, Speeds((2.0, 1.0)))

    def on_device(group: Group) -> Any:
        here = Distributed(model, plan, group, images(6))
        return work(lambda n: here(part(here, images(n)), batch=n), here)

    return run_on_threads(2, on_device, timeout_s=20)


def test_a_counter_stays_in_step_on_all_devices() -> None:
    """A device without samples did not call the module: its counter lay behind, and its next answer was another one."""

    def change(module: Asking, x: Tensor) -> Tensor:
        module.scale *= 0.5
        return x * module.scale

    model = Asking(change).double()

    def steps(*sizes: int) -> Callable[[Callable[[int], Tensor], Distributed], float]:
        def work(call: Callable[[int], Tensor], here: Distributed) -> float:
            for size in sizes:
                call(size)
            return float(here.module.scale)

        return work

    assert on_two(model, steps(6, 3, 6)) == [0.125, 0.125]
    assert on_two(model, steps(6, 1, 6)) == [0.125, 0.125]


def test_a_hook_of_a_parameter_without_a_gradient_is_not_called() -> None:
    """A part that runs under no_grad has no gradient, and on one device no call; here its hook was called with None."""
    called = []

    class Unlearned(Asking):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.conv(x)
            return self.fc(x.mean((2, 3)))

    model = Unlearned(lambda _, x: x).double()
    model.conv.weight.register_hook(lambda g: called.append(g))

    def step(call: Callable[[int], Tensor], here: Distributed) -> bool:
        call(6).sum().backward()
        assert here.module.conv.weight._backward_hooks, "it is there for the next step"
        return here.module.conv.weight.grad is None

    assert on_two(model, step) == [True, True]
    assert called == []


def test_an_input_that_is_returned_in_evaluation_is_still_a_part() -> None:
    """It was marked as a whole batch, as outputs are; the next call with it took it for one, on that device only, and hung."""

    class Both(Asking):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    model = Both(lambda _, x: x).double()
    plan = named_plan("master", trace(model, images(6)).graph, 6, Speeds((2.0, 1.0)))

    def on_device(group: Group) -> list[tuple[int, ...]]:
        here = Distributed(model, plan, group, images(6))
        mine = part(here, images(6))
        with torch.no_grad():
            return [tuple(here(mine, batch=6)[1].shape) for _ in range(3)]

    assert run_on_threads(2, on_device, timeout_s=20) == [[(6, 3, 6, 6)] * 3] * 2


def test_training_in_evaluation_mode_reaches_all_copies() -> None:
    """The encoder's weights lay on all devices, and in evaluation one computed with them: the others had no gradients."""

    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.fc = nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.encoder(x.flatten(2).permute(2, 0, 1)).permute(1, 2, 0).reshape(x.shape)
            return self.fc((x * (x.size(0) // 2)).mean((2, 3)))

    model = Encoded().double().eval()
    plan = named_plan("hybrid", trace(model, images(4)).graph, 4, Speeds((2.0, 1.0, 1.0)))

    def on_device(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, plan, group, images(4)).eval()
        here(part(here, images(4)), batch=4).square().sum().backward()
        return {key: here.gather(key, p.grad) for key, p in here.named_parameters() if p.grad is not None}

    model(images(4)).square().sum().backward()
    require_gradients(model, run_on_threads(3, on_device, timeout_s=20))


def require_gradients(model: nn.Module, found: list[dict[str, Tensor]]) -> None:
    for gradients in found:
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for key, p in model.named_parameters():
            torch.testing.assert_close(gradients[key], p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_that_the_model_returns(whole: bool) -> None:
    """A value without rows was refused, though that of the whole batch can be computed on any device."""

    class Learning(Asking):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            y = (x.flatten(1).sum(1) > 0).long()
            x = super().forward(x)
            if whole and float(x.detach().sum()) > 1e9:
                x = x * 2
            return {"loss": F.cross_entropy(x - x.mean(0), y), "logits": x, "norm": self.conv.weight.norm()}

    model = Learning(lambda _, x: x).double()
    reference = copy.deepcopy(model)

    def step(call: Callable[[int], Any], here: Distributed) -> dict[str, Tensor]:
        answer = call(6)
        assert answer["loss"].shape == answer["norm"].shape == ()
        (answer["loss"] + 0.1 * answer["norm"] + answer["logits"].square().sum()).backward()
        return {key: here.gather(key, p.grad) for key, p in here.named_parameters() if p.grad is not None}

    answer: Any = reference(images(6))
    (answer["loss"] + 0.1 * answer["norm"] + answer["logits"].square().sum()).backward()
    require_gradients(reference, on_two(model, step))


def test_a_parameter_with_a_hook_is_whole_on_every_device() -> None:
    """Plans that split its layer were refused, though the hook can have the whole gradient where the layer is not split."""

    model = Asking(lambda _, x: x).double()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each.conv.weight.register_hook(lambda g: g / (1 + g.norm()))
        each.fc.bias.register_post_accumulate_grad_hook(damp)
    plan = named_plan("model", trace(model, images(6)).graph, 6, Speeds((2.0, 1.0, 0.0)))

    def on_device(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, plan, group, images(6))
        here(part(here, images(6)), batch=6).square().sum().backward()
        return {key: here.gather(key, p.grad) for key, p in here.named_parameters() if p.grad is not None}

    reference(images(6)).square().sum().backward()
    require_gradients(reference, run_on_threads(3, on_device, timeout_s=20))


class Halved(torch.autograd.Function):
    """Its forward takes each sample by itself, its backward does not."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + g.norm())


class Inner(nn.Module):
    """A block of a net: a convolution, and what a function makes of it."""

    def __init__(self, change: Callable[["Inner", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.change, self.last = nn.Conv2d(4, 4, 1), change, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


class Outer(nn.Module):
    def __init__(self, change: Callable[[Inner, Tensor], Tensor], call: Callable[["Outer", Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.block, self.fc, self.call = nn.Conv2d(3, 4, 3), Inner(change), nn.Linear(4, 5), call

    def forward(self, x: Tensor) -> list[Tensor]:
        features = self.call(self, self.stem(x)).mean((2, 3))
        return [self.fc(features), features]


def through(outer: Outer, x: Tensor) -> Tensor:
    return outer.block(x)  # type: ignore[no-any-return]


def normalised(inner: Inner, x: Tensor) -> Tensor:
    inner.conv.weight.data /= 1 + inner.conv.weight.data.norm()
    return inner.conv(x)  # type: ignore[no-any-return]


def noting(inner: Inner, x: Tensor) -> Tensor:
    x, inner.last = x - 0.1 * inner.last, float(x.detach().mean())
    return x


def without_gradient(inner: Inner, x: Tensor) -> Tensor:
    with torch.no_grad():
        return inner.conv(x if float(x.sum()) < 1e9 else x * 2)  # type: ignore[no-any-return]


def by_size(outer: Outer, x: Tensor) -> Tensor:
    return outer.block(x) if x.shape[0] > 3 else x  # type: ignore[no-any-return]


def damp(p: Tensor) -> None:
    p.grad.mul_(0.5)  # type: ignore[union-attr]


def plainly(inner: Inner, x: Tensor) -> Tensor:
    return inner.conv(x)  # type: ignore[no-any-return]


STORIES: dict[str, tuple[Callable[[], Outer], str]] = {
    "an output that another layer reads, too, on all devices": (lambda: hooked(Outer(plainly, through)), "data"),
    "weights that forward changes, with a hook": (lambda: damped(Outer(normalised, through)), "model"),
    "a number noted of a batch that several devices have": (lambda: hooked(Outer(noting, through)), "model"),
    "a block that cuts gradients off: weights before it do not decay": (
        lambda: Outer(without_gradient, through),
        "data",
    ),
    "a parameter with a hook that a small batch does not use": (lambda: damped(Outer(plainly, by_size)), "model"),
    "a backward that takes samples together": (lambda: Outer(lambda _, x: Halved.apply(x), through), "data"),  # type: ignore[no-untyped-call]
}


def hooked(net: Outer) -> Outer:
    net.stem.register_forward_hook(lambda _m, _x, y: y * 0.5)
    return net


def damped(net: Outer) -> Outer:
    net.block.conv.bias.register_post_accumulate_grad_hook(damp)  # type: ignore[union-attr]
    return net


def trained(model: Any, call: Callable[[Tensor], Any], weights: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for size in (6, 2, 6):
        optimizer.zero_grad()
        sum(y.square().mean() for y in call(images(size))).backward()
        optimizer.step()
    return {key: value.clone() for key, value in weights().items()}


@pytest.mark.parametrize("story", STORIES)
def test_stories(story: str) -> None:
    make, name = STORIES[story]
    torch.manual_seed(0)
    model = make().double()
    reference = copy.deepcopy(model)
    if model.block.conv.bias._post_accumulate_grad_hooks:  # a copy has none
        damped(reference)
    plan = named_plan(name, trace(model, images(6)).graph, 6, Speeds((3.0, 0.0, 2.0)))

    def on_device(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, plan, group, images(6))
        return trained(here, lambda x: here(part(here, x), batch=len(x)), here.full_state_dict)

    expected = trained(reference, reference, reference.state_dict)
    for found in run_on_threads(3, on_device, timeout_s=20):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_one_sample_whose_axes_were_permuted_before_a_batch_norm() -> None:
    """Of seed 22138: on the device with one sample of five, torch took its strides for channels-last in the backward of the
    batch norm, and not in the forward; the gradients of what stood before were wrong by 1e-3."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gru = nn.Conv2d(3, 4, 1), nn.GRU(4, 4)
            self.norm, self.fc = nn.BatchNorm2d(4).eval(), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.gru(self.conv(x).flatten(2).permute(2, 0, 1))[0].permute(1, 2, 0).reshape(-1, 4, 6, 6)
            x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=False)
            return self.fc(x.mean(3).mean(2))

    torch.manual_seed(0)
    model, optimizer = Net().double(), functools.partial(torch.optim.SGD, lr=0.1)

    def train(call: Callable[[int], Tensor], here: nn.Module) -> Any:
        steps = optimizer(here.parameters())
        for _ in range(2):
            steps.zero_grad()
            call(3).square().sum().backward()
            steps.step()
        return here.full_state_dict() if isinstance(here, Distributed) else here.state_dict()

    found = on_two(model, train)
    expected = train(lambda n: model(images(n)), model)
    for state in found:
        torch.testing.assert_close(state, dict(expected), rtol=0, atol=1e-12)


def test_the_gradient_of_one_sample_whose_axes_were_permuted_behind_a_batch_norm() -> None:
    x, statistics = images(1).requires_grad_(), (torch.zeros(3).double(), torch.ones(3).double())
    g = torch.randn(36, 1, 3, dtype=torch.float64).permute(1, 2, 0).view(1, 3, 6, 6)
    y = call_operation(nn.Module(), Operation("function", F.batch_norm, (Ref(0), *statistics)), [x], 1)
    (found,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(found, g / (1 + 1e-5) ** 0.5, rtol=0, atol=1e-12)


def test_a_number_that_is_returned_must_not_be_frozen() -> None:
    """Of seed 23776: with rectifiers that were all off it was the mean of a bias, the same for all images."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            y = self.fc(x.mean((2, 3)) * 0)
            return y, float(y.detach().mean())

    def step(call: Callable[[int], Any], here: Distributed) -> None:
        before = call(6)[1]
        with torch.no_grad():
            here.module.fc.bias.add_(1.0)
        assert call(6)[1] == pytest.approx(before + 1)

    on_two(Net().double(), step)


@pytest.mark.parametrize("plan", ["data-by-speed", "model"])
def test_a_tensor_without_channels(plan: str) -> None:
    """Of seed 24840: a split into one channel and none; its FLOP were divided by its channels."""

    def change(_: Asking, x: Tensor) -> Tensor:
        some, none = torch.split(x, [4, 0], dim=1)
        return torch.cat((some * torch.sigmoid(some), none), 1)

    assert difference(Asking(change), (3, 6, 6), plan=plan) < 1e-10


class Reader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if x.shape[0] > 3 else x


class Beside(nn.Module):
    """Its input goes two ways, one of them through a batch norm of which every device has the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm, self.pointwise = (
            nn.Conv2d(3, 3, 3, padding=1, groups=3),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 3, 1),
        )
        self.by_size, self.fc = Reader(), nn.Linear(108, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.by_size(x + self.pointwise(self.norm(self.depthwise(x)))).flatten(1))


def test_a_device_that_a_small_batch_leaves_out_has_its_running_statistics() -> None:
    """Of seed 40536: a batch of two left a device without samples, and its statistics without that step."""
    assert difference(Beside(), (3, 6, 6), speeds=(1, 4), plan="data-by-speed", sizes=(6, 2, 6)) < 1e-10


class Assigning(nn.Module):
    """Of seed 70008: a trace took the buffer that forward assigns for one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(3))
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = 0.9 * self.largest + 0.1 * x.detach().amax((0, 2, 3))
        return self.fc((x - self.largest.view(1, -1, 1, 1)).mean((2, 3)))  # type: ignore[no-any-return, operator]


def test_a_buffer_that_forward_assigns_is_that_of_one_device() -> None:
    assert difference(Assigning(), (3, 6, 6), plan="data-by-speed") < 1e-10


class WeightReadTwice(nn.Module):
    """Of seed 5004536: in evaluation, a bare weight became an output of the layer that copies in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(108, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.copy_(x * 0.5)
        return self.fc((self.conv(y) + 0.01 * self.conv.weight.mean()).flatten(1))


def test_a_weight_that_is_read_inside_and_outside_of_a_layer() -> None:
    assert difference(WeightReadTwice(), (3, 6, 6), plan="model") < 1e-10


def test_inactive_dropout_in_a_region_draws_nothing() -> None:
    """Of seed 5002684: the name of the module was taken for that of a function."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            x.masked_fill_(x > 1, 1.0)
            return self.dropout(x)

    assert not any(layer.random for layer in trace(Clamped(), images(2)).graph.layers.values())


def test_checkpointed_batch_norm_without_gradient_is_refused() -> None:
    """Of seed 5004772: one device calls it twice in a step, but its backward, which calls it again here, did not run."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(3).requires_grad_(False), nn.Conv2d(3, 3, 1)
            self.fc = nn.Linear(108, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda x: self.conv(self.norm(x)), x, use_reentrant=False)
            return self.fc(y.flatten(1))  # type: ignore[union-attr]

    with pytest.raises(InputError, match="'norm' is in training mode under"):
        difference(Frozen(), (3, 6, 6), plan="data")


def test_batch_norm_in_nested_checkpoints_equals_one_device() -> None:
    """Of seed 6004299: backward repeats the inner forward twice or once, depending on what follows it."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
            self.fc = nn.Linear(108, 5)

        def inner(self, x: Tensor) -> Tensor:
            return torch.relu(checkpoint(self.block, x, use_reentrant=False))  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.inner, x, use_reentrant=False)
            return self.fc(y.flatten(1))  # type: ignore[union-attr]

    assert difference(Nested(), (3, 6, 6), plan="data") < 1e-10
