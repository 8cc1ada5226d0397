"""A finished training, and the same training in plain PyTorch on one device, for `--compare`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convoy.cli.build import build_loaders, build_training
from convoy.cli.inputs import build_model
from convoy.config.settings import Settings
from convoy.data import Splits
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory
from convoy.runlog.schema import DeviceLine
from convoy.runtime.clock import Clock
from convoy.runtime.precision import UnderAutocast
from convoy.train.loop import Training, fit
from convoy.train.record import History


@dataclass(frozen=True)
class Done:
    """A finished training."""

    history: History
    splits: Splits
    devices: Sequence[tuple[str, str, float]]
    uses: Sequence[DeviceLine]
    inexact: str
    directory: RunDirectory | None


@dataclass
class _Slowed(Training):
    """Training in plain PyTorch on a device that is slowed down as those of the fleet are."""

    clock: Clock = field(kw_only=True)

    def _backward(self, x: Tensor, y: Tensor, part: float) -> Tensor:
        with self.clock.compute("all layers", "forward and backward"):
            return super()._backward(x, y, part)


def compare_with_one_device(settings: Settings, done: Done, screen: Screen) -> None:
    """Train the same in plain PyTorch on one CPU, slowed down as the fastest device is, and print both results."""
    model = UnderAutocast(build_model(settings, done.splits), settings.precision)
    train, test = build_loaders(settings, done.splits, None)
    slowdown = min(slowdown for _, _, slowdown in done.devices)
    training = build_training(settings, model, train)
    training.tell = screen.line
    slowed = _Slowed(**vars(training), clock=Clock(torch.device("cpu"), slowdown))
    title = "one device, plain PyTorch" + (f", slowed down {slowdown:g}x" if slowdown != 1 else "")
    with screen.progress(title, settings.epochs, train.samples, tests=test.samples) as bar:
        alone = fit(slowed, train, test, settings.epochs, bar)
    screen.comparison(done.history, alone, done.devices, done.uses, inexact=done.inexact, precision=settings.precision)
