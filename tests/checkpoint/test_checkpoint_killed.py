"""Runs killed between any two file operations, at any moment, on any device and fleet."""

import json
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it: once here, not once in every process
from torch import nn
from torch.utils.data import TensorDataset

from convoy.checkpoint import Checkpointer, Progress, latest, load_checkpoint, run_folder, save_checkpoint
from convoy.checkpoint.run_folder import LOCK, checkpoints
from convoy.comm.group import Group
from convoy.errors import DeviceLostError
from convoy.plan.presets import Speeds
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train import loop
from convoy.train.loader import Loader
from tests.support import nets
from tests.support.one_device import EXACT, OPTIMIZERS, Training, by_name, loss_of
from tests.support.processes import on_processes

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink")


def small(fill: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a net whose weights and momentum all have one value."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, fill)
    return model, optimizer


def save_and_tidy(folder: Path, step: int, score: float) -> None:
    run_folder.KEEP = 1  # so that this removes an earlier one
    save_checkpoint(folder, *small(step), Progress(step), score=score)


class Ambush:
    """A hook that kills the process before one file operation in a folder (0: none)."""

    def __init__(self, folder: str, strike_at: int) -> None:
        self.folder, self.left, self.seen = folder, strike_at, 0
        self._sync = os.fsync
        sys.addaudithook(self._hear)
        os.fsync = self._synced  # which the interpreter does not report

    def _hear(self, event: str, arguments: Any) -> None:
        if event in WATCHED and str(arguments[0]).startswith(self.folder):
            self._count()

    def _synced(self, handle: int) -> None:
        self._count()
        self._sync(handle)

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self.left:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_in_an_ambush(folder: Path, strike_at: int) -> Any:
    """Save in a forked process, since its audit hook stays. Return the count of operations, or None if it died."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        ambush = Ambush(str(folder), strike_at)
        try:
            save_and_tidy(folder, 3, 0.9)
        finally:
            os.write(writes, json.dumps(ambush.seen).encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def save_two(folder: Path) -> None:
    """Save a best and a last checkpoint."""
    save_checkpoint(folder, *small(1), Progress(1), score=0.5)
    save_checkpoint(folder, *small(2), Progress(2), score=0.1)


def whole(folder: Path, among: tuple[int, ...]) -> int:
    """Return the step of the latest checkpoint after checking that it loads and matches that step."""
    model, optimizer = small(-1)
    progress = load_checkpoint(folder, model, optimizer)
    values = [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert len(values) == 4
    assert all((value == progress.step).all() for value in values)
    assert progress.step in among
    return progress.step


def test_the_last_checkpoint_survives_a_kill_at_any_file_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "KEEP", run_folder.KEEP)
    found = set()
    save_two(tmp_path / "calm")
    operations = save_in_an_ambush(tmp_path / "calm", 0)
    assert operations > 20
    for strike_at in range(1, operations + 1):
        folder = tmp_path / str(strike_at)
        save_two(folder)
        assert save_in_an_ambush(folder, strike_at) is None, f"operation {strike_at} of {operations}"
        found.add(whole(folder, (2, 3)))
        assert (folder / "best").resolve() in checkpoints(folder)
        assert all(load_checkpoint(path, *small(-1)).step for path in checkpoints(folder))
        assert load_checkpoint(folder / "best", small(-1)[0]) in (Progress(1), Progress(3))
        save_and_tidy(folder, 4, 0.0)
        assert whole(folder, (4,)) == 4
        names = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
        assert names[-1] == "best"
        assert names[0].endswith(("-step-1", "-step-3"))
        assert len(names) == 3
    assert found == {2, 3}


# ------------------------------------------------------------------------------------------------------- a whole story

NET, SEED, EPOCHS, BATCH, SAMPLES = "resnet", 5, 3, 6, 40
STEPS = EPOCHS * 7
FLEETS = [("hybrid", (2.0, 0.0, 5.0)), ("master", (1.0, 3.0))]


def data() -> TensorDataset:
    ((x, y),) = Training(NET, (SAMPLES,)).batches(nets.build(NET))
    return TensorDataset(x, y)


def go_on(model: nn.Module, folder: str, resume: bool, losses: dict[int, float], began: Any = None) -> None:
    """Train to the end, storing each step's loss in `losses` at once."""
    optimizer = OPTIMIZERS["adam"](model.parameters())
    checkpointer = Checkpointer(folder, model, optimizer, every=1, settings={"seed": SEED})
    loader = Loader(data(), BATCH, model if isinstance(model, Distributed) else None, seed=SEED)
    start = checkpointer.begin(resume)
    if began is not None:
        began()
    for epoch in range(start.epoch, EPOCHS):
        loader.set_epoch(epoch, checkpointer.progress.batch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses[checkpointer.progress.step] = loss.item()
            checkpointer.after_step()
        checkpointer.at_evaluation(float(epoch))


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


def test_a_run_killed_repeatedly_and_resumed_on_other_fleets_follows_one_device(tmp_path: Path) -> None:
    expected: dict[int, float] = {}
    alone = nets.build(NET)
    go_on(alone, str(tmp_path / "alone"), resume=False, losses=expected)
    assert sorted(expected) == list(range(STEPS))
    draw, folder, deaths = random.Random(3), tmp_path / "run", 0
    folder.mkdir()
    for attempt, (plan, speeds) in enumerate(FLEETS[:2]):
        victim = draw.randrange(len(speeds)) if attempt == 0 else -1
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


def test_a_step_is_logged_before_it_is_saved(tmp_path: Path) -> None:
    class SavedAndKilled(Checkpointer):
        def after_step(self) -> None:
            super().after_step()
            if self.progress.step == 3:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(10, 4), torch.randint(0, 2, (10,)))
    loaders = Loader(samples, 2), Loader(samples, 2, shuffle=False)

    def run(checkpointer: Checkpointer, resume: bool) -> None:
        with RunLog(tmp_path / "log.jsonl", checkpointer.begin(resume).step) as log:
            loop.fit(loop.Training(model, optimizer), *loaders, 1, log, checkpointer=checkpointer)

    with pytest.raises(KeyboardInterrupt):
        run(SavedAndKilled(tmp_path / "run", model, optimizer, every=1), resume=False)
    run(Checkpointer(tmp_path / "run", model, optimizer), resume=True)
    rows = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if row["what"] == "step"] == list(range(5))
