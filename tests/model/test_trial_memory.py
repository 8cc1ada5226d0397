"""What the trial of a trace takes beside the weights, and that it finds in large weights what it finds in small ones.

A trial copied the model three times and held two sets of gradients: 2.3 GB beside 445 MB of weights. A device with a limit of
1.3 GB was killed while it was made ready for a plan that would have fitted.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.model.tracing import check, trace
from convoy.model.tracing.check import Differs, check_same
from convoy.model.tracing.shared_copy import is_shared, shared, shared_copy
from convoy.model.tracing.sketch import Sketches, differing, sketch_of

SPECS = [((8,), torch.float32)]
X = torch.zeros(2, 8)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 70)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).relu())


class HalfTheGradient(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return 0.5 * y + 0.5 * y.detach()


class WritesItsWeight(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.second.weight.data[3, 5] += 1.0
        return y


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "WHOLE_BYTES", 0)


@pytest.mark.usefixtures("everything_is_large")
def test_a_trial_of_large_weights_leaves_them_as_they_are_and_finds_nothing_wrong() -> None:
    model = Plain()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    check_same(model, trace(model, X), SPECS, training=True)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(("odd", "told"), [(HalfTheGradient, "other gradients"), (WritesItsWeight, "'second.weight'")])
def test_a_trial_finds_what_differs_in_a_large_weight(odd: type[Plain], told: str) -> None:
    model = odd()
    before = model.second.weight.detach().clone()
    with pytest.raises(Differs, match=told):
        check_same(model, trace(Plain(), X), SPECS, training=True)
    assert torch.equal(model.second.weight, before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process its peak anew")
@pytest.mark.usefixtures("everything_is_large")
def test_a_trial_takes_no_more_than_two_gradients_beside_the_weights() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())  # 134 MB
    trace(nn.Linear(2, 2), torch.zeros(2, 2))  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    trace(model, torch.zeros(2, 2048))
    assert status_bytes("VmHWM") - before < weights / 2


def status_bytes(name: str) -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def test_a_shared_copy_is_written_for_itself() -> None:
    model = nn.Linear(3, 3)
    made = shared_copy(model)
    assert is_shared(made.weight, model.weight)
    assert not is_shared(made.weight, made.bias)
    with torch.no_grad():
        made.weight.view(-1)[4] = 9.0
    assert not is_shared(made.weight, model.weight)
    assert model.weight[1, 1] != 9.0


def test_a_trace_lets_go_of_the_weights() -> None:
    """Its copy lies in a cycle until Python's collector comes. Weights that were written meanwhile were copied first, and those
    of a model that the script let go of were not freed."""
    model = nn.Linear(64, 64)
    address = torch._C._data_address(model.weight)  # type: ignore[attr-defined]
    gc.disable()
    try:
        trace(model, torch.zeros(2, 64))
        with torch.no_grad():
            model.weight.add_(1.0)
    finally:
        gc.enable()
    assert torch._C._data_address(model.weight) == address  # type: ignore[attr-defined]


def test_memory_of_numpy_is_copied_at_once() -> None:
    held = torch.from_numpy(torch.arange(3.0).numpy().copy())
    made = shared(held)
    assert torch.equal(made, held)
    assert not is_shared(made, held)


def test_a_torch_without_such_copies_copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_lazy_clone")
    monkeypatch.delattr(torch._C, "_is_cow_tensor")
    net = nn.Linear(3, 2)
    copied = shared_copy(net)
    assert not is_shared(net.weight, copied.weight)
    assert torch.equal(net.weight, copied.weight)
    trace(net, torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_entry_of_a_gradient_shows_in_its_sketch(dtype: torch.dtype) -> None:
    g = torch.randn(70, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    near, far, lost = g * (1 + 1e-6 * (dtype == torch.float32)), g.clone(), g.clone()
    far[69, 63] += 0.5
    lost[0, 0] = torch.nan
    rows = {name: {"w": sketch_of(t)} for name, t in (("g", g), ("near", near), ("far", far), ("lost", lost))}
    assert differing(rows["g"], rows["near"], ["w"]) is None
    assert differing(rows["g"], rows["far"], ["w"]) == "w"
    assert differing(rows["g"], rows["lost"], ["w"]) == "w"
    assert differing(rows["lost"], rows["lost"], ["w"]) is None
    assert differing(rows["g"], {}, ["w"]) == "w"


def test_a_gradient_that_comes_in_two_parts_is_their_sum() -> None:
    """A reentrant checkpoint brings a part of a weight's gradient in a backward of its own."""
    weight = nn.Parameter(torch.ones(2000))
    sketches = Sketches({"w": weight})
    for factor in (2.0, 3.0):
        (weight * factor).sum().backward()
    assert weight.grad is None
    assert differing(sketches.taken(), {"w": sketch_of(torch.full((2000,), 5.0))}, ["w"]) is None
    assert not sketches.taken()
