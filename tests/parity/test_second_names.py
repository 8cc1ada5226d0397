"""Models that a trace could get wrong without an error: tensors under two names, named tuples, state and random numbers."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing import trace
from tests.support.beside_one import difference
from tests.support.one_device import EXACT
from tests.support.traced_models import layers_of

Pair = namedtuple("Pair", "first second")


class Net(nn.Module):
    """A convolution, a function of its output, and a Linear."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], **others: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.change, self.fc = nn.Conv2d(3, 4, 3), change, nn.Linear(4, 5)
        self.inner, self.steps = nn.Identity(), 0
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.change(self, self.conv(x)).mean((2, 3)))  # type: ignore[no-any-return]


def add_to_alias(_: Net, x: Tensor) -> Tensor:
    y = x * 1
    z = y
    z += 1
    return y


def read_older_name(_: Net, x: Tensor) -> Tensor:
    y = x * 1
    x = y
    x **= 2
    x -= y * 0.5
    return x + y * 0.1


def add_to_view(_: Net, x: Tensor) -> Tensor:
    y = x * 1
    z = y[:, :2]
    z *= 3
    return y


def scale_without_gradient(_: Net, x: Tensor) -> Tensor:
    y = x * 1
    with torch.no_grad():
        y *= 0.5
    return y


def grow_number(_: Net, x: Tensor) -> Tensor:
    rows = samples = x.shape[0]
    rows *= 2
    return torch.cat([x, x]).reshape(rows, -1)[:samples].reshape(x.shape)


def write_out(_: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    torch.mul(x.detach(), 2, out=y)
    return x + y


class Shifting(nn.Module):
    """It stays whole, since its branch depends on numbers, and overwrites its input."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        if self.late and float(x.detach().sum()) > 1e9:
            return x
        x += 1
        return x * 2 if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("late", [False, True])
def test_a_whole_module_that_overwrites_its_input_keeps_its_surroundings(late: bool) -> None:
    assert difference(Net(lambda net, x: net.inner(x) + x, inner=Shifting(late))) < EXACT


@pytest.mark.parametrize(
    "change", [add_to_alias, read_older_name, add_to_view, scale_without_gradient, grow_number, write_out]
)
@pytest.mark.parametrize("plan", ["data", "model"])
def test_a_write_acts_on_every_name_of_a_tensor(change: Any, plan: str) -> None:
    assert difference(Net(change), plan=plan) < EXACT


class BySize(nn.Module):
    """It stays whole, since its branch depends on the batch size."""

    def forward(self, x: Tensor) -> Pair:
        return Pair(x.relu() if x.shape[0] > 5 else x, x * 2)


@pytest.mark.parametrize("change", [lambda net, x: net.inner(x).second, lambda net, x: sum(net.inner(x))])
def test_a_named_tuple_between_layers_keeps_its_names(change: Any) -> None:
    assert difference(Net(change, inner=BySize())) < EXACT


def test_a_named_tuple_of_torch_is_split_by_samples() -> None:
    model = Net(lambda _, x: x.max(1, keepdim=True).values + x)
    assert all(layer.per_sample for layer in layers_of(model).values())
    assert difference(model) < EXACT


def count(net: Net, x: Tensor) -> Tensor:
    net.steps += 1
    return net.inner(x.flatten(2).transpose(1, 2) * net.steps)[0].reshape(x.shape)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4, batch_first=True), lambda: Attention()])
def test_a_module_without_random_numbers_changes_its_state_on_every_device(make: Any) -> None:
    """Attention has a dropout of zero, and an LSTM weak references to its weights."""
    model = Net(count, inner=make())
    assert difference(model) < EXACT


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)


def test_trained_weights_that_no_module_registers_are_refused() -> None:
    model = Net(lambda net, x: net.hidden[0](x), hidden=[nn.Conv2d(4, 4, 1).double()]).double()
    example = torch.zeros(2, 3, 6, 6, dtype=torch.float64)
    with pytest.raises(InputError, match=r"trains a parameter of shape \(4,.* that its module does not have"):
        trace(model, example)
    model.hidden[0].requires_grad_(False)
    assert difference(model) < EXACT
