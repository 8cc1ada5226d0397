"""Checkpoints that cannot be loaded or written: the error on every device, and unchanged state."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from convoy.checkpoint import Checkpointer, Progress, latest, load_checkpoint, save_checkpoint
from convoy.checkpoint.run_folder import checkpoints
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import Training, by_name, loss_of, one_trace, part
from tests.support.threads import run_on_threads


def net() -> nn.Module:
    return nets.build("two-conv")


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save two checkpoints of an ordinary net with momentum, a schedule and settings."""
    model = net()
    optimizer = sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 2)
    for step, (x, y) in enumerate(Training("two-conv", (6, 6)).batches(model)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()
        save_checkpoint(tmp_path / "run", model, optimizer, Progress(step + 1), schedule=schedule, settings={"seed": 3})
    return tmp_path / "run"


def refusal(run: Path, model: nn.Module | None = None, make: Any = sgd, **options: Any) -> str:
    """Return the loading error after checking that model and optimizer are unchanged."""
    model = model or nets.build("two-conv", seed=1)
    optimizer = make(model) if make is not None else None
    if optimizer is not None and "schedule" not in options:
        options["schedule"] = lr_scheduler.StepLR(optimizer, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_checkpoint(run, model, optimizer, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert optimizer is None or not optimizer.state
    return str(caught.value)


# -------------------------------------------------------------------------------------------------------- damaged files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def newer(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2').replace('"convoy": "', '"convoy": "9.'))


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "weights cut": ("model.safetensors", cut, r"is not the file that was written: it has \d+ bytes "),
    "weights flipped": (
        "model.safetensors",
        flip,
        "is not the file that was written: .* with the sha256 [0-9a-f]{64}, not ",
    ),
    "weights gone": ("model.safetensors", Path.unlink, "cannot be read: No such file"),
    "foreign": ("checkpoint.json", lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\xff"), "it is not text"),
    "foreign JSON": ("checkpoint.json", lambda p: p.write_text('{"name": "x"}'), "progress: Field required"),
    "text cut": ("checkpoint.json", cut, "or was damaged: the file: Invalid JSON"),
    "another type": (
        "checkpoint.json",
        lambda p: p.write_text(p.read_text().replace('"step": 2', '"step": -2')),
        "progress.step: Input should be greater than or equal to 0",
    ),
    "another digit": (
        "checkpoint.json",
        lambda p: p.write_text(p.read_text().replace('"momentum": 0.9', '"momentum": 0.8')),
        "is not the file that was written: its own checksum does not fit",
    ),
    "newer": (
        "checkpoint.json",
        newer,
        r"has format 2, written by Convoy 9\.\d.*, which reads formats up to 1: update",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_naming_an_intact_one(damage: str, run: Path) -> None:
    file, spoil, told = DAMAGES[damage]
    broken, whole = run / "000002-step-2", run / "000001-step-1"
    spoil(broken / file)
    message = refusal(run)
    assert re.search(f"^{re.escape(str(broken / file))} .*{told}", message)
    assert (
        f"the checkpoint before it, {whole}, is whole: to go on from there give that folder (--checkpoint {whole} "
        "--resume); this one stays" in message
    )
    model = net()
    optimizer = sgd(model)
    assert load_checkpoint(whole, model, optimizer, schedule=lr_scheduler.StepLR(optimizer, 2)) == Progress(1)
    shutil.rmtree(broken)
    assert load_checkpoint(run, model) == Progress(1)


def test_refusal_says_when_no_intact_checkpoint_is_left(run: Path) -> None:
    for each in checkpoints(run):
        cut(each / "model.safetensors")
    assert refusal(run).endswith(
        "no checkpoint before it is whole: bring the file back from a copy, or start a new run in another folder"
    )


def test_missing_ok_changes_nothing_without_a_checkpoint(run: Path, tmp_path: Path) -> None:
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert load_checkpoint(tmp_path / "new", model, missing_ok=True) == Progress()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert load_checkpoint(run, model, missing_ok=True) == Progress(2)
    cut(run / "000002-step-2" / "model.safetensors")
    with pytest.raises(InputError, match=r"has \d+ bytes"):
        load_checkpoint(run, model, missing_ok=True)


def test_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path / 'rum'} holds no checkpoint, a folder such as" in refusal(tmp_path / "rum")
    assert f"{tmp_path} holds no checkpoint, a folder such as 000001-step-100" in refusal(tmp_path)


# ------------------------------------------------------------------------------------------------- not what was saved


def test_another_net_or_dtype_is_refused(run: Path) -> None:
    class Wider(nets.TwoConv):
        def __init__(self) -> None:
            super().__init__(first=6)
            self.extra = nn.Linear(2, 2)
            del self.fc

    message = refusal(run, Wider().double())
    assert f"the checkpoint {run / '000002-step-2'} is of another run: " in message
    assert "conv1.weight is float64 (5, 3, 5, 5) there and float64 (6, 3, 5, 5) here" in message
    assert message.endswith("and 4 more; build the net as it was when it was saved, with the same dtype")
    message = refusal(run, nets.build("two-conv", dtype=torch.float32))
    assert "conv1.weight is float64 (5, 3, 5, 5) there and float32 (5, 3, 5, 5) here" in message


def test_another_optimizer_is_refused(run: Path, tmp_path: Path) -> None:
    message = refusal(run, make=lambda m: torch.optim.Adam(m.parameters()))
    assert (
        "the optimizer is SGD there and Adam here; give what the run began with, or load the weights alone" in message
    )

    def two_groups(model: nn.Module) -> Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)

    assert "conv1.bias is in group 0 there and in group 1 here" in refusal(run, make=two_groups)
    save_checkpoint(tmp_path / "weights", net())
    assert "the optimizer is missing there and SGD here" in refusal(tmp_path / "weights", schedule=None)
    strange = sgd(nn.Linear(2, 2))
    assert "SGD works on 2 parameters that this model does not have" in refusal(run, make=lambda _: strange)


def test_another_schedule_or_scaler_is_refused(run: Path) -> None:
    assert "the schedule is StepLR there and missing here" in refusal(run, schedule=None)
    model = nets.build("two-conv", seed=1)
    other = lr_scheduler.ExponentialLR(sgd(model), 0.9)
    assert "the schedule is StepLR there and ExponentialLR here" in refusal(run, schedule=other)
    scaler = torch.amp.GradScaler("cpu")
    assert "the scaler is missing there and GradScaler here" in refusal(run, scaler=scaler)


def test_other_settings_are_refused(run: Path) -> None:
    message = refusal(run, settings={"seed": 4, "batch": [6]})
    assert "seed is 3 there and 4 here, batch is None there and [6] here; give the same settings" in message
    assert load_checkpoint(run, net(), settings={"seed": 3}) == Progress(2)


def test_a_folder_with_other_contents_is_refused(run: Path) -> None:
    model = net()
    with pytest.raises(InputError, match=r"holds the checkpoint 000002-step-2 of another run: resume it"):
        Checkpointer(run, model, sgd(model)).begin(resume=False)
    with pytest.raises(InputError, match=r"cannot make or lock the folder .*: Not a directory; .* that you may write"):
        Checkpointer(run / "best.txt" / "x", model, sgd(model)).begin(resume=touch(run / "best.txt"))
    with pytest.raises(InputError, match="a checkpoint every 0 steps: give 1 or more"):
        Checkpointer(run, model, sgd(model), every=0)


def touch(path: Path) -> bool:
    path.touch()
    return False


# ------------------------------------------------------------------------------------------------ what cannot be saved


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def get_extra_state(self) -> Any:
        return {"name": "x"}


def test_unserialisable_contents_are_refused(tmp_path: Path) -> None:
    model = net()
    x, y = Training("two-conv", (6,)).batches(model)[0]
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    lbfgs.step(closure)
    own = sgd(model)
    own.param_groups[0]["hook"] = print
    table = {"mean": torch.zeros(20_000)}
    for word, refused in {
        "only tensors, numbers and strings can be moved or saved": lambda: save_checkpoint(tmp_path, model, lbfgs),
        "a parameter group of SGD holds a builtin_function": lambda: save_checkpoint(tmp_path, model, own),
        "settings holds a Tensor of 20000 numbers": lambda: save_checkpoint(tmp_path, model, settings=table),
        "state_dict.. has a dict under '_extra_state'": lambda: save_checkpoint(tmp_path, Named()),
        "'weight' is complex64": lambda: save_checkpoint(tmp_path, nn.Linear(2, 1, dtype=torch.complex64)),
    }.items():
        with pytest.raises(InputError, match=word):
            refused()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- on a fleet


def on_three(work: Callable[[Distributed, Optimizer, Group], Any]) -> list[Any]:
    whole, plan = net(), by_name("master", "two-conv", speeds=Speeds((2.0, 1.0, 1.0)))
    (x, y), *_ = Training("two-conv", (10,)).batches(whole)

    def device(group: Group) -> Any:
        here = Distributed(whole, plan, group, x[:2])
        optimizer = sgd(here)
        loss_of(here(part(here, x), batch=10), y).backward()
        optimizer.step()
        return work(here, optimizer, group)

    with one_trace("two-conv", torch.float64):
        return run_on_threads(3, device, timeout_s=20)


def test_all_devices_raise_the_error_of_device_0(tmp_path: Path) -> None:
    def work(here: Distributed, optimizer: Optimizer, group: Group) -> str:
        save_checkpoint(tmp_path, here, optimizer, Progress(1))
        broken = save_checkpoint(tmp_path, here, optimizer, Progress(2))
        if group.device == 0:
            cut(broken / "model.safetensors")
        with pytest.raises(InputError) as caught:
            load_checkpoint(tmp_path, here, optimizer)
        assert load_checkpoint(tmp_path / "000001-step-1", here, optimizer) == Progress(1)
        return str(caught.value)

    said = on_three(work)
    assert said[0].startswith(str(tmp_path / "000002-step-2" / "model.safetensors"))
    assert said == [said[0]] * 3


def test_devices_at_different_steps_are_refused(tmp_path: Path) -> None:
    def work(here: Distributed, optimizer: Optimizer, group: Group) -> None:
        with pytest.raises(MismatchError, match="device 1 saves another checkpoint than device 0"):
            save_checkpoint(tmp_path, here, optimizer, Progress(step=5 + (group.device == 1)))

    on_three(work)
    assert latest(tmp_path) is None
