"""Checkpoints: any fleet, one device and plain PyTorch continue from a checkpoint of any fleet."""

import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

from convoy.checkpoint import Checkpointer, Progress, latest, load_checkpoint, save_checkpoint
from convoy.checkpoint.run_folder import checkpoints, decode, encode
from convoy.checkpoint.tensors import Spec, TensorStream, file_chunks, file_order, write_file
from convoy.comm.group import Group
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage, full_optimizer_state
from convoy.train.loader import Loader
from tests.support import nets
from tests.support.one_device import EXACT, OPTIMIZERS, Training, by_name, loss_of, mixed, one_trace, part
from tests.support.threads import run_on_threads

FLEETS = {2: Speeds((3.0, 1.0)), 3: Speeds((2.0, 0.0, 5.0)), 4: Speeds((7.0, 0.0, 2.0, 1.0))}


def plan_for(devices: int, plan: str, net: str) -> Plan:
    return mixed(net) if plan == "mixed" else by_name(plan, net, speeds=FLEETS[devices])


def apart(a: Any, b: Any) -> float:
    """Return the largest difference of two tables of tensors and numbers."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((apart(a[key], b[key]) for key in a), default=0.0)
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def state_of(optimizer: Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the state of an ordinary model in the form of `full_optimizer_state`."""
    return {key: dict(optimizer.state[p]) for key, p in model.named_parameters() if p in optimizer.state}


# ------------------------------------------------------------------------------------------------------- the round trip

ORDER = ["data-by-speed", "hybrid", "mixed", "sharded"]


def save_and_load(net: str, plans: tuple[str, str], folder: Path, optimizer: str = "adam") -> None:
    """Save by one plan, load by another into a net with other weights, and check that every bit is equal."""
    training = Training(net, (10, 3), optimizer)
    whole, other = nets.build(net), nets.build(net, seed=1)
    batches = training.batches(whole)

    def work(group: Group) -> tuple[Any, ...]:
        here = Distributed(whole, plan_for(4, plans[0], net), group, batches[0][0][:2])
        own = OPTIMIZERS[optimizer](here.parameters())
        for x, y in batches:
            own.zero_grad()
            loss_of(here(part(here, x), batch=len(x)), y).backward()
            own.step()
        path = save_checkpoint(folder, here, own, Progress(2, 1, 0))
        there = Distributed(other, plan_for(4, plans[1], net), group, batches[0][0][:2])
        others = OPTIMIZERS[optimizer](there.parameters())
        progress = load_checkpoint(folder, there, others)
        keys = [key for key, parameter in there.named_parameters() if others.state.get(parameter)]
        assert len(set(group.agree("parameters with state", str(keys)))) == 1, "also where their shard is empty"
        held = [value for state in others.state.values() for value in state.values() if value.dim()]
        assert all(value.untyped_storage().nbytes() == value.numel() * value.itemsize for value in held)
        saved = here.full_state_dict(), full_optimizer_state(here, own)
        return path, progress, saved, (there.full_state_dict(), full_optimizer_state(there, others))

    with one_trace(net, torch.float64):
        rows = run_on_threads(4, work, timeout_s=30)
    for path, progress, (weights, state), (found_weights, found_state) in rows:
        assert (path, progress) == (latest(folder), Progress(2, 1, 0))
        assert list(found_weights) == list(weights)
        assert all(torch.equal(found_weights[key], value) for key, value in weights.items())
        assert apart(found_state["state"], state["state"]) == 0.0
        assert state["state"]
        assert found_state["param_groups"] == state["param_groups"]
    plain = nets.build(net, seed=2)
    plain.load_state_dict(safetensors.torch.load_file(rows[0][0] / "model.safetensors"))
    assert all(torch.equal(value, rows[0][2][0][key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize(("first", "then"), [*itertools.pairwise([*ORDER, ORDER[0]])])
def test_every_plan_loads_a_checkpoint_of_another(first: str, then: str, tmp_path: Path) -> None:
    save_and_load("resnet", (first, then), tmp_path / "run")


@pytest.mark.parametrize("net", ["tied", "no-gradient"])
def test_special_parameters_are_saved_and_loaded(net: str, tmp_path: Path) -> None:
    save_and_load(net, ("mixed", "data-by-speed"), tmp_path, "sgd")


# ------------------------------------------------------------------------------------------- on another fleet, in the middle

EPOCHS, BATCH, SAMPLES = 3, 6, 22
STEPS = 12


def data_of(net: str) -> TensorDataset:
    ((x, y),) = Training(net, (SAMPLES,)).batches(nets.build(net))
    return TensorDataset(x, y)


def go_on(
    model: nn.Module, optimizer: Optimizer, folder: Path, until: int, *, net: str, data: TensorDataset, resume: bool
) -> list[float]:
    """Train up to step `until` and return the losses."""
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)
    keeper = Checkpointer(folder, model, optimizer, schedule=schedule, settings={"seed": 7, "net": net})
    loader = Loader(data, BATCH, model if isinstance(model, Distributed) else None, seed=7)
    start, losses = keeper.begin(resume), []
    for epoch in range(start.epoch, EPOCHS):
        loader.set_epoch(epoch, keeper.progress.batch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            keeper.after_step()
            if keeper.progress.step == until:
                keeper.at_end()
                return losses
        keeper.at_evaluation(0.5)
    raise AssertionError(f"the data ended before step {until}")


@pytest.mark.parametrize(("net", "optimizer"), [("resnet", "adam")])
def test_resume_mid_epoch_on_four_two_one_and_three_devices_follows_one_device(
    net: str, optimizer: str, tmp_path: Path
) -> None:
    whole, data = nets.build(net), data_of(net)
    alone = nets.build(net)
    lone = OPTIMIZERS[optimizer](alone.parameters())
    expected = go_on(alone, lone, tmp_path / "alone", STEPS, net=net, data=data, resume=False)
    losses: list[float] = []
    story = [(4, "mixed", 3), (2, "master", 6), (1, "plain", 7), (3, "data-by-speed", 9), (4, "hybrid", STEPS)]
    for number, (devices, plan, until) in enumerate(story):
        options = {"net": net, "data": data, "resume": number > 0}

        def on_one(until: int = until, options: Any = options) -> list[float]:
            model = nets.build(net, seed=5)  # its weights come from the checkpoint
            return go_on(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path / "run", until, **options)

        def on_each(group: Group, plan: str = plan, until: int = until, options: Any = options) -> list[float]:
            here = Distributed(whole, plan_for(group.devices, plan, net), group, data.tensors[0][:2])
            return go_on(here, OPTIMIZERS[optimizer](here.parameters()), tmp_path / "run", until, **options)

        with one_trace(net, torch.float64):
            rows = [on_one()] if devices == 1 else run_on_threads(devices, on_each, timeout_s=30)
        assert all(row == pytest.approx(rows[0], abs=EXACT) for row in rows)
        losses += rows[0]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=EXACT)
    last = nets.build(net, seed=9)
    its = OPTIMIZERS[optimizer](last.parameters())
    schedule = lr_scheduler.OneCycleLR(its, max_lr=0.05, total_steps=STEPS + 1)
    assert load_checkpoint(tmp_path / "run", last, its, schedule=schedule) == Progress(STEPS, 2, 4)
    assert apart(last.state_dict(), alone.state_dict()) < EXACT
    assert apart(state_of(its, last), state_of(lone, alone)) < EXACT
    assert its.param_groups[0]["lr"] == lone.param_groups[0]["lr"]


EVERY: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rate-as-a-tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_optimizer_state_is_restored(name: str, tmp_path: Path) -> None:
    batches = Training("two-conv", (6,) * 6).batches(nets.build("two-conv"))

    def steps(model: nn.Module, optimizer: Optimizer, start: int, stop: int) -> None:
        for x, y in batches[start:stop]:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    alone = nets.build("two-conv")
    steps(alone, EVERY[name](alone.parameters()), 0, 6)
    first, then = nets.build("two-conv"), nets.build("two-conv", seed=1)
    optimizer = EVERY[name](first.parameters())
    steps(first, optimizer, 0, 3)
    save_checkpoint(tmp_path, first, optimizer)
    others = EVERY[name](then.parameters())
    load_checkpoint(tmp_path, then, others)
    steps(then, others, 3, 6)
    assert all(torch.equal(value, alone.state_dict()[key]) for key, value in then.state_dict().items())


def test_loading_drops_later_optimizer_state(tmp_path: Path) -> None:
    model = nets.build("two-conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save_checkpoint(tmp_path, model, optimizer)
    ((x, y),) = Training("two-conv", (6,)).batches(model)
    loss_of(model(x), y).backward()
    optimizer.step()
    assert optimizer.state
    load_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("net", ["tied"])
def test_plain_pytorch_loads_the_averaged_weights(net: str, tmp_path: Path) -> None:
    model, data = nets.build(net), data_of(net)

    def work(group: Group) -> dict[str, Tensor]:
        here = Distributed(
            model, plan_for(3, "hybrid", net), group, torch.zeros(2, *nets.shape_of(model), dtype=torch.float64)
        )
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
        average = WeightAverage(optimizer, 0.5)
        loader = Loader(data, 6, here)
        for x, y in itertools.islice(loader, 3):
            optimizer.zero_grad()
            loss_of(here(x), y).backward()
            optimizer.step()
        save_checkpoint(tmp_path, here, optimizer, Progress(step=3))
        with average.as_weights():
            return dict(here.full_state_dict())

    with one_trace(net, torch.float64):
        expected = run_on_threads(3, work)[0]
    there = latest(tmp_path)
    assert there is not None
    averages, weights = (safetensors.torch.load_file(there / f"{name}.safetensors") for name in ("average", "model"))
    model.load_state_dict(averages)
    assert averages.keys() == weights.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(averages[key], value), key
    assert any(not torch.equal(averages[key], weights[key]) for key in weights)


def test_the_loss_scale_is_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(scaler: torch.amp.GradScaler, count: int) -> list[float]:
        scales = []
        for _ in range(count):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    first, then = (torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3) for scale in (8.0, 2.0))
    assert steps(first, 5) == [8.0, 8.0, 16.0, 16.0, 16.0]
    save_checkpoint(tmp_path, model, optimizer, scaler=first)
    load_checkpoint(tmp_path, model, optimizer, scaler=then)
    assert steps(then, 2) == [32.0, 32.0]


# ------------------------------------------------------------------------------------------------------------ the folder


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_last_three_and_the_best_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    for step, score in enumerate([0.1, 0.7, 0.7, 0.3, None, 0.2]):
        with torch.no_grad():
            model.bias.fill_(step)
        path = save_checkpoint(tmp_path, model, progress=Progress(100 * step), score=score)
        assert latest(tmp_path) == path
    kept = ["000002-step-100", "000004-step-300", "000005-step-400", "000006-step-500"]
    assert names(tmp_path) == [".lock", *kept, "best"]
    favourite = safetensors.torch.load_file(tmp_path / "best" / "model.safetensors")
    assert favourite["bias"].item() == 1.0
    assert load_checkpoint(tmp_path / "best", model) == Progress(100)


def test_saving_an_earlier_step_again_adds_a_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    for step in (100, 200, 100, 150):
        save_checkpoint(tmp_path, model, progress=Progress(step))
    assert [path.name for path in checkpoints(tmp_path)] == ["000002-step-200", "000003-step-100", "000004-step-150"]
    assert load_checkpoint(tmp_path, model) == Progress(150)


def test_checkpointer_saves_every_n_steps_and_after_epochs(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    keeper = Checkpointer(tmp_path / "run", model, optimizer, every=3, tell=said.append)
    assert keeper.begin(resume=False) == Progress()
    for _ in range(2):
        for _ in range(4):
            keeper.after_step()
        keeper.at_evaluation(float("nan"))
    keeper.at_end()
    saved = ["000001-step-3", "000002-step-4", "000003-step-6", "000004-step-8"]
    assert [path.name for path in checkpoints(tmp_path / "run")] == saved[1:]
    assert said == [f"saved {tmp_path / 'run' / name}" for name in saved]
    keeper.close()
    again = Checkpointer(tmp_path / "run", model, optimizer, every=3, tell=said.append)
    assert again.begin(resume=True) == Progress(8, 2, 0)
    assert said[-1] == f"continues from {tmp_path / 'run' / saved[-1]}: step 8, epoch 2"
    again.at_end()
    again.after_step()
    again.at_end()
    assert [path.name for path in checkpoints(tmp_path / "run")] == [*saved[2:], "000005-step-9"]


def test_resume_before_the_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    model, said = nn.Linear(2, 1), []
    for resume in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper = Checkpointer(tmp_path / "run", model, optimizer, tell=said.append)
        assert keeper.begin(resume) == Progress()
        keeper.close()
    assert said == [f"{tmp_path / 'run'} holds no checkpoint yet: the run begins at its beginning"]


def test_files_are_synced_before_the_folder_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    files = ["model.safetensors", "optimizer.safetensors", "checkpoint.json", ".draft"]
    assert done[:6] == [*files, ".draft -> 000001-step-0", tmp_path.name]


# ------------------------------------------------------------------------------------------------------------- the files


def test_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    tensors = {
        "half": torch.tensor([1.5, -2.0, 3.25], dtype=torch.float16),
        "brain": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        "ä/ö.": torch.randn(2, 3, dtype=torch.float64),
        "single": torch.randn(3, 1, 2),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.tensor([1, 255, 3], dtype=torch.uint8),
        "small": torch.tensor([-7], dtype=torch.int8),
        "short": torch.tensor([-700, 1], dtype=torch.int16),
        "whole": torch.tensor([1 << 30], dtype=torch.int32),
        "count": torch.tensor(1 << 40),
        "none": torch.empty(0, 4),
        "turned": torch.randn(4, 3).t(),
    }
    for extra in range(9):
        specs = file_order({key: Spec(tuple(t.shape), t.dtype) for key, t in tensors.items()})
        path = tmp_path / f"{extra}.safetensors"
        written = write_file(path, file_chunks(TensorStream(specs, (tensors[key] for key in specs))))
        found = safetensors.torch.load_file(path)
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert (found[key].shape, found[key].dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(found[key], tensor), key
        assert written.size_bytes == path.stat().st_size
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        for key, tensor in tensors.items():
            assert (8 + length + header[key]["data_offsets"][0]) % tensor.itemsize == 0, f"{key} is not aligned"
        tensors["x" * (extra + 1)] = torch.tensor([extra], dtype=torch.uint8)


def test_saving_holds_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    specs = {str(i): Spec((4,), torch.float32) for i in range(5)}
    alive: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[Tensor]:
        for _ in specs:
            assert all(each() is None for each in alive)
            fresh = torch.zeros(4)
            alive.append(weakref.ref(fresh))
            yield fresh
            del fresh

    write_file(tmp_path / "file", file_chunks(TensorStream(specs, tensors())))
    assert len(alive) == 5


def test_schedule_states_survive_json_with_their_types() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    milestones = lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    sequence = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), milestones], milestones=[2])
    for schedule in (milestones, sequence, lr_scheduler.ReduceLROnPlateau(optimizer)):
        state = schedule.state_dict()
        back = decode(json.loads(json.dumps(encode(state, "a schedule"), allow_nan=False)))
        assert back == state
        assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in state.items()}
