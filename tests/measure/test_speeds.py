"""Speeds: from tables written by hand, given by a person, and measured on every layer of nets with something of everything."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import convoy.measure.speeds
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.measure.layers import Bench
from convoy.measure.speeds import Rows, given_speeds, measure_rows, measure_speeds, speeds_of
from convoy.model.tracing import TracedModel, trace
from convoy.plan.presets import Speeds
from convoy.runtime.clock import Clock
from tests.support import nets
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a round instead of 10 ms of calls: these tests look at everything but the precision."""
    monkeypatch.setattr(convoy.measure.speeds, "STRETCH_S", 0.0)


# ---------------------------------------------------------------------------------------------- tables by hand


def two_layers() -> TracedModel:
    return trace(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(16, 2)), torch.zeros(1, 1, 2, 2))


def rows(conv: list[tuple[int, float]], flatten_s: float, linear_s: float) -> Rows:
    return {"0": conv, "1": [(8, flatten_s)], "2": [(8, linear_s)]}


def rows_of(model: nn.Module, traced: TracedModel, batch: int, clock: Clock | None = None) -> Rows:
    return measure_rows(Bench(traced, model, batch, clock or Clock(CPU), CPU, stretch_s=0.0, rounds=1))


def test_speeds_are_samples_per_second_of_the_largest_size_that_all_have_timed() -> None:
    """Device 1 gave up on the convolution after 8 samples, so the 16 of device 0 say nothing about the two."""
    fast = rows([(8, 0.8), (16, 1.0)], 0.08, 0.8)
    slow = rows([(8, 2.4)], 0.08, 0.8)
    speeds = speeds_of([fast, slow], two_layers().graph)
    assert set(speeds.layers) == {"0", "2"}, "only layers that plans are about"
    assert speeds.layers["0"] == pytest.approx((8 / 0.8, 8 / 2.4))
    assert speeds.layers["2"] == pytest.approx((10, 10))
    # Per sample 0.1 + 0.01 + 0.1 s and 0.3 + 0.01 + 0.1 s.
    assert speeds.devices == pytest.approx((1 / 0.21, 1 / 0.41))
    assert speeds.fastest == 0


# ------------------------------------------------------------------------------------------- given by a person


def test_given_speeds_are_those_of_every_layer() -> None:
    speeds = given_speeds([4, 2, 1], 3)
    assert speeds == Speeds((4.0, 2.0, 1.0))


@pytest.mark.parametrize(
    "numbers", [(1.0,), (1.0, 2.0, 3.0), (), (0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_speeds_that_do_not_fit_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match=r"one positive number for each of the 2 devices, e\.g\. --speeds") as caught:
        given_speeds(numbers, 2)
    assert ",".join(f"{n:g}" for n in numbers) in str(caught.value)


# ---------------------------------------------------------------------------------------------------- measured


class Several(nn.Module):
    """Nothing but a module that torch.fx cannot trace and that gives two tensors, one of them of truth values."""

    shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, nets.CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.mean((1, 2)) if len(x.shape) == 4 and float(x.sum()) > -1e9 else x
        return self.fc(x), x > 0


MEASURED = [
    "two-conv",
    "mobile",
    "signal",
    "frozen",
    "tied",
    "opaque-per-sample",
    "dependent-samples",
    "shuffle",
    "no-gradient",
]


@pytest.mark.parametrize("name", MEASURED)
def test_every_layer_takes_time(name: str) -> None:
    """Also those that no rule knows, batch norm, calls that give several tensors, and those that pass no gradient."""
    model = nets.build(name, dtype=torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, torch.zeros(2, *nets.shape_of(model)))
    found = rows_of(model, traced, 8)
    layers = [each for each in traced.graph.layers.values() if each.batched and each.kind not in ("input", "pick")]
    assert list(found) == [layer.name for layer in layers]
    for timed in found.values():
        assert [samples for samples, _ in timed] == [2, 4]
        assert all(0 < seconds < 60 for _, seconds in timed)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items()), "the model is left as it was"
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_is_one_opaque_layer_with_several_outputs_is_measured() -> None:
    model = Several()
    traced = trace(model, torch.ones(2, 3, 8, 8))
    found = rows_of(model, traced, 8)
    assert [traced.graph[name].kind for name in found] == ["opaque"]
    speeds = speeds_of([found, found], traced.graph)
    assert speeds.devices[0] == speeds.devices[1] > 0


@pytest.mark.parametrize(("kind", "slowdown", "finished"), [("cpu", 2.0, 0), ("cpu", 1.0, 0), ("cuda", 2.0, 1)])
def test_a_slowed_clock_waits_for_what_is_queued(
    kind: str, slowdown: float, finished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep would run beside the kernels."""
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
def test_slowed_devices_that_share_the_cores_are_not_slowed_twice(
    kind: str, elapsed_s: float, processor_s: float, slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slowed processes on two cores begin a layer together. Each sleep was a multiple of the seconds for which a layer had
    to share a core, so that the slowest process fell far behind, and four were slower than one."""
    now = {"elapsed": 5.0, "processor": 3.0}
    slept: list[float] = []
    monkeypatch.setattr("time.perf_counter", lambda: now["elapsed"])
    monkeypatch.setattr("time.thread_time", lambda: now["processor"])
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda _: None)
    with Clock(torch.device(kind), slowdown=6.0).compute("conv", "forward"):
        now.update(elapsed=5.0 + elapsed_s, processor=3.0 + processor_s)
    assert slept == [slept_s]


class Resting(Clock):
    """A clock that makes every computation last at least 5 ms, as a slow-down of real length would."""

    @contextmanager
    def compute(self, layer: str, phase: str) -> Iterator[None]:
        with super().compute(layer, phase):
            yield
        time.sleep(0.005)


def test_the_slow_down_of_a_device_counts() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    found = rows_of(model, two_layers(), 4, Resting(CPU))
    least_s = {"0": 0.01, "1": 0.01, "2": 0.01}  # forward and backward
    assert all(seconds >= least_s[name] for name, timed in found.items() for _, seconds in timed)


def test_all_devices_learn_the_same_speeds() -> None:
    model = nets.build("two-conv", dtype=torch.float32)
    traced = trace(model, torch.zeros(2, 3, 8, 8))

    def work(group: Group) -> Speeds:
        clock = Clock(CPU)
        speeds = measure_speeds(group, traced, model, 16, clock)
        assert clock.compute_s == 0, "measuring does not count as training"
        return speeds

    first, *others = run_on_threads(3, work)
    assert len(first.devices) == 3
    assert set(first.layers) == {layer.name for layer in traced.graph.weighted}
    assert all(speed > 0 for row in (first.devices, *first.layers.values()) for speed in row)
    assert all(other == first for other in others)


def test_devices_with_another_model_are_named_before_anything_is_measured() -> None:
    model = nets.build("two-conv", dtype=torch.float32)
    traced = trace(model, torch.zeros(2, 3, 8, 8))
    other = replace(traced, graph=replace(traced.graph, model="Other", outputs=()))

    def work(group: Group) -> None:
        measure_speeds(group, other if group.device else traced, model, 16, Clock(CPU))

    with pytest.raises(
        MismatchError, match="devices 1, 2 started with another model than device 0: start every device"
    ):
        run_on_threads(3, work)
