"""A full disk ends no training, and earlier checkpoints remain."""

import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.checkpoint import Checkpointer, Progress, checkpoint, latest, load_checkpoint, save_checkpoint
from convoy.checkpoint.run_folder import Written, checkpoints, read_checked
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import Training, by_name, one_trace
from tests.support.threads import run_on_threads


class Disk:
    """The disk of device 0, full during some attempts to write a checkpoint.

    Args:
        room: returns, for each attempt counted from 0, the bytes that fit; None: all.
    """

    def __init__(self, patch: pytest.MonkeyPatch, room: Callable[[int], int | None]) -> None:
        self.room, self.attempts, self.left_bytes = room, 0, None
        self._write = checkpoint.write_file
        patch.setattr(checkpoint, "write_file", self.write)

    def write(self, path: Path, chunks: Iterable[Any]) -> Written:
        if path.name == "model.safetensors":
            self.left_bytes, self.attempts = self.room(self.attempts), self.attempts + 1
        return self._write(path, self._counted(chunks))

    def _counted(self, chunks: Iterable[Any]) -> Iterator[Any]:
        for chunk in chunks:
            if self.left_bytes is not None:
                self.left_bytes -= len(chunk)
                if self.left_bytes < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            yield chunk


def full_at(*attempts: int) -> Callable[[int], int | None]:
    return lambda attempt: 1000 if attempt in attempts else None


def on_three(folder: Path, work: Callable[[Checkpointer], Any]) -> list[tuple[Any, list[str]]]:
    """Run `work` on three devices; return the results and the printed lines."""
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


def test_training_continues_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, full_at(1, 2))

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
    assert "bytes: make room there, or name another folder. " in told[1]
    assert (
        "Earlier checkpoints are as they were. Training continues, and the next checkpoint is tried when due" in told[1]
    )
    assert [each for _, each in found] == [told] * 3


def test_the_last_checkpoint_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.checkpoint.checkpoint.PAUSES_S", (0.01,) * 5)
    disk = Disk(monkeypatch, full_at(1, 2, 3, 4))

    def work(keeper: Checkpointer) -> None:
        keeper.at_evaluation(0.5)
        keeper.at_evaluation(0.7)
        keeper.at_end()

    found = on_three(tmp_path / "run", work)
    assert disk.attempts == 6
    assert (tmp_path / "run" / "best").resolve() == latest(tmp_path / "run")
    assert read_checked(checkpoints(tmp_path / "run")[-1]).progress.epoch == 2
    assert found[0][1][2].endswith("The training is over: this is tried again for 0.05 s")
    assert len(found[0][1]) == 4


def test_full_disk_at_the_last_checkpoint_is_an_error_on_all_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.checkpoint.checkpoint.PAUSES_S", (0.01, 0.01))
    Disk(monkeypatch, full_at(1, 2, 3, 4))

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


@pytest.mark.parametrize("room", [0.0, 0.6])
def test_save_checkpoint_on_a_full_disk_leaves_the_last_one(
    room: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole_bytes = tmp_path / "run", list[int]()
    Disk(monkeypatch, lambda attempt: int(room * whole_bytes[0]) if attempt == 1 else None)

    def work(keeper: Checkpointer) -> str:
        model, optimizer = keeper.contents.model, keeper.contents.optimizer
        before = save_checkpoint(run, model, optimizer, Progress(1))
        whole_bytes.append(sum(path.stat().st_size for path in before.iterdir()))
        with pytest.raises(InputError) as caught:
            save_checkpoint(run, model, optimizer, Progress(2))
        assert load_checkpoint(run, model, optimizer) == Progress(1)
        assert save_checkpoint(run, model, optimizer, Progress(3)).name == "000002-step-3"
        return str(caught.value)

    said = [found for found, _ in on_three(run, work)]
    assert said == [said[0]] * 3
    assert f"cannot write the checkpoint of step 2 into {run}: No space left on device ({run}/.draft/" in said[0]
    assert said[0].endswith("make room there, or name another folder. Earlier checkpoints are as they were")
    assert not (run / ".draft").exists()
