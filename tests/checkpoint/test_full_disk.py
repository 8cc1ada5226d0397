"""A run whose disk is full for a while, or to its end: it goes on, and what was saved before stays."""

import errno
import fcntl
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from convoy.checkpoint import Checkpointer, Progress, latest, load_checkpoint
from convoy.checkpoint.folder import Sink, best, checkpoints, read_checked
from convoy.checkpoint.lock import LOCK
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import Training, by_name, one_trace
from tests.support.threads import run_on_threads


class Disk:
    """Of device 0, where checkpoints are written: full at some of the attempts.

    Args:
        full: says of each attempt, counted from 0, whether it finds the disk full.
    """

    def __init__(self, patch: pytest.MonkeyPatch, full: Callable[[int], bool]) -> None:
        self.full, self.attempts, self._write = full, 0, Sink.write
        self._refuses = False
        patch.setattr(Sink, "write", lambda sink, data: self.write(sink, data))

    def write(self, sink: Sink, data: Any) -> None:
        if Path(sink.file.name).name == "model.safetensors" and not sink.size_bytes:
            self._refuses, self.attempts = self.full(self.attempts), self.attempts + 1
        if self._refuses and sink.size_bytes:  # the header fits
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(sink, data)


def on_three(folder: Path, work: Callable[[Checkpointer], Any]) -> list[tuple[Any, list[str]]]:
    """On three devices: what came of `work`, and the lines that were told."""
    whole, plan = nets.build("two-conv"), by_name("master", "two-conv", speeds=Speeds((2.0, 1.0, 1.0)))
    (x, _), *_ = Training("two-conv", (10,)).batches(whole)

    def device(group: Group) -> tuple[Any, list[str]]:
        told: list[str] = []
        here = Distributed(whole, plan, group, x[:2])
        keeper = Checkpointer(folder, here, torch.optim.SGD(here.parameters(), lr=0.1), every=1, tell=told.append)
        keeper.begin(resume=False)
        return work(keeper), told

    with one_trace("two-conv", torch.float64):
        return run_on_threads(3, device, timeout_s=20)


def steps_of(folder: Path) -> list[int]:
    return [read_checked(path).progress.step for path in checkpoints(folder)]


def test_training_goes_on_while_the_disk_of_one_device_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended on all devices, with the first checkpoint that could not be written."""
    disk = Disk(monkeypatch, lambda attempt: attempt in (1, 2))

    def work(keeper: Checkpointer) -> None:
        for _ in range(4):
            keeper.after_step()
        keeper.at_end()

    found = on_three(tmp_path / "run", work)
    assert disk.attempts == 4
    assert steps_of(tmp_path / "run") == [1, 4]
    told = found[0][1]
    assert [line.split()[0] for line in told] == ["saved", "WARNING:", "WARNING:", "saved"]
    assert f"cannot write the checkpoint of step 2 into {tmp_path / 'run'}: No space left on device" in told[1]
    bytes_there = sum(path.stat().st_size for path in checkpoints(tmp_path / "run")[0].glob("*.safetensors"))
    (needed,) = [int(word.replace(",", "")) for word, after in _pairs(told[1]) if after == "bytes,"]
    assert 0 < bytes_there - needed < 2000, "all but the headers"
    assert "are free there: make room there, or name another folder; " in told[1]
    assert "000001-step-1 is as it was. The training goes on, and tries again when the next one is due" in told[1]
    assert [each for _, each in found] == [told] * 3


def _pairs(line: str) -> list[tuple[str, str]]:
    words = line.split()
    return list(itertools.pairwise(words))


def test_the_last_checkpoint_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes after it. The score of its test is that of the first attempt."""
    monkeypatch.setattr("convoy.checkpoint.checkpointer.PAUSES_S", (0.01,) * 5)
    disk = Disk(monkeypatch, lambda attempt: 1 <= attempt < 5)

    def work(keeper: Checkpointer) -> None:
        keeper.at_evaluation(0.5)
        keeper.at_evaluation(0.7)
        keeper.at_end()

    found = on_three(tmp_path / "run", work)
    assert disk.attempts == 6
    assert best(tmp_path / "run") == latest(tmp_path / "run")
    assert read_checked(checkpoints(tmp_path / "run")[-1]).progress.epoch == 2
    assert found[0][1][2].endswith("The training is over: this is tried again for 0.05 s")
    assert len(found[0][1]) == 4


def test_a_later_state_has_no_score_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.checkpoint.checkpointer.PAUSES_S", ())
    Disk(monkeypatch, lambda attempt: attempt == 0)
    model = nn.Linear(2, 1)
    keeper = Checkpointer(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), tell=lambda _: None)
    keeper.begin(resume=False)
    keeper.at_evaluation(0.9)
    keeper.after_step()
    keeper.at_end()
    (saved,) = checkpoints(tmp_path)
    assert read_checked(saved).score is None


def test_a_run_whose_last_checkpoint_finds_no_room_ends_with_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.checkpoint.checkpointer.PAUSES_S", (0.01, 0.01))
    Disk(monkeypatch, lambda attempt: attempt > 0)

    def work(keeper: Checkpointer) -> str:
        keeper.after_step()
        keeper.after_step()
        with pytest.raises(InputError) as caught:
            keeper.at_end()
        return str(caught.value)

    found = on_three(tmp_path / "run", work)
    assert found[0][0].startswith(
        "the training is over, and its last state is not saved: cannot write the checkpoint of step 2"
    )
    assert [each for each, _ in found] == [found[0][0]] * 3
    assert steps_of(tmp_path / "run") == [1]
    assert load_checkpoint(tmp_path / "run", nets.build("two-conv")) == Progress(1, 0, 1)


def test_without_a_listener_it_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, lambda _: True)
    model = nn.Linear(2, 1)
    keeper = Checkpointer(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    keeper.begin(resume=False)
    with pytest.warns(UserWarning, match="no earlier checkpoint is there. The training goes on"):
        keeper.after_step()


def test_who_could_not_take_over_the_folder_does_so_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device 0 was stopped, and holds the folder; there was no room for a lock of the one that goes on. The next checkpoint
    found "another run"."""
    model, told = nn.Linear(2, 1), list[str]()
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = Checkpointer(tmp_path, model, optimizer, every=1, tell=told.append)
    with (tmp_path / LOCK).open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        stopped.write(json.dumps({"run": "this run"}))
        stopped.flush()
        keeper.run = "this run"
        full = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr("convoy.checkpoint.checkpointer.hold", lambda *_, **__: (_ for _ in ()).throw(full))
            keeper.go_back(Progress(3))
        assert told == [f"WARNING: {full}; tried again at the next checkpoint"]
        keeper.after_step()
        assert told[-1] == f"saved {tmp_path / '000001-step-4'}"
    keeper.close()
    assert not (tmp_path / LOCK).exists()
