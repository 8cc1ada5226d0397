"""Checkpoints that cannot be loaded or written: what is said, on which devices, and what is still there afterwards."""

import errno
import json
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
from convoy.checkpoint.folder import Sink
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import Training, by_name, loss_of, one_trace, part
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads


def net() -> nn.Module:
    return nets.build("two-conv")


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints of an ordinary net with momentum, a schedule and settings."""
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
    """What loading says; it must leave model and optimizer as they were."""
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
    "weights cut": ("model.safetensors", cut, r"has \d+ bytes, and was written with \d+"),
    "weights flipped": (
        "model.safetensors",
        flip,
        "is not the file that was written: its sha256 is [0-9a-f]{64}, not ",
    ),
    "weights gone": ("model.safetensors", Path.unlink, "cannot be read: No such file"),
    "state cut": ("optimizer.safetensors", cut, r"has \d+ bytes, and was written with \d+"),
    "foreign": ("checkpoint.json", lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\xff"), "it is not text"),
    "foreign JSON": ("checkpoint.json", lambda p: p.write_text('{"name": "x"}'), "format: Field required"),
    "not JSON": ("checkpoint.json", lambda p: p.write_text("hello"), "or was truncated: the file: Invalid JSON"),
    "text cut": ("checkpoint.json", cut, "or was truncated: the file: Invalid JSON"),
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
    "another place": (
        "checkpoint.json",
        lambda p: p.write_text(p.read_text().replace('"optimizer.safetensors"', '"../../../etc/passwd"')),
        "is not the file that was written",
    ),
    "no checksum of its own": (
        "checkpoint.json",
        lambda p: p.write_text(json.dumps(json.loads(p.read_text()) | {"own_sha256": ""})),
        "its own checksum does not fit",
    ),
    "newer": (
        "checkpoint.json",
        newer,
        r"has format 2, written by Convoy 9\.\d.*, which reads formats up to 1: update",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_names_the_file_and_the_one_before_it(damage: str, run: Path) -> None:
    """And what is said to do about it can be done."""
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


def test_where_no_earlier_one_is_whole_either(run: Path) -> None:
    for each in run.iterdir():
        cut(each / "model.safetensors")
    assert refusal(run).endswith(
        "no checkpoint before it is whole: bring the file back from a copy, or start a new run in another folder"
    )


def test_missing_ok_loads_nothing_where_the_run_has_no_checkpoint(run: Path, tmp_path: Path) -> None:
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert load_checkpoint(tmp_path / "new", model, missing_ok=True) == Progress()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert load_checkpoint(run, model, missing_ok=True) == Progress(2)
    cut(run / "000002-step-2" / "model.safetensors")
    with pytest.raises(InputError, match=r"has \d+ bytes"):
        load_checkpoint(run, model, missing_ok=True)


def test_a_folder_that_is_missing_or_empty(tmp_path: Path) -> None:
    assert f"the folder {tmp_path / 'rum'} does not exist" in refusal(tmp_path / "rum")
    assert f"{tmp_path} holds no checkpoint, a folder such as 000001-step-100" in refusal(tmp_path)


# ------------------------------------------------------------------------------------------------- not what was saved


def test_another_net(run: Path) -> None:
    """The message says which tensors are missing, too many or different."""

    class Wider(nets.TwoConv):
        def __init__(self) -> None:
            super().__init__(first=6)
            self.extra = nn.Linear(2, 2)
            del self.fc

    message = refusal(run, Wider().double())
    assert f"the checkpoint {run / '000002-step-2'} is of another net" in message
    assert "it lacks extra.weight, extra.bias; it has, and this net has not, fc.bias, fc.weight; " in message
    assert "conv1.weight is float64 (5, 3, 5, 5) there and float64 (6, 3, 5, 5) here, " in message
    assert message.endswith("build the net as it was when it was saved, with the same dtype")


def test_another_dtype(run: Path) -> None:
    message = refusal(run, nets.build("two-conv", dtype=torch.float32))
    assert "conv1.weight is float64 (5, 3, 5, 5) there and float32 (5, 3, 5, 5) here" in message
    assert "and 3 more; " in message


def test_another_optimizer_or_none(run: Path, tmp_path: Path) -> None:
    assert "was saved with SGD, this run has Adam: use SGD" in refusal(
        run, make=lambda m: torch.optim.Adam(m.parameters())
    )

    def two_groups(model: nn.Module) -> Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)

    assert (
        "other groups of parameters: conv1.bias in group 0 there, where SGD has conv1.bias in group 1 here"
        in refusal(run, make=two_groups)
    )
    save_checkpoint(tmp_path / "weights", net())
    assert "was saved without an optimizer: load it without one" in refusal(tmp_path / "weights")
    strange = sgd(nn.Linear(2, 2))
    assert "SGD works on 2 parameters that this model does not have" in refusal(run, make=lambda _: strange)


def test_another_schedule_or_none(run: Path) -> None:
    assert "was saved with StepLR, this run has no schedule: give the schedule that the run began with" in refusal(
        run, schedule=None
    )
    model = nets.build("two-conv", seed=1)
    optimizer = sgd(model)
    other = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(InputError, match="was saved with StepLR, this run has ExponentialLR"):
        load_checkpoint(run, model, optimizer, schedule=other)


def test_another_scaler_or_none(run: Path, tmp_path: Path) -> None:
    assert "was saved with no scaler, this run has GradScaler: give the scaler that" in refusal(
        run, scaler=torch.amp.GradScaler("cpu")
    )
    model = net()
    save_checkpoint(tmp_path / "scaled", model, sgd(model), scaler=torch.amp.GradScaler("cpu"))
    assert "was saved with GradScaler, this run has no scaler" in refusal(tmp_path / "scaled", schedule=None)


def test_other_settings(run: Path) -> None:
    """A run that goes on with other data would not be the same run; the weights can still be had."""
    message = refusal(run, settings={"seed": 4, "batch": [6]})
    assert "had other settings: seed was 3 and is 4, batch was None and is [6]; give the same" in message
    assert load_checkpoint(run, net(), settings={"seed": 3}) == Progress(2)


def test_a_folder_of_another_run(run: Path) -> None:
    """Forgetting --resume does not mix two runs."""
    model = net()
    with pytest.raises(
        InputError, match=r"holds the checkpoints of another run, the latest is 000002-step-2: resume it"
    ):
        Checkpointer(run, model, sgd(model)).begin(resume=False)
    with pytest.raises(InputError, match=r"there is nothing to resume: the folder .* does not exist"):
        Checkpointer(run / "rum", model, sgd(model)).begin(resume=True)
    with pytest.raises(InputError, match=r"cannot make the folder .*: Not a directory; name one that you may write"):
        Checkpointer(run / "best.txt" / "x", model, sgd(model)).begin(resume=touch(run / "best.txt"))
    with pytest.raises(InputError, match="a checkpoint every 0 steps: give 1 or more"):
        Checkpointer(run, model, sgd(model), every=0)
    with pytest.raises(InputError, match="keep=0: a run keeps its last checkpoint"):
        save_checkpoint(run, model, keep=0)


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


def test_what_no_file_can_hold(tmp_path: Path) -> None:
    """Refused before anything is written."""
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
        "the optimizer remembers .* only tensors, numbers and texts": lambda: save_checkpoint(tmp_path, model, lbfgs),
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


def test_all_devices_say_the_same_when_device_0_finds_a_damaged_file(tmp_path: Path) -> None:
    """And go on together: from the one before."""

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


@pytest.mark.parametrize("room", [0.0, 0.05, 0.4, 0.6, 0.99])
def test_a_full_disk(room: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the files still fits: all devices say so, the last checkpoint is whole, and there is no rubbish."""
    write, left_bytes = Sink.write, [0.0]

    def until_full(sink: Sink, data: Any) -> None:
        left_bytes[0] -= len(data)
        if left_bytes[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(sink, data)

    def work(here: Distributed, optimizer: Optimizer, group: Group) -> str:
        before = save_checkpoint(tmp_path, here, optimizer, Progress(1))
        weights = here.full_state_dict()
        if group.device == 0:
            left_bytes[0] = room * sum(path.stat().st_size for path in before.iterdir())
            monkeypatch.setattr(Sink, "write", until_full)
        with pytest.raises(InputError) as caught:
            save_checkpoint(tmp_path, here, optimizer, Progress(2))
        if group.device == 0:
            assert [path.name for path in tmp_path.iterdir()] == ["000001-step-1"]
            monkeypatch.setattr(Sink, "write", write)
        assert load_checkpoint(tmp_path, here, optimizer) == Progress(1)
        assert all(torch.equal(value, weights[key]) for key, value in here.full_state_dict().items())
        assert save_checkpoint(tmp_path, here, optimizer, Progress(3)).name == "000002-step-3"
        return str(caught.value).replace(str(before), "BEFORE")

    said = on_three(work)
    assert said == [said[0]] * 3
    assert (
        f"cannot write the checkpoint of step 2 into {tmp_path}: No space left on device ({tmp_path}/.draft/" in said[0]
    )
    assert said[0].endswith("make room there, or name another folder; BEFORE is as it was")


def fill_up(_device: int, folder: str, limit_bytes: int) -> str:
    """Runs in a process of its own, which may write only small files."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model = net()
    save_checkpoint(folder, model, progress=Progress(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        save_checkpoint(folder, model, progress=Progress(2))
    except InputError as error:
        return str(error)
    return "written"


def test_a_file_that_the_system_refuses_to_let_grow(tmp_path: Path) -> None:
    """No simulation: the kernel says no in the middle of the weights."""
    (said,) = on_processes(1, "tests.checkpoint.test_checkpoint_refusals:fill_up", str(tmp_path), 2000, joined=False)
    assert f"File too large ({tmp_path}/.draft/model.safetensors)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-1"]
    assert load_checkpoint(tmp_path, net()) == Progress(1)


def test_devices_that_are_at_different_steps(tmp_path: Path) -> None:
    def work(here: Distributed, optimizer: Optimizer, group: Group) -> None:
        with pytest.raises(MismatchError, match="device 1 saves another checkpoint than device 0"):
            save_checkpoint(tmp_path, here, optimizer, Progress(step=5 + (group.device == 1)))

    on_three(work)
    assert latest(tmp_path) is None


def test_the_file_says_what_wrote_it(run: Path) -> None:
    """For people: plain JSON, with the versions, where the run was, and the optimizer's settings in the open."""
    found = json.loads((run / "000002-step-2" / "checkpoint.json").read_text())
    assert (found["format"], found["torch"]) == (1, torch.__version__)
    assert found["progress"] == {"step": 2, "epoch": 0, "batch": 0}
    assert found["optimizer"]["groups"][0]["settings"]["momentum"] == 0.9
    assert found["optimizer"]["groups"][0]["settings"]["lr"] == pytest.approx(0.01)
    assert found["settings"] == {"seed": 3}
