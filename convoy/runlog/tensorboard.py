"""Loss, accuracy, learning rate and samples/s for TensorBoard. Its writer is imported only when it is wanted."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from convoy.errors import InputError

if TYPE_CHECKING:  # settings are checked here, and --help needs no torch
    from convoy.train.loop import EpochResult, Evaluation


def checked_folder(folder: Path) -> Path:
    """A folder for TensorBoard, before anything starts.

    Raises:
        InputError: tensorboard is not installed, or the path is no folder.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("tensorboard is not installed: pip install 'convoy-train[tensorboard]', or leave it out")
    if folder.exists() and not folder.is_dir():
        raise InputError("give a folder: this is a file")
    return folder


class Scalars:
    """Writes TensorBoard's events: loss, learning rate and samples/s of every step, accuracy of every test.

    Args:
        folder: is made where it does not exist.
        step: the steps that the run has done before; what TensorBoard has of later ones is dropped.
        lr: the learning rate of the next step, when it is called.
    """

    def __init__(self, folder: Path, step: int, lr: Callable[[], float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=step or None)
        self.count, self.lr, self.next_lr = step, lr, lr()
        self.last_s: float | None = None

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        self._write("loss", loss)
        self._write("learning rate", self.next_lr)
        if self.last_s is not None:
            self._write("samples per s", samples / (now_s - self.last_s))
        self.count, self.last_s, self.next_lr = self.count + 1, now_s, self.lr()

    def on_evaluation(self, result: "Evaluation", is_best: bool) -> None:  # noqa: ARG002
        self._write("accuracy", result.accuracy)
        self.last_s = None

    def epoch(self, epoch: int, result: "EpochResult") -> None:  # noqa: ARG002
        self.last_s = None

    def _write(self, name: str, value: float) -> None:
        self.writer.add_scalar(name, value, self.count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()
