"""Measuring jobs on one device, on threads and across processes: the fleet they describe."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.cli.measuring import check_measure, measure_device
from convoy.comm.group import AloneGroup, Group
from convoy.config.run_file import resolve_settings
from convoy.config.train_options import Settings
from convoy.errors import InputError, MismatchError
from convoy.fleet import Device, Fleet, Host
from convoy.measure.device_info import DeviceInfo, fit, fleet_of, host_indices
from convoy.measure.layer_timer import LayerTimer, measure_speeds
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.overhead_probe import LOSS_ENTRIES, Quota, loss_shapes, measure_overheads
from convoy.measure.timing import RoundTimer, device_now
from convoy.model.tracing import TracedModel, trace
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.report.measured import show
from convoy.runtime.clock import Clock
from convoy.simulate.simulator import simulate
from convoy.simulate.table import Measurement, read_fleet_file
from tests.support import nets
from tests.support.nets import UNet
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")
QUICK_S = 1e-4


def traced_net(name: str) -> tuple[nn.Module, TracedModel]:
    model = nets.NETS[name]()
    return model, trace(model, torch.randn(4, *getattr(model, "shape", (3, 8, 8))))


# --- the fleet of a job ----------------------------------------------------------------------------------------------

ROWS = [
    DeviceInfo("attic.lan", "m1", "cpu", 4, 8_000_000_000, 1.0),
    DeviceInfo("attic.lan", "m1", "cpu", 4, 8_000_000_000, 2.0),
    DeviceInfo("attic.lan", "m1", "cuda", None, 6_000_000_000, 1.0),
    DeviceInfo("attic", "m2", "cpu", 2, 4_000_000_000, 1.0),
    DeviceInfo("-_-", "m3", "cpu", 2, 4_000_000_000, 1.0),
]


def test_measured_devices_form_a_fleet() -> None:
    fleet = fleet_of(ROWS)
    assert [host.name for host in fleet.hosts] == ["attic", "attic-1", "host"]
    assert [d.name for d in fleet.devices] == ["attic-cpu0", "attic-cpu1", "attic-cuda0", "attic-1-cpu0", "host-cpu0"]
    assert [d.memory_bytes for d in fleet.devices[:3]] == [4_000_000_000, 4_000_000_000, 6_000_000_000]
    assert fleet.devices[1].slowdown == 2.0
    assert host_indices(fleet) == (0, 0, 0, 1, 2)
    assert fleet_of([replace(ROWS[0], kind="hpu")]).devices[0].kind == "hpu"


def test_fleet_file_must_match_the_job() -> None:
    fleet = fleet_of(ROWS)
    assert fit(fleet, ROWS) == fleet
    assert fit(fleet, [replace(ROWS[0], slowdown=3.0), *ROWS[1:]]).devices[0].slowdown == 3.0
    with pytest.raises(InputError, match=r"5 devices, this job has 4"):
        fit(fleet, ROWS[:4])
    with pytest.raises(InputError, match=r"device 3 .* is cpu in the fleet file, but computes on cuda"):
        fit(fleet, [*ROWS[:3], replace(ROWS[3], kind="cuda"), ROWS[4]])
    with pytest.raises(InputError, match="on two hosts in the fleet file"):
        fit(fleet, [*ROWS[:4], replace(ROWS[4], machine="m1")])


# --- the whole job ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore this process's own quota: seconds are wall-clock."""
    monkeypatch.setattr("convoy.measure.overhead_probe.quota_cores", lambda: None)


def measure_alone(budget_s: float = 1.0) -> Measurement:
    model, traced = traced_net("two-conv")
    with AloneGroup(CPU) as group:
        return measure_job(group, traced, model, 8, MeasureOptions("two-conv", budget_s=budget_s, slice_s=QUICK_S))


def test_every_plan_replays_on_the_measured_fleet() -> None:
    measured = measure_alone()
    assert Measurement.from_toml(measured.to_toml()) == measured
    _, traced = traced_net("two-conv")
    costs = measured.costs(traced.graph)
    for plan in PLANS:
        steps = lower(named_plan(plan, traced.graph, 8, Speeds((1.0,))), traced.graph)
        assert 0 < simulate(steps, traced.graph, costs).step_s < 10
    console = Console(record=True, width=80, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(measured, console)
    shown = console.export_text()
    assert "conv2" in shown
    assert measured.fleet.devices[0].name in shown


def test_callers_torch_settings_do_not_affect_probes() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), torch.autograd.set_detect_anomaly(True):
            model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
            traced = trace(model, torch.zeros(2, 4, 1, 1))
            measure_job(AloneGroup(CPU), traced, model, 4, MeasureOptions("small", budget_s=0.2, slice_s=QUICK_S))
            assert torch.is_anomaly_enabled()
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_layer_times_include_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[float] = []
    rows = LayerTimer.rows
    monkeypatch.setattr(LayerTimer, "rows", lambda self, factor=1.0: factors.append(factor) or rows(self, factor))
    monkeypatch.setattr("convoy.measure.measure_job.find_quota", lambda _: Quota(0.5, limited=True))
    monkeypatch.setattr(Quota, "contention", lambda *_: 3.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    measure_alone(0.1)
    assert factors == [1.0, 3.0]


class Types(TorchDispatchMode):
    """A recorder of the dtypes a kernel was called with."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.seen = names, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in self.names:
            self.seen.add(args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_layers_are_timed_in_the_training_precision(precision: str, dtype: torch.dtype) -> None:
    """Regression: bf16 trainings were planned with float32 times, although devices differ in the gain."""
    model, traced = traced_net("two-conv")
    kernels = ("convolution", "convolution_backward", "addmm", "mm")
    with AloneGroup(CPU) as group, Types(*kernels) as types:
        timer = RoundTimer(Clock(CPU), slice_s=1e-5)
        LayerTimer(traced, model, 4, timer, 1, precision).turn("conv2", 0.1)
        assert types.seen == {dtype}
        measure_speeds(group, traced, model, 4, 1.0, precision)
    assert types.seen == {dtype}


def test_devices_with_different_precisions_are_refused() -> None:
    model, traced = traced_net("two-conv")
    with pytest.raises(MismatchError, match="float32 on device 0, but bf16 on device 1"):
        run_on_threads(
            2,
            lambda group: measure_speeds(group, traced, model, 4, 1.0, ("float32", "bf16")[group.device]),
            timeout_s=30.0,
        )


def measure_on_threads(fleets: Sequence[Fleet | None]) -> list[Measurement]:
    def work(group: Group) -> Measurement:
        model, traced = traced_net("two-conv")
        options = MeasureOptions("two-conv", fleets[group.device], 0.1, 0.2, slice_s=1e-5)
        return measure_job(group, traced, model, 4, options)

    return run_on_threads(len(fleets), work, timeout_s=30.0)


def test_devices_with_different_fleet_files_are_refused() -> None:
    fleet = Fleet((Host("a"),), (Device("x", "a", "cpu"), Device("y", "a", "cpu")))
    with pytest.raises(MismatchError, match="another fleet than device 0"):
        measure_on_threads([fleet, None])


def settings_of(**changes: Any) -> Settings:
    given = {"net": "two-conv:1:1", "devices": "cpu,cpu", "batch": 1, "slowdown": "1,3", "budget_s": 1.0} | changes
    return resolve_settings(None, given).settings


def measure_command(_device: int, output: str) -> None:
    torch.set_num_threads(1)
    measure_device(Path(output), settings_of(), None)


def test_two_processes_measure_themselves_and_write_a_file(tmp_path: Path) -> None:
    output = tmp_path / "fleet.toml"
    output.write_text("older")
    on_processes(2, "tests.measure.test_measure:measure_command", str(output), joined=False)
    fleet, measured = read_fleet_file(output)
    assert measured is not None
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.toml"]
    assert [device.slowdown for device in fleet.devices] == [1.0, 3.0]
    (link,) = fleet.links
    assert link.source == link.target
    assert min(link.bandwidth_bytes_per_s, link.latency_s) > 0
    assert all(costs.processor_s_per_byte > 0 and costs.update_s_per_entry > 0 for costs in measured.device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "mnist"}, "unknown data set 'mnist'"),
        ({"budget_s": 0.0}, "--budget 0"),
        ({"net": "two-cone"}, "unknown net 'two-cone'"),
        ({"output": Path("absent/fleet.toml")}, "does not exist"),
        ({"output": Path()}, "is a folder"),
        ({"fleet": Path("absent.toml")}, "absent.toml"),
        ({"devices": "cpu", "slowdown": "1", "fleet": Path("two.toml")}, "--devices 1, but the fleet file has 2"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_anything_starts(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Fleet((Host("a"),), (Device("x", "a", "cpu"), Device("y", "a", "cpu")))
    (tmp_path / "two.toml").write_text(two.to_toml())
    for name in ("output", "fleet"):
        if name in changes and changes[name] != Path():
            changes = changes | {name: tmp_path / changes[name]}
    monkeypatch.delenv("CONVOY_FLEET", raising=False)
    given = {"output": tmp_path / "fleet.toml", "fleet": None} | changes
    output, fleet = given.pop("output"), given.pop("fleet")
    with pytest.raises(InputError, match=message):
        check_measure(output, settings_of(**given), fleet)


def test_emulated_host_measures_the_emulated_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Fleet((Host("a"),), (Device("x", "a", "cpu"),))
    (tmp_path / "one.toml").write_text(one.to_toml())
    check_measure(tmp_path / "out.toml", settings_of(), None)
    monkeypatch.setenv("CONVOY_FLEET", str(tmp_path / "one.toml"))
    with pytest.raises(InputError, match="--devices 2, but the fleet file has 1"):
        check_measure(tmp_path / "out.toml", settings_of(), None)


def test_loss_is_timed_on_the_models_outputs() -> None:
    """Of as many samples as 16 MB hold."""
    pixels = trace(UNet(), torch.zeros(2, 3, 32, 32)).graph
    (output,) = pixels.outputs
    each = math.prod(pixels[output].shape)
    assert loss_shapes(pixels, 24) == [(24, *pixels[output].shape)]
    assert loss_shapes(pixels, 1 << 30) == [(LOSS_ENTRIES // each, *pixels[output].shape)]
    found, _ = measure_overheads(CPU, device_now(CPU), QUICK_S, outputs=loss_shapes(pixels, 24))
    assert found.loss_s_per_byte > 0
