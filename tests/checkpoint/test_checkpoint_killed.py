"""Runs that are killed: between any two operations on files, at any moment, with any device, on any fleet."""

import errno
import itertools
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it: once here, not once in every process
from torch import nn
from torch.utils.data import TensorDataset

from convoy.checkpoint import Checkpointer, Progress, latest, load_checkpoint, save_checkpoint
from convoy.checkpoint.folder import checkpoints
from convoy.checkpoint.lock import LOCK
from convoy.comm.group import Group
from convoy.errors import DeviceLostError, InputError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from convoy.train.loader import Loader
from tests.support import nets
from tests.support.one_device import EXACT, OPTIMIZERS, Training, by_name, loss_of
from tests.support.processes import on_processes

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink")


def small(fill: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A net whose weights and momentum all have one value."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, fill)
    return model, optimizer


def save(folder: Path, step: int, score: float) -> None:
    save_checkpoint(folder, *small(step), Progress(step), score=score, keep=1)


class Ambush:
    """Waits for the operations on files in a folder, and does something just before one of them.

    Args:
        strike: None only counts.
    """

    def __init__(self, folder: str, strike_at: int, strike: Any) -> None:
        self.folder, self.left, self.strike, self.armed = folder, strike_at, strike, True
        self.seen = 0
        self._sync = os.fsync
        sys.addaudithook(self._hear)
        os.fsync = self._synced  # which the interpreter does not report

    def _hear(self, event: str, arguments: Any) -> None:
        if self.armed and event in WATCHED and str(arguments[0]).startswith(self.folder):
            self._count()

    def _synced(self, handle: int) -> None:
        if self.armed:
            self._count()
        self._sync(handle)

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self.left and self.strike is not None:
            self.strike()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def save_in_an_ambush(_device: int, folder: str, strike_at: int, kill: bool) -> Any:
    """Runs in a process of its own: a hook for what the interpreter does cannot be taken off again."""
    ambush = Ambush(folder, strike_at, die if kill else fail)
    try:
        save(Path(folder), 3, 0.9)
    except InputError as error:
        return str(error)
    return ambush.seen


def three_saved(folder: Path) -> None:
    """A best one, a last one, and another one that the next saving removes."""
    save_checkpoint(folder, *small(1), Progress(1), score=0.5, keep=3)
    save_checkpoint(folder, *small(2), Progress(2), score=0.1, keep=3)


def whole(folder: Path, among: tuple[int, ...]) -> int:
    """The step of the latest checkpoint, which must be loadable, and hold what belongs to that step."""
    model, optimizer = small(-1)
    progress = load_checkpoint(folder, model, optimizer)
    values = [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert len(values) == 4
    assert all((value == progress.step).all() for value in values)
    assert progress.step in among
    return progress.step


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "failing"])
def test_before_every_operation_on_files(kill: bool, tmp_path: Path) -> None:
    """Killed there, or refused that one by the system: the last checkpoint is whole, and the next saving clears up."""
    target, found = "tests.checkpoint.test_checkpoint_killed:save_in_an_ambush", set()
    three_saved(tmp_path / "calm")
    (operations,) = on_processes(1, target, str(tmp_path / "calm"), 0, kill, joined=False)
    assert operations > 20
    for strike_at in range(1, operations + 1):
        folder = tmp_path / str(strike_at)
        three_saved(folder)
        (told,) = on_processes(1, target, str(folder), strike_at, kill, joined=False)
        assert (told is None) == kill, f"operation {strike_at} of {operations}: {told}"
        found.add(whole(folder, (2, 3)))
        assert (folder / "best").resolve() in checkpoints(folder)
        assert all(load_checkpoint(path, *small(-1)).step for path in checkpoints(folder))
        assert load_checkpoint(folder / "best", small(-1)[0]) in (Progress(1), Progress(3))
        save(folder, 4, 0.0)
        assert whole(folder, (4,)) == 4
        names = sorted(path.name for path in folder.iterdir())
        assert names[-1] == "best"
        assert names[0].endswith(("-step-1", "-step-3"))
        assert len(names) == 3
    assert found == {2, 3}


# ------------------------------------------------------------------------------------------------------- a whole story

NET, SEED, EPOCHS, BATCH, SAMPLES = "resnet", 5, 3, 6, 40
STEPS = EPOCHS * 7
FLEETS = [("hybrid", (2.0, 0.0, 5.0)), ("master", (1.0, 3.0)), ("data-by-speed", (1.0,)), ("model", (3.0, 1.0, 1.0))]


def data() -> TensorDataset:
    ((x, y),) = Training(NET, (SAMPLES,)).batches(nets.build(NET))
    return TensorDataset(x, y)


def go_on(model: nn.Module, folder: str, resume: bool, losses: dict[int, float], began: Any = None) -> None:
    """Train to the end; `losses` has each step's as soon as it is known."""
    optimizer = OPTIMIZERS["adam"](model.parameters())
    keeper = Checkpointer(folder, model, optimizer, every=1, settings={"seed": SEED})
    loader = Loader(data(), BATCH, model if isinstance(model, Distributed) else None, seed=SEED)
    start = keeper.begin(resume)
    if began is not None:
        began()
    for epoch in range(start.epoch, EPOCHS):
        loader.set_epoch(epoch, keeper.progress.batch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses[keeper.progress.step] = loss.item()
            keeper.after_step()
        keeper.at_evaluation(float(epoch))


def train_until_killed(
    group: Group, folder: str, plan: str, speeds: list[float], victim: int, kill_after_s: float
) -> dict[int, float]:
    """Runs on every device. A timer kills the victim, wherever it is by then; the others find out, and tell what they saw."""
    fleet = by_name(plan, NET, speeds=Speeds(tuple(speeds)))
    here = Distributed(nets.build(NET), fleet, group, data().tensors[0][:2])
    losses: dict[int, float] = {}

    def began() -> None:
        if group.device == victim:
            threading.Timer(kill_after_s, die).start()

    try:
        go_on(here, folder, resume=True, losses=losses, began=began)
    except DeviceLostError as error:
        if error.device != victim:
            raise
    return losses


def test_killed_again_and_again_and_resumed_on_another_fleet_each_time(tmp_path: Path) -> None:
    """Device 0, which writes, or any other; with checkpoints after every step most deaths come while one is written."""
    expected: dict[int, float] = {}
    alone = nets.build(NET)
    go_on(alone, str(tmp_path / "alone"), resume=False, losses=expected)
    assert sorted(expected) == list(range(STEPS))
    draw, folder, deaths = random.Random(3), tmp_path / "run", 0
    folder.mkdir()
    for attempt, (plan, speeds) in enumerate(itertools.islice(itertools.cycle(FLEETS), 4)):
        victim = draw.randrange(len(speeds)) if attempt < 3 else -1
        rows = on_processes(
            len(speeds), "tests.checkpoint.test_checkpoint_killed:train_until_killed", str(folder), plan, speeds, victim,
            draw.uniform(0.1, 0.5),
        )  # fmt: skip
        deaths += None in rows
        for row in rows:
            found = {int(step): loss for step, loss in (row or {}).items()}
            assert found == pytest.approx({step: expected[step] for step in found}, abs=EXACT)
        assert all(loadable(path) for path in checkpoints(folder))
    assert deaths >= 1
    last = nets.build(NET, seed=1)
    optimizer = OPTIMIZERS["adam"](last.parameters())
    assert load_checkpoint(folder, last, optimizer, settings={"seed": SEED}) == Progress(STEPS, EPOCHS, 0)
    for key, value in alone.state_dict().items():
        assert torch.allclose(last.state_dict()[key].double(), value.double(), rtol=0, atol=EXACT), key
    assert (folder / "best").resolve() == latest(folder)
    # A process that was killed leaves its lock file, which locks nothing; nobody takes it where the training was done before.
    assert not [path for path in folder.glob(".*") if path.name != LOCK]


def loadable(path: Path) -> bool:
    return load_checkpoint(path, nets.build(NET)).step > 0
