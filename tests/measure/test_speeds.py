"""Speeds: given by a user, and measured on every device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import convoy.measure.layer_timer
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.measure.layer_timer import LayerTimer, measure_speeds, time_layers
from convoy.measure.planning import given_speeds
from convoy.measure.timing import RoundTimer
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds
from convoy.runtime.clock import Clock
from tests.support import nets
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_call_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call once per round: these tests do not check precision."""
    monkeypatch.setattr(convoy.measure.layer_timer, "SPEEDS_SLICE_S", 0.0)


@pytest.mark.parametrize("numbers", [(1.0,), (0.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_speeds_that_do_not_fit_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match=r"one positive number for each of the 2 devices, e\.g\. --speeds") as caught:
        given_speeds(numbers, 2)
    assert ",".join(f"{n:g}" for n in numbers) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["two-conv", "signal", "tied", "opaque-per-sample", "dependent-samples", "no-gradient"]
)
def test_every_layer_has_a_measured_time(name: str) -> None:
    model = nets.build(name, dtype=torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, torch.zeros(2, *nets.shape_of(model)))
    found = time_layers(LayerTimer(traced, model, 8, RoundTimer(Clock(CPU), slice_s=0.0), 1))
    layers = [each for each in traced.graph.layers.values() if each.batched and each.kind not in ("input", "pick")]
    assert list(found) == [layer.name for layer in layers]
    assert all(seconds > 0 for seconds in found.values())
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items()), "the model is left as it was"
    assert all(p.grad is None for p in model.parameters())


def test_speeds_are_samples_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 1 takes three times as long at the convolution: 0.21 and 0.41 s per sample in total."""
    traced = trace(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(16, 2)), torch.zeros(1, 1, 2, 2))
    monkeypatch.setattr(convoy.measure.layer_timer, "LayerTimer", lambda *_: None)

    def work(group: Group) -> Speeds:
        return measure_speeds(group, traced, nn.Identity(), 16)

    table = iter([{"0": 0.1, "1": 0.01, "2": 0.1}, {"0": 0.3, "1": 0.01, "2": 0.1}])
    monkeypatch.setattr(convoy.measure.layer_timer, "time_layers", lambda *_: next(table))
    first, second = run_on_threads(2, work)
    assert first == second
    assert sorted(first.devices) == pytest.approx([1 / 0.41, 1 / 0.21])
    assert set(first.layers) == {"0", "2"}, "only layers that plans are about"
    assert sorted(first.layers["0"]) == pytest.approx([1 / 0.3, 1 / 0.1])


def test_devices_with_another_model_are_named_before_anything_is_measured() -> None:
    model = nets.build("two-conv", dtype=torch.float32)
    traced = trace(model, torch.zeros(2, 3, 8, 8))
    other = replace(traced, graph=replace(traced.graph, model="Other", outputs=()))

    def work(group: Group) -> None:
        measure_speeds(group, other if group.device else traced, model, 16)

    with pytest.raises(
        MismatchError, match="devices 1, 2 started with another model than device 0: start every device"
    ):
        run_on_threads(3, work)


# --- the slow-down of a clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "slowdown", "finished"), [("cpu", 2.0, 0), ("cpu", 1.0, 0), ("cuda", 2.0, 1)])
def test_slowed_clock_waits_for_queued_kernels(
    kind: str, slowdown: float, finished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep would run in parallel to the kernels."""
    asked: list[torch.device] = []
    monkeypatch.setattr("torch.accelerator.synchronize", asked.append)
    with Clock(torch.device(kind), slowdown).compute("conv", "forward"):
        pass
    assert asked == [torch.device(kind)] * finished


@pytest.mark.parametrize(("kind", "elapsed_s", "processor_s", "slept_s"), [
    ("cpu", 0.25, 0.25, 1.25),  # alone on its core
    ("cpu", 1.0, 0.25, 0.5),  # it had a quarter of a core
    ("cpu", 2.0, 0.25, 0.0),  # it is late already
    ("cuda", 0.25, 0.0, 1.25),  # the time is the GPU's, no processor is busy
])  # fmt: skip
def test_slowdown_on_shared_cores_is_not_doubled(
    kind: str, elapsed_s: float, processor_s: float, slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleeping in proportion to wall time would count the wait for a shared core several times."""
    now = {"elapsed": 5.0, "processor": 3.0}
    slept: list[float] = []
    monkeypatch.setattr("time.perf_counter", lambda: now["elapsed"])
    monkeypatch.setattr("time.thread_time", lambda: now["processor"])
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda _: None)
    with Clock(torch.device(kind), slowdown=6.0).compute("conv", "forward"):
        now.update(elapsed=5.0 + elapsed_s, processor=3.0 + processor_s)
    assert slept == [slept_s]
