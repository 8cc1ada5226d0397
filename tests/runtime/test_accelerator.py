"""Fleets with accelerators, on torch's simulated device "sim" with its own memory, streams and events."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.api import distribute, make_plan
from convoy.checkpoint import Progress, load_checkpoint, save_checkpoint
from convoy.comm.group import AloneGroup, Group, Message
from convoy.errors import InputError
from convoy.machine.accelerator import (
    check_device,
    local_devices,
    memory_of,
    pick_device,
    queued,
    random_state_kept,
    to_device,
)
from convoy.plan.presets import PLANS, Speeds
from convoy.runtime.clock import Clock
from convoy.runtime.gradients import global_norm
from convoy.runtime.model_checks import check_batches, check_copies
from convoy.runtime.module import Distributed
from tests.conftest import ROOT
from tests.support import nets, sim
from tests.support.one_device import EXACT, OPTIMIZERS, Training, by_name, loss_of, on_one, one_trace, part
from tests.support.processes import on_processes
from tests.support.sim import torch_module
from tests.support.threads import run_on_threads

pytestmark = pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)

FILES = (
    "tests/parity/test_parity.py", "tests/parity/test_parity_in_shares.py", "tests/runtime/test_reshard.py",
    "tests/runtime/test_optimizer.py", "tests/runtime/test_exchange.py", "tests/runtime/test_defects.py",
    "tests/runtime/test_precision.py", "tests/checkpoint/test_checkpoint.py", "tests/train/test_controller.py",
    "tests/elastic/test_losses_with.py",
)  # fmt: skip
HEART = (
    "(every_plan_and_every_sum and ring)",
    "(planners_choice and two-conv)",
    "(sharded_parameters_follow and shares0)",
    "tied-mixed",  # every strategy at once
    "(autocast_of_the_caller and both and hybrid)",  # bf16 and fp16
    "(as_one_under_autocast and hybrid)",
    "(every_move_on_threads and float64-strided)",
    "(to_every_other and two-conv-sgd)",  # weights that move to another plan
    "(resume_mid_epoch and resnet-adam)",  # a checkpoint
    "rebalanced_training_matches",  # rebalancing
    "(loss_changes_no_number and (scaled or snapshot))",  # recovery
)
"""Of each kind of test one, for every day; the slow tests have all."""
# torch's ASGD gives other numbers on accelerators (by lists of tensors) than on a CPU, by 1e-9.
# Copies of a weight on a CPU and an accelerator differ in the last bit, which the test of equal checkpoints does not allow.
WHOLE = ("not asgd and not every_plan_loads and not invalid_precisions",)


@pytest.fixture
def sims() -> Iterator[None]:
    sim.load()
    yield
    sim.load(devices=0)


on_sims = pytest.mark.usefixtures("sims")


def ran_on(fleet: str, names: Sequence[str], timeout_s: float) -> set[str]:
    """Run the named tests of `FILES` in a process, on a fleet of tests.support.sim.plugin; return those that passed."""
    argv = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "tests.support.sim.plugin", "-p", "no:cacheprovider"]
    argv += [*FILES, "-k", " or ".join(names)]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        env=os.environ | {"SIM_FLEET": fleet},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return set(re.findall(r"^PASSED (\S+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("fleet", ["mixed", pytest.param("sims", marks=pytest.mark.slow)])
def test_accelerators_train_as_one_device(fleet: str) -> None:
    passed = ran_on(fleet, HEART, 110)
    every_plan = "tests/parity/test_parity.py::test_twenty_steps_by_every_plan_and_every_sum"
    assert {f"{every_plan}[{plan}-ring]" for plan in PLANS} <= passed
    files = {name.partition("::")[0] for name in passed}
    assert files == {*FILES} - {"tests/runtime/test_optimizer.py"}, "each kind of test"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("fleet", ["mixed", "sims"])
def test_moves_checkpoints_optimizers_and_rebalancing_on_accelerators(fleet: str) -> None:
    assert {name.partition("::")[0] for name in ran_on(fleet, WHOLE, 1450)} == {*FILES}


@pytest.mark.parametrize(
    ("devices", "plan"),
    [
        ("sim:0,cpu", "hybrid --speeds 2,1"),
        pytest.param("sim:0,cpu", "auto --budget 1", marks=pytest.mark.slow),
        pytest.param("sim:0,sim:1", "auto --budget 1", marks=pytest.mark.slow),
    ],
)
def test_the_command_trains_on_accelerators(devices: str, plan: str, tmp_path: Path) -> None:
    """In processes of their own: through pinned memory. torch loads the backend as it loads those of other vendors."""
    installed = tmp_path / "convoy_sim-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: convoy-sim\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\nsim = tests.support.sim:load\n")
    sim.library()
    log = tmp_path / "log.jsonl"
    argv = f"train --devices {devices} --data digits --limit 120 --epochs 1 --net two-conv:4:6 --plan {plan}"
    done = subprocess.run(
        [sys.executable, "-m", "convoy", *argv.split(), "--compare", "--log", str(log)],
        cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    fleet = next(line for line in lines if line["what"] == "fleet")
    assert [device["name"].split(" ")[0] for device in fleet["devices"]] == devices.split(",")
    assert [line["step"] for line in lines if line["what"] == "step"] == [0, 1]
    apart = re.search(r"Loss curves over 2 steps: at most (\S+) apart", done.stdout)
    assert apart is not None, done.stdout
    assert float(apart[1]) < 1e-6


# --- one process ----------------------------------------------------------------------------------------------------------


@on_sims
def test_local_devices_match_torch() -> None:
    assert local_devices() == ("sim:0", "sim:1", "sim:2", "sim:3", "cpu")
    assert pick_device(None, 1) == torch.device("sim:1")
    assert pick_device("sim", 0) == torch.device("sim:0")
    assert memory_of(torch.device("sim:2"))[1] == int(0.85 * sim.GIB), "without context and fragments"
    for name, reason in (
        ("sim:4", "no device has this number"),
        ("cuda:0", "torch finds no cuda here"),
        ("simm", ""),
    ):
        with pytest.raises(InputError, match=f"(?s){name}.*{reason}.*this machine has sim:0, sim:1, sim:2, sim:3, cpu"):
            check_device(name)


@on_sims
def test_a_tensor_on_the_wrong_device_fails_as_on_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        nn.Conv2d(3, 4, 3).to("sim:1")(torch.zeros(1, 3, 8, 8))


@on_sims
def test_tied_weights_stay_tied_on_any_accelerator() -> None:
    """torch may create a new parameter per name when it moves a CPU tensor to an accelerator."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    moved = to_device(model, torch.device("sim:0"))
    assert moved["a"].weight is moved["b"].weight
    assert moved["a"].bias is not moved["b"].bias
    assert {p.device for p in moved.parameters()} == {torch.device("sim:0")}


@on_sims
def test_accelerator_results_are_computed_before_sending() -> None:
    """The simulation itself: what a copy brings is not there before an event says so, and other streams must wait for it."""
    device = torch.device("sim:0")
    x, host = torch.ones(4, device=device), torch.empty(4, pin_memory=True)
    host.copy_(x + 1, non_blocking=True)
    assert host.isnan().all()
    queued(device).synchronize()
    assert host.tolist() == [2.0] * 4
    other = torch.Stream(device)
    x.mul_(2)
    with (
        other,
        pytest.raises(RuntimeError, match=r"stream \d+ of sim:0 uses what stream 0 of sim:0 may not have written yet"),
    ):
        x.add_(1)
    queued(device).wait(other)
    with other:
        x.add_(1)
    del x
    with pytest.raises(
        RuntimeError, match=r"memory of stream 0 of sim:0 was freed while stream \d+ of sim:0 may still use it"
    ):
        torch.ones(1, device=device)


def test_checkpoint_moves_between_accelerators_and_cpus(tmp_path: Path) -> None:
    """In a process of its own: autograd makes its threads once, for the accelerators that there are at the first backward."""
    on_processes(1, "tests.runtime.test_accelerator:train_from_fleet_to_fleet", str(tmp_path), joined=False)


def train_from_fleet_to_fleet(_device: int, folder: str) -> None:
    """Two steps on each fleet, with weights of one's own to begin from: what is loaded is all that they go on from."""
    sim.load()
    training = Training("resnet", (10,) * 6, "adam")
    whole, expected = nets.build("resnet"), on_one(training)
    batches = training.batches(whole)
    fleets = (("sim:0", "sim:1", "cpu"), ("cpu", "cpu", "cpu"), ("cpu", "sim:2"))
    plans = [by_name(name, "resnet", speeds=Speeds(s)) for name, s in
             (("hybrid", (3, 1, 2)), ("model", (1, 1, 1)), ("data-by-speed", (1, 4)))]  # fmt: skip

    def work(group: Group, leg: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        here = Distributed(nets.build("resnet", seed=leg), plans[leg], group, batches[0][0][:2])
        optimizer, losses = OPTIMIZERS["adam"](here.parameters()), []
        if leg:
            load_checkpoint(Path(folder), here, optimizer)
        for x, y in batches[2 * leg : 2 * leg + 2]:
            optimizer.zero_grad()
            loss = loss_of(here(part(here, x), batch=len(x)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        save_checkpoint(Path(folder), here, optimizer, Progress(2 * leg + 2, 1, 0))
        return losses, {key: value.cpu() for key, value in here.full_state_dict().items()}

    losses: list[float] = []
    with one_trace("resnet", torch.float64):
        for leg, fleet in enumerate(fleets):
            rows = run_on_threads(len(fleet), lambda group, leg=leg: work(group, leg), on=fleet)  # type: ignore[misc]
            losses += rows[0][0]
    assert losses == pytest.approx(expected.losses, abs=EXACT)
    for key, value in expected.weights.items():
        torch.testing.assert_close(rows[0][1][key], value, rtol=0, atol=EXACT)


@on_sims
def test_accelerator_seconds_come_from_events() -> None:
    device = torch.device("sim:0")
    clock, x = Clock(device), torch.zeros(400, 400, device=device)
    before = torch.ops.sim.synchronizations()
    for _ in range(5):
        with clock.segment({"a": 1.0, "b": 3.0}, "forward"):
            x = x @ x
    assert torch.ops.sim.synchronizations() == before, "nothing stops for the clock"
    clock.settle()
    assert clock.compute_s > 0
    assert clock.layers_s["b", "forward"] == pytest.approx(3 * clock.layers_s["a", "forward"])
    assert sum(clock.layers_s.values()) == pytest.approx(clock.compute_s)


@on_sims
def test_batch_norm_sums_name_a_weight() -> None:
    """Regression: CUDA allocates these sums like the weight, so an undefined one failed every split batch norm."""
    x = torch.randn(4, 3, 2, 2, device="sim:0")
    mean, deviation = torch.zeros(3, device="sim:0"), torch.ones(3, device="sim:0")
    call = torch.ops.aten.native_batch_norm_backward
    with pytest.raises(RuntimeError, match="tensor does not have a device"):
        call(x, x, None, None, None, mean, deviation, True, 1e-5, [False, True, True])


@on_sims
def test_planning_and_distribute_leave_random_states_alone() -> None:
    """`torch.manual_seed` seeds accelerators too: after `distribute` GPU dropout was one stream for every seed of a script."""
    torch_module.seeds.clear()
    torch_module.kept.clear()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2))
    example = torch.zeros(2, 3, 8, 8)
    with AloneGroup(torch.device("sim:1")) as group:
        state = torch.get_rng_state()
        for plan in ("data", "auto"):
            made = make_plan(plan, net, example, 2, group, budget_s=0.2)
            distribute(net, made, group, example)
        assert torch.equal(torch.get_rng_state(), state)
    assert not torch_module.seeds, "accelerators were seeded"
    with random_state_kept(torch.device("sim:1")):  # measuring draws on the device
        torch.randn(2)
    assert "sim:1" in torch_module.kept
    assert torch.equal(torch.get_rng_state(), state)


@on_sims
def test_norms_work_without_float64_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on Apple's devices gradient clipping and device comparisons ended in a TypeError."""
    double = torch.Tensor.double

    def refusing(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            raise TypeError("Cannot convert a tensor to float64 dtype as this framework doesn't support float64")
        return double(x)

    monkeypatch.setattr("torch.Tensor.double", refusing)
    x = torch.tensor([3.0, 4.0], device="sim:0")
    with AloneGroup(x.device) as group:
        assert global_norm(group, [(x, True)]) == 5.0
        check_batches(group, [x])
        check_copies(group, {"weight": x})


@on_sims
def test_full_accelerator_is_reported() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(2 * sim.GIB, dtype=torch.uint8, device="sim:0")


@on_sims
def test_messages_cross_device_types() -> None:
    def work(group: Group) -> list[float]:
        mine = torch.full((3,), float(group.device), device=group.torch_device)
        theirs = torch.empty(3, device=group.torch_device)
        group.exchange([Message(1 - group.device, mine)], [Message(1 - group.device, theirs)])
        assert theirs.device == group.torch_device
        return theirs.tolist()

    assert run_on_threads(2, work, on=("sim:3", "cpu")) == [[1.0] * 3, [0.0] * 3]


def test_only_one_file_names_accelerator_vendors() -> None:
    """Vendor names elsewhere would work on that vendor only. CUDA graphs are one vendor's, and optional."""
    named = re.compile(r"torch\.(cuda|xpu|mps|backends\.mps)\b|\.cuda\(|\.is_cuda\b|type == \"cuda\"")
    files = (ROOT / "convoy").rglob("*.py")
    assert [
        str(path)
        for path in files
        if path.name not in ("accelerator.py", "cuda_graphs.py") and named.search(path.read_text())
    ] == []
