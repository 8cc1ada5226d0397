"""Runs the training loop of the command line, for distributed and ordinary models: steps, tests, results per epoch."""

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from convoy.checkpoint import Checkpointer, Progress
from convoy.comm.control_messages import share_number
from convoy.comm.group import Group
from convoy.elastic.members import Members, StoppedError
from convoy.errors import DeviceLostError, DivergedError, unknown_name
from convoy.runtime.batches import OutputPart
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage, clip_grad_norm_
from convoy.runtime.precision import GradScaler
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loss import Loss
from convoy.train.record import EpochResult, History, LateLosses, Observer, Place, StepResult, TrainingRecord, lateness

AUXILIARY = 0.3
"""Weight of the loss of an auxiliary classifier: Szegedy et al. 2015, section 5."""

_Build = Callable[[list[nn.Parameter], float, float, float], Optimizer]
OPTIMIZERS: Mapping[str, _Build] = {
    "sgd": lambda p, lr, momentum, decay: torch.optim.SGD(p, lr=lr, momentum=momentum, weight_decay=decay),
    "adam": lambda p, lr, _, decay: torch.optim.Adam(p, lr=lr, weight_decay=decay),
    "adamw": lambda p, lr, _, decay: torch.optim.AdamW(p, lr=lr, weight_decay=decay),
}


def build_optimizer(name: str, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> Optimizer:
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name](list(model.parameters()), lr, momentum, weight_decay)


# --- learning rate -----------------------------------------------------------------------------------------------------

SCHEDULES = ("constant", "cosine", "step", "one-cycle")

ONE_CYCLE_START, ONE_CYCLE_END, ONE_CYCLE_RISE = 1 / 25, 1 / 25 / 1e4, 0.3
"""Fractions of the highest rate at the first and the last step, and of the steps until it, as in torch's OneCycleLR."""


@dataclass(frozen=True, slots=True)
class RateCurve:
    """A closed-form learning-rate schedule. It depends only on the step, so a resumed run needs no schedule state.

    Attributes:
        steps: optimizer steps of the whole training.
        warmup_steps: steps in which the rate rises: linearly, or for one-cycle on half a cosine.
        drop_steps, drop_factor: for "step": multiply the rate by the factor after every `drop_steps` steps.
    """

    name: str
    steps: int
    warmup_steps: int = 0
    drop_steps: int = 1
    drop_factor: float = 0.1

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step, counted from 0.

        Cosine: Loshchilov & Hutter 2017, one period without restarts. One-cycle: Smith & Topin 2019, half a cosine up and
        half a cosine down.
        """
        warmup = self.warmup_steps
        if self.name == "one-cycle":
            top = warmup or ONE_CYCLE_RISE * self.steps - 1
            if step < top:
                return _half_cosine(ONE_CYCLE_START, 1.0, step / top)
            return _half_cosine(1.0, ONE_CYCLE_END, (step - top) / max(1.0, self.steps - 1 - top))
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.name == "cosine":
            return _half_cosine(1.0, 0.0, (step - warmup) / max(1, self.steps - warmup))
        return self.drop_factor ** (step // self.drop_steps) if self.name == "step" else 1.0


def _half_cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, part))) / 2


def build_schedule(optimizer: Optimizer, curve: RateCurve) -> LambdaLR:
    """Return a scheduler; call its `step()` after every optimizer step. Raises InputError for an unknown name."""
    if curve.name not in SCHEDULES:
        raise unknown_name("schedule", curve.name, SCHEDULES)
    return LambdaLR(optimizer, curve.factor)


# --- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options of steps and tests.

    Attributes:
        accumulate: micro-batches per step. The loss of a step is the mean over all their samples.
        clip_norm: upper limit of the norm of all gradients together.
        evaluate_epochs, evaluate_steps: epochs and steps between tests; the end of the last epoch is always tested.
        stops_diverged: stop as soon as a NaN or infinite loss is read, before anything is saved; else report it and continue.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    evaluate_epochs: int = 1
    evaluate_steps: int | None = None
    stops_diverged: bool = False


@dataclass
class Training:
    """A model with its optimizer, recipe, schedule, weight average and loss scaler.

    Attributes:
        average: moving average of the weights, updated by optimizer hooks and used in tests.
        report: called with a line of text when the loss is NaN or infinite for the first time.
    """

    model: nn.Module
    optimizer: Optimizer
    recipe: Recipe = field(default_factory=Recipe)
    schedule: LRScheduler | None = None
    average: WeightAverage | None = None
    scaler: GradScaler | None = None
    report: Callable[[str], None] = warnings.warn

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, x: Tensor, y: Tensor, part: float, *, ends_step: bool = True) -> Tensor:
        """Accumulate the gradients of a micro-batch. Return its part of the loss, which is the mean over the global batch.

        Args:
            part: its samples divided by those of the global batch.
            ends_step: whether this is the last micro-batch of a step, which all-reduces the accumulated gradients.
        """
        waits = isinstance(self.model, Distributed) and not ends_step
        with self.model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss = classification_loss(self.model(x), y, self.recipe.label_smoothing) * part
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.recipe.clip_norm is not None:
            clip_grad_norm_(self.model, self.recipe.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.skips:
                return
        if self.schedule is not None:
            self.schedule.step()

    def accuracy(self, loader: Loader) -> float:
        """Return the accuracy, of the averaged weights if there are any."""
        with nullcontext() if self.average is None else self.average.as_weights():
            return accuracy(self.model, loader)

    def lateness(self) -> int:
        group = self.model.group if isinstance(self.model, Distributed) else None
        return lateness(next(self.model.parameters()).device if group is None else group.torch_device, group)


def fit(
    training: Training,
    train: Loader,
    test: Loader,
    epochs: int,
    observer: Observer | None = None,
    rebalancer: Rebalancer | None = None,
    checkpointer: Checkpointer | None = None,
    members: Members | None = None,
) -> History:
    """Train with cross entropy for some epochs, and test in between. Every device calls it.

    Args:
        checkpointer: saves the run, and knows the step from which to continue.
        members: lets the training continue when devices are lost or join.

    Raises:
        DivergedError: the loss is NaN or infinite, and the recipe has `stops_diverged`. The weights are those before that
            step, on an accelerator up to `LATE_STEPS` steps later.
        StoppedError: a stop was requested for all devices; a checkpointer has saved the training.
    """
    loop = _Loop(training, test, observer or Observer(), rebalancer, checkpointer, members)
    start = checkpointer.progress if checkpointer is not None else Progress()
    place = Place(start.step, start.epoch, start.batch)
    loop.steps = loop.record.begun = start.step
    repeats = False
    if members is not None:
        members.fall_back = None if checkpointer is None else loop.reload
        members.run_state = loop.run_state, loop.take_over
        try:
            place = Place(*members.begin(start.step, list(place)))
            if members.entrance is not None:  # the others return to this step, too
                loop.steps, repeats = place.step, True
        except DeviceLostError as error:
            if members.entrance is not None:
                raise
            place, repeats = Place(*members.recover(error)), True
    if members is None:
        loop.unread.late = training.lateness()
    elif members.entrance is None:  # a joining device has it from the run state
        loop.unread.late = members.repeated(training.lateness)
    while True:
        try:
            if repeats:
                loop.go_back(place)
            for epoch in range(place.epoch, epochs):
                done = place.batch * training.recipe.accumulate if epoch == place.epoch else 0
                train.set_epoch(epoch, min(done, len(train)))  # the last step may have had fewer micro-batches
                again = repeats and epoch == place.epoch
                loop.epoch(epoch, train, is_last=epoch + 1 == epochs, again=again)
            if checkpointer is not None:
                checkpointer.at_end()
            if members is not None:
                members.finish()
            return loop.record.history
        except DeviceLostError as error:
            if members is None:
                raise
            place, repeats = Place(*members.recover(error)), True
        except StoppedError as stopped:
            assert members is not None
            loop.read_all()
            if checkpointer is not None:
                checkpointer.at_end()
            members.close()
            if checkpointer is None:
                raise
            raise StoppedError(f"{stopped}; --resume continues from there") from None


@dataclass
class _Loop:
    """One training, epoch by epoch."""

    training: Training
    test: Loader
    observer: Observer
    rebalancer: Rebalancer | None
    checkpointer: Checkpointer | None
    members: Members | None = None
    unread: LateLosses = field(default_factory=lambda: LateLosses(0))
    record: TrainingRecord = field(default_factory=TrainingRecord)
    steps: int = 0  # of the optimizer so far
    tested_s: float = 0.0  # seconds of tests in this epoch

    def go_back(self, place: Place) -> None:
        self.record.go_back(place)
        self.unread.drop_from(place.step)
        self.steps = place.step
        if self.checkpointer is not None:
            self.checkpointer.go_back(Progress(place.step, place.epoch, place.batch))
        if self.rebalancer is not None:
            self.rebalancer.restart()

    def reload(self) -> tuple[int, list[int]]:
        assert self.checkpointer is not None
        found = self.checkpointer.reload()
        return found.step, [found.step, found.epoch, found.batch]

    def run_state(self) -> dict[str, Any]:
        return self.record.run_state(self.unread.known()) | {"late": self.unread.late}

    def take_over(self, run_state: dict[str, Any]) -> None:
        self.record.take_over(run_state)
        self.unread.late = run_state["late"]

    def epoch(self, epoch: int, train: Loader, *, is_last: bool, again: bool = False) -> None:
        """Train one epoch, starting at the loader's `start`.

        Args:
            again: the epoch continues from a snapshot; if a test follows that step, repeat it first.
        """
        recipe = self.training.recipe
        self.training.model.train()
        start_s, self.tested_s, trained = time.perf_counter(), 0.0, 0
        if again and 0 < train.start < len(train) and self._is_due:
            self._pause(epoch)
        if self.rebalancer is not None:
            self.rebalancer.begin()
        for index, (x, y) in enumerate(train, train.start):
            batch = _samples(train, index, recipe.accumulate)
            if index % recipe.accumulate == 0:
                self.training.optimizer.zero_grad()
                losses: list[Tensor] = []
            ends_epoch = index + 1 == len(train)
            ends_step = ends_epoch or (index + 1) % recipe.accumulate == 0
            part = _samples(train, index, 1) / batch
            losses.append(self.training.backward(x, y, part, ends_step=ends_step))
            if ends_step:
                self._step(epoch, losses, batch)
                trained += batch
                if self.rebalancer is not None:
                    # Mean samples per micro-batch: the rebalancer ignores an incomplete step, because the number differs.
                    self.rebalancer.step(batch / recipe.accumulate)
                if self.members is not None:
                    self.members.after_step(Place(self.steps, epoch, -(-(index + 1) // recipe.accumulate)))
            if ends_step and self._is_due and not ends_epoch:
                self._pause(epoch)
        self.read_all()
        train_s = time.perf_counter() - start_s - self.tested_s
        due = is_last or (epoch + 1) % recipe.evaluate_epochs == 0 or self._is_due
        accuracy = self._evaluate(epoch, ends_epoch=True) if due else None
        rows = [(loss * count, count) for loss, count in self.record.rows_of(epoch)]
        weighted, samples = (sum(column) for column in zip(*rows, strict=True)) if rows else (0.0, 0)
        mean = weighted / samples if samples else math.nan  # a run may resume at the end of an epoch
        # After a recovery the epoch starts at a later batch: `trained` counts only the samples since then, as train_s does.
        result = EpochResult(epoch, mean, accuracy, train_s, trained / train_s, self.training.rate())
        self.record.epoch(result)
        self.observer.on_epoch(result)
        if self.checkpointer is not None:
            self.checkpointer.at_evaluation(math.nan if accuracy is None else accuracy)

    @property
    def _is_due(self) -> bool:
        every = self.training.recipe.evaluate_steps
        return every is not None and self.steps % every == 0

    def _step(self, epoch: int, losses: Sequence[Tensor], samples: int) -> None:
        this = self.unread.add(StepResult(self.steps, epoch, math.nan, samples, self.training.rate()), losses)
        read = [self._checked(each) for each in self.unread.due()]
        self.training.update()
        this.ended_s = time.perf_counter()
        self.steps += 1
        self.observer.on_step_end(self.steps - 1, samples)
        self._report_steps(read)
        if self.checkpointer is not None:
            # Report before saving: a run killed in between would resume after this step, and never report it.
            if self.checkpointer.saves_next:
                self.read_all()
            self.checkpointer.after_step()

    def _checked(self, result: StepResult) -> StepResult:
        """Return the argument. At the first NaN or infinite loss, warn, or raise DivergedError if the recipe stops then."""
        if self.record.history.diverged is not None or math.isfinite(result.loss):
            return result
        self.record.diverge(result.step + 1)
        fault = f"the loss of step {result.step + 1} is {result.loss}"
        remedy = "lower the learning rate (--lr), or add --warmup-epochs 1 or --clip-norm 1"
        if self.training.recipe.stops_diverged:
            late = self.steps - result.step
            behind = f"{late} step{'s' * (late > 1)} later, without saving them"
            where = behind if late else "before that step changes weights"
            raise DivergedError(f"{fault}: the training has diverged, and stops {where}; {remedy}")
        self.training.report(f"WARNING: {fault}: the training has diverged, and later results are useless; {remedy}")
        return result

    def _report_steps(self, read: Iterable[StepResult]) -> None:
        for result in read:
            self.record.step(result.loss, result.epoch, result.samples)
            self.observer.on_step(result)

    def read_all(self) -> None:
        """Read and report all losses: before a test, the end of an epoch, a checkpoint."""
        self._report_steps(self._checked(each) for each in self.unread.due(late=0))

    def _pause(self, epoch: int) -> None:
        """Run a test within an epoch, without counting it as training time."""
        start_s = time.perf_counter()
        self.read_all()
        self._evaluate(epoch, ends_epoch=False)
        self.tested_s += time.perf_counter() - start_s
        if self.rebalancer is not None:
            self.rebalancer.begin()

    def _evaluate(self, epoch: int, *, ends_epoch: bool) -> float:
        # The number of tests is equal on all devices, also on joined ones and after a recovery.
        self.test.set_epoch(len(self.record.history.evaluations))
        result = self.record.test(epoch, self.steps, self.training.accuracy(self.test), ends_epoch=ends_epoch)
        self.observer.on_evaluation(result)
        return result.accuracy


def _samples(train: Loader, index: int, accumulate: int) -> int:
    """Return the samples of the step that contains batch `index`."""
    first = (index - index % accumulate) * train.batch_size
    whole = len(train) * train.batch_size if train.drop_last else train.samples
    return min(accumulate * train.batch_size, whole - first)


def classification_loss(outputs: Any, y: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of the first output, plus `AUXILIARY` times that of each auxiliary classifier's."""
    criterion = _cross_entropy(label_smoothing)
    if not isinstance(outputs, tuple | list):
        return criterion(outputs, y)
    main, *others = (criterion(each, y) for each in outputs)
    return main + AUXILIARY * sum(others)


@functools.cache  # one for all steps: devices compare the criterion at its first call
def _cross_entropy(label_smoothing: float) -> Loss:
    return Loss(nn.CrossEntropyLoss(label_smoothing=label_smoothing))


@torch.no_grad()
def accuracy(model: nn.Module, loader: Loader) -> float:
    """Return the top-1 accuracy, of samples or of pixels. Leaves the model in training mode."""
    model.eval()
    right, total = torch.zeros((), dtype=torch.int64), 0  # added up on the device of the outputs, and read once
    group: Group | None = None  # set if each device counts only its own samples
    for x, y in loader:
        outputs = model(x)
        if isinstance(outputs, OutputPart):
            part = outputs
            outputs, y, group = part.own, part.rows_of(y), part.group
        right = right.to(outputs.device) + (outputs.argmax(1) == y).sum()
        total += y.numel()
    model.train()
    found = int(right)
    if group is not None:
        found, total = (int(sum(share_number(group, count))) for count in (found, total))
    return found / total
