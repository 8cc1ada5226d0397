"""Losses of an accelerator are read some steps late: nothing waits for them, and each step is reported once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.checkpoint import Checkpointer
from convoy.comm.group import AloneGroup
from convoy.errors import DeviceLostError, DivergedError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from convoy.train.loader import Loader
from convoy.train.loop import Recipe, Training, fit
from convoy.train.record import LATE_STEPS, EpochResult, Evaluation, History, LateLosses, Observer, StepResult, lateness
from tests.support import nets, sim
from tests.support.one_device import by_name
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

needs_sim = pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)
STEPS = 7


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Seven steps of 6 samples. One may be NaN, which makes its step's loss NaN."""

    def __init__(self, spoiled: int | None = None) -> None:
        own = torch.Generator().manual_seed(5)
        self.x = torch.randn(6 * STEPS, 3, 8, 8, dtype=torch.float64, generator=own)
        self.targets = torch.randint(0, nets.CLASSES, (6 * STEPS,), generator=own)
        if spoiled is not None:
            self.x[spoiled] = torch.nan

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.targets[index])


class Noted(Observer):
    """An observer that records its calls in order, and how often the host waited for a simulated device by each
    step."""

    def __init__(self, *, counts: bool = False) -> None:
        self.told: list[tuple[str, int]] = []
        self.counts, self.waits = counts, list[int]()

    def on_step_end(self, step: int, samples: int) -> None:
        assert samples == 6
        self.told.append(("end", step))
        if self.counts:
            self.waits.append(torch.ops.sim.synchronizations())

    def on_step(self, result: StepResult) -> None:
        self.told.append(("loss", result.step))

    def on_evaluation(self, result: Evaluation) -> None:
        self.told.append(("test", result.step))

    def on_epoch(self, result: EpochResult) -> None:
        self.told.append(("epoch", result.epoch))


def made(device: str, recipe: Recipe | None = None) -> Training:
    """Build the model as one fused segment on one device."""
    model = Distributed(
        nets.build("two-conv"), by_name("data", "two-conv", speeds=Speeds((1.0,))), AloneGroup(torch.device(device)),
        torch.zeros(1, 3, 8, 8, dtype=torch.float64),
    )  # fmt: skip
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05), recipe or Recipe())


def trained(training: Training, spoiled: int | None = None, epochs: int = 2, **options: Any) -> History:
    own = training.model
    assert isinstance(own, Distributed)
    passes = training.recipe.accumulate
    train = Loader(Samples(spoiled), 6 // passes, own, shuffle=False)
    return fit(training, train, Loader(Samples(), 6, own, shuffle=False), epochs, **options)


@needs_sim
def test_losses_are_read_without_waiting_for_an_accelerator() -> None:
    on_processes(1, "tests.train.test_late_losses:train_on_an_accelerator", joined=False)


def train_on_an_accelerator(_device: int) -> None:
    sim.load()
    recipe = Recipe(accumulate=2)
    noted = Noted(counts=True)
    found = trained(made("sim:0", recipe), observer=noted, epochs=1)
    expected = trained(made("cpu", recipe), epochs=1)
    assert len(set(noted.waits)) == 1, f"waits for the device in the middle of an epoch: {noted.waits}"
    assert found.losses == pytest.approx(expected.losses, abs=1e-10)
    assert found.epochs[0].accuracy == expected.epochs[0].accuracy
    late = [("end", 0), ("end", 1), *((w, k + d) for k in range(STEPS - 2) for w, d in (("end", 2), ("loss", 0)))]
    assert noted.told == [*late, ("loss", 5), ("loss", 6), ("test", STEPS), ("epoch", 0)]


@needs_sim
def test_one_accelerator_delays_loss_reading_everywhere() -> None:
    sim.load()
    try:
        for kinds, late in ((("sim:0", "cpu"), LATE_STEPS), (("cpu", "cpu"), 0)):
            assert run_on_threads(2, lambda g: lateness(g.torch_device, g), on=kinds) == [late] * 2
    finally:
        sim.load(devices=0)


@pytest.mark.parametrize(
    ("late", "words"), [(0, "before that step changes weights"), (2, "2 steps later, without saving")]
)
def test_a_nan_loss_ends_the_training_and_is_not_saved(late: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.train.loop.lateness", lambda *_: late)
    noted, training = Noted(), made("cpu", Recipe(stops_diverged=True))
    with pytest.raises(DivergedError, match=rf"the loss of step 4 is nan.*stops {words}"):
        trained(training, spoiled=6 * 3, observer=noted)
    assert [step for what, step in noted.told if what == "end"][-1] == 2 + late
    assert [step for what, step in noted.told if what == "loss"][-1] == 2


def test_losses_are_read_before_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.train.loop.lateness", lambda *_: 2)
    training, noted = made("cpu", Recipe(stops_diverged=True)), Noted()
    checkpointer = Checkpointer(tmp_path, training.model, training.optimizer, every=2)
    checkpointer.begin(resume=False)
    with pytest.raises(DivergedError, match=r"the loss of step 4 is nan.*stops 1 step later"):
        trained(training, spoiled=6 * 3, checkpointer=checkpointer, observer=noted)
    checkpointer.close()
    assert [path.name for path in sorted(tmp_path.glob("*-step-*"))] == ["000001-step-2"]
    assert noted.told[:4] == [("end", 0), ("end", 1), ("loss", 0), ("loss", 1)]


class LosesOne:
    """Members that lose a device after step 5 and continue from step `back` with its weights."""

    def __init__(self, training: Training, back: int) -> None:
        self.training, self.back, self.kept, self.lost = training, back, list[Any](), False

    entrance = None

    def begin(self, _steps: int, place: Any) -> Any:
        self.kept.append((place, self._state()))
        return place

    def _state(self) -> Any:
        return [p.detach().clone() for p in self.training.model.parameters()]

    def after_step(self, place: Any) -> None:
        self.kept.append((place, self._state()))
        if place.step == 5 and not self.lost:
            self.lost = True
            raise DeviceLostError(1, "device 1 is gone")

    def recover(self, _error: DeviceLostError) -> Sequence[int]:
        place, weights = self.kept[self.back]
        del self.kept[self.back + 1 :]
        for parameter, value in zip(self.training.model.parameters(), weights, strict=True):
            parameter.data.copy_(value)
        return place  # type: ignore[no-any-return]

    def repeated(self, work: Callable[[], int]) -> int:
        return work()

    def finish(self) -> None: ...


@pytest.mark.parametrize("back", [5, 3])
def test_a_repeated_step_counts_once(back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(made("cpu"))
    monkeypatch.setattr("convoy.train.loop.lateness", lambda *_: 2)
    training, noted = made("cpu"), Noted()
    found = trained(training, observer=noted, members=LosesOne(training, back))
    assert found.losses == expected.losses
    assert [e.loss for e in found.epochs] == [e.loss for e in expected.epochs]
    told = [step for what, step in noted.told if what == "loss"]
    assert told == [*range(3), *range(min(back, 3), 2 * STEPS)]


def test_numbers_come_in_order_and_once() -> None:
    losses = LateLosses(1)
    parts = [torch.tensor(1.0), torch.tensor([0.5])]
    steps = [StepResult(step, 0, torch.nan, 6, 0.1) for step in range(3)]
    losses.add(steps[0], parts)
    parts[0].fill_(7.0)
    assert list(losses.due()) == []
    losses.add(steps[1], [torch.tensor(2.0)])
    assert [(each.step, each.loss) for each in losses.due()] == [(0, 1.5)]
    losses.add(steps[2], [torch.tensor(3.0)])
    losses.drop_from(2)
    assert [(each.step, each.loss) for each in losses.due(late=0)] == [(1, 2.0)]
    assert list(losses.due(late=0)) == []
