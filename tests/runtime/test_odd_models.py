"""Unusual models and calls that users write: they work, or are refused by name."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.beside_one import difference
from tests.support.one_device import EXACT
from tests.support.threads import run_on_threads


class Net(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.between = between if between is not None else nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.between(self.conv(x)).mean((2, 3)))


def images(samples: int = 6) -> Tensor:
    own = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 6, 6, generator=own, dtype=torch.float64)


def on_two(model: nn.Module, work: Callable[[Distributed], Any], plan: str = "model") -> list[Any]:
    model = model.double()
    chosen = named_plan(plan, trace(model, images(2)).graph, 6, Speeds((2.0, 1.0)))
    return run_on_threads(2, lambda group: work(Distributed(model, chosen, group, images(2))), timeout_s=20)


def doubled(conv: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight) * 2


# --- forward replaced by hand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data-by-speed", "model"])
def test_replaced_forward_of_a_torch_layer_is_used(plan: str) -> None:
    """Regression: the layer was silently treated as its class's convolution."""
    model = Net()
    model.between.forward = types.MethodType(doubled, model.between)
    assert "of 'between': its forward was replaced by hand" in trace(model, images(2).float()).note
    assert difference(model, (3, 6, 6), plan=plan) < EXACT


def test_forward_replaced_after_distribute_is_refused() -> None:
    def work(here: Distributed) -> None:
        here.module.between.forward = types.MethodType(doubled, here.module.between)
        with pytest.raises(InputError, match="'forward' of module 'between' changed after distribute"):
            here(images(), whole=True)

    on_two(Net(), work)


# --- state_dict of one's own -----------------------------------------------------------------------------------------


class Renaming(Net):
    """A module with other weight names in files, and an additional number."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 3
        self._register_state_dict_hook(self._rename)

    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        state[f"{prefix}first"] = state.pop(f"{prefix}conv.weight")

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


def test_full_state_has_whole_weights_under_hook_names() -> None:
    """Regression: a renamed weight was this device's shard."""
    model = Renaming().double()
    expected = model.state_dict()

    def work(here: Distributed) -> None:
        local_shards = {key: p.shape for key, p in here.named_parameters()}
        assert here.full_state_dict().keys() == expected.keys()
        torch.testing.assert_close(here.full_state_dict()["first"], expected["first"], rtol=0, atol=0)
        assert {key: p.shape for key, p in here.named_parameters()} == local_shards

    on_two(model, work)


def test_renamed_weights_are_loaded() -> None:
    def work(here: Distributed) -> None:
        with pytest.raises(InputError, match="'first' is not a parameter or buffer"):
            here.load_state_dict(here.full_state_dict())

    on_two(Renaming(), work)


def test_extra_state_is_loaded() -> None:
    """Regression: it was silently skipped."""

    class Counting(Net):
        steps = 3
        get_extra_state, set_extra_state = Renaming.get_extra_state, Renaming.set_extra_state

    def work(here: Distributed) -> None:
        here.load_state_dict({**here.full_state_dict(), "_extra_state": 7})
        assert here.module.steps == 7

    on_two(Counting(), work)


# --- what cannot be right --------------------------------------------------------------------------------------------


def test_uninitialised_lazy_layer_is_refused() -> None:
    with pytest.raises(InputError, match=r"'between.weight' of Net has no shape yet: call the model once"):
        trace(Net(nn.LazyConv2d(4, 1)), images(2).float())


def test_a_scripted_layer_is_refused_by_its_name() -> None:
    with pytest.warns(DeprecationWarning, match="deprecated"):
        model = Net(torch.jit.script(nn.Conv2d(4, 4, 1)))
    with pytest.raises(InputError, match=r"module 'between' was made by torch\.jit"):
        trace(model, images(2).float())


def test_a_complex_parameter_that_would_be_summed_is_refused() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft2(torch.fft.rfft2(x) * self.w, s=x.shape[-2:])

    with pytest.raises(InputError, match=r"parameter 'between.w' is complex"):
        on_two(Net(Spectral()), lambda here: here, plan="data")


def test_unknown_arguments_are_refused_by_name() -> None:
    def work(here: Distributed) -> None:
        with pytest.raises(InputError, match=r"arguments that its forward does not take: .*scale"):
            here(images(), whole=True, scale=2.0)
        with pytest.raises(InputError, match="forward does not take: too many"):
            here(images(), 2.0, whole=True)

    on_two(Net(), work)


def test_saved_tensors_may_move_to_the_cpu_but_use_no_other_hooks() -> None:
    """A lossy compression of activations was left out on several devices, without a word."""

    def half(t: Tensor) -> Tensor:
        return t * 0.5

    def work(here: Distributed) -> None:
        with torch.autograd.graph.save_on_cpu():
            here(images(), whole=True).sum().backward()
        with (
            torch.autograd.graph.saved_tensors_hooks(half, lambda t: t),
            pytest.raises(InputError, match="under saved_tensors_hooks"),
        ):
            here(images(), whole=True)

    on_two(Net(), work)


# --- inputs that forward overwrites ----------------------------------------------------------------------------------


class Doubling(Net):
    """A net whose forward doubles its input images, or a copy of them."""

    copies = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.copies else x
        return super().forward(x.mul_(2.0))


def test_forward_that_overwrites_its_input_is_reported() -> None:
    """Regression: the caller's images silently stayed unchanged, so later reads had other numbers."""
    with pytest.warns(UserWarning, match="Doubling overwrites its input in forward"):
        trace(Doubling(), images(2).float())
    with pytest.warns(UserWarning, match="overwrites its input"):  # also when it is known already
        trace(Doubling(), images(2).float())


def test_forward_that_overwrites_a_copy_is_allowed() -> None:
    model = Doubling()
    model.copies = True
    assert difference(model, (3, 6, 6)) < EXACT


class OddNames(nn.Module):
    """A model whose parameter and attributes have the names of attributes of a distributed model."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4).double())
        self.conv = nn.Conv2d(3, 4, 3).double()
        self.plan, self.group, self.calls, self.precision = "a", "b", 3, 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) * self.weights * self.calls * self.precision


def test_model_may_have_attributes_named_like_those_of_a_distributed_model() -> None:
    model, x = OddNames(), images()
    wanted = model(x)

    def work(part: Distributed) -> tuple[Any, Tensor]:
        inner = part.module
        return (inner.plan, inner.group, inner.calls, part.plan.name), part(x, whole=True).detach()

    for names, found in on_two(model, work, "data"):
        assert names == ("a", "b", 3, "data")
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
