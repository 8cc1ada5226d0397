"""Training features: schedules, micro-batches, clipping, label smoothing, averages, tests during training.

The oracle is plain PyTorch, written out here: whole batches, torch's own schedulers, torch's own clipping and averaging. It
shares nothing with `fit` but the order of the samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage
from convoy.train.loader import Loader
from convoy.train.loop import (
    AUXILIARY,
    History,
    RateCurve,
    Recipe,
    Training,
    build_schedule,
    classification_loss,
    fit,
)
from convoy.train.record import EpochResult, Evaluation, Observer, StepResult
from tests.support import nets
from tests.support.one_device import EXACT, by_name, mixed, one_trace
from tests.support.threads import run_on_threads

X = torch.zeros(2, 3, 8, 8, dtype=torch.float64)


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """46 images: steps of 20, 20 and 6."""

    def __init__(self, count: int = 46) -> None:
        own = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=own)
        self.targets = torch.randint(0, nets.CLASSES, (count,), generator=own)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.targets[index])


# ---------------------------------------------------------------------------------------------------------- schedules

LR = 0.05


def rates(made: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler, found = made(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def torch_warmup(optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], Any]) -> Any:
    ramp = lr_scheduler.LinearLR(optimizer, start_factor=1 / (steps + 1), total_iters=steps)
    return lr_scheduler.SequentialLR(optimizer, [ramp, after()], milestones=[steps])


TORCH: dict[str, tuple[RateCurve, Callable[[torch.optim.Optimizer], Any]]] = {
    "constant": (RateCurve("constant", 20), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
    "constant, warm-up": (
        RateCurve("constant", 20, warmup_steps=4),
        lambda o: torch_warmup(o, 4, lambda: lr_scheduler.ConstantLR(o, factor=1.0)),
    ),
    "cosine": (RateCurve("cosine", 20), lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20)),
    "cosine, warm-up": (
        RateCurve("cosine", 20, warmup_steps=5),
        lambda o: torch_warmup(o, 5, lambda: lr_scheduler.CosineAnnealingLR(o, T_max=15)),
    ),
    "step": (
        RateCurve("step", 20, drop_steps=6, drop_factor=0.3),
        lambda o: lr_scheduler.StepLR(o, step_size=6, gamma=0.3),
    ),
    "step, warm-up": (
        RateCurve("step", 20, warmup_steps=3, drop_steps=6, drop_factor=0.3),
        # Drops are counted from the start of the training, not from the end of the warm-up.
        lambda o: torch_warmup(o, 3, lambda: lr_scheduler.MultiStepLR(o, milestones=[3, 9, 15], gamma=0.3)),
    ),
    "one-cycle": (
        RateCurve("one-cycle", 20),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=20, cycle_momentum=False),
    ),
    "one-cycle, rise of 7": (
        RateCurve("one-cycle", 20, warmup_steps=7),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=20, pct_start=8 / 20, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_schedule_curves_match_torch(case: str) -> None:
    schedule, theirs = TORCH[case]
    assert rates(lambda o: build_schedule(o, schedule), 20) == pytest.approx(rates(theirs, 20), rel=1e-12, abs=1e-15)


# ------------------------------------------------------------------------------------------------------------- parity


@dataclass(frozen=True)
class Case:
    """A training with all features, or with one."""

    net: str = "two-conv"
    batch: int = 20
    accumulate: int = 1
    clip: float | None = None
    smoothing: float = 0.0
    schedule: RateCurve = field(default_factory=lambda: RateCurve("constant", 21))
    decay: float | None = None
    epochs: int = 7  # of three steps

    @property
    def part(self) -> int:
        return self.batch // self.accumulate


EVERYTHING = Case(accumulate=2, clip=0.5, smoothing=0.1, schedule=RateCurve("cosine", 21, warmup_steps=4), decay=0.9)


@dataclass
class Found:
    """The complete result of a training."""

    history: History
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    momenta: dict[str, Tensor]
    rate: float


def made_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-2)


def in_plain_pytorch(case: Case) -> Found:
    """Train the reference on global batches."""
    model = nets.build(case.net)
    optimizer = made_optimizer(model)
    scheduler = TORCH_SCHEDULES[case.schedule.name](optimizer, case.schedule)
    average = None
    if case.decay is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(case.decay))
    samples, history, norms = Samples(), History(), []
    for epoch in range(case.epochs):
        for indices in Loader(samples, case.batch).batches(epoch):
            x, y = samples.x[indices], samples.targets[indices]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, label_smoothing=case.smoothing)
            loss.backward()
            if case.clip is not None:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
            optimizer.step()
            scheduler.step()
            if average is not None:
                average.update_parameters(model)
            history.losses.append(loss.item())
        tested = (average or model).eval()
        with torch.no_grad():
            right = int((tested(samples.x).argmax(1) == samples.targets).sum())
        (average or model).train()
        history.evaluations.append(Evaluation(epoch, len(history.losses), right / len(samples), True, False))
    assert case.clip is None or min(norms) < case.clip < max(norms), "some steps are clipped, others are not"
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    averages = {} if average is None else dict(average.module.state_dict())
    momenta = {k: optimizer.state[p]["momentum_buffer"] for k, p in model.named_parameters()}
    return Found(history, weights, averages, momenta, optimizer.param_groups[0]["lr"])


TORCH_SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, RateCurve], Any]] = {
    "constant": lambda o, _: lr_scheduler.ConstantLR(o, factor=1.0),
    "cosine": lambda o, s: torch_warmup(
        o, s.warmup_steps, lambda: lr_scheduler.CosineAnnealingLR(o, T_max=s.steps - s.warmup_steps)
    ),
}


def trained(model: nn.Module, case: Case) -> tuple[Training, History]:
    part = model if isinstance(model, Distributed) else None
    train, test = Loader(Samples(), case.part, part), Loader(Samples(), 23, part, shuffle=False)
    optimizer = made_optimizer(model)
    average = None if case.decay is None else WeightAverage(optimizer, case.decay)
    recipe = Recipe(case.accumulate, case.clip, case.smoothing)
    training = Training(model, optimizer, recipe, build_schedule(optimizer, case.schedule), average)
    return training, fit(training, train, test, case.epochs)


def on_devices(case: Case, plan: Plan) -> list[Found]:
    """Train the same on the devices of a plan, through `fit`; gather everything on every device."""
    model = nets.build(case.net)

    def work(group: Group) -> Found:
        here = convoy.distribute(model, plan, group, X)

        training, history = trained(here, case)
        state = convoy.train.full_optimizer_state(here, training.optimizer)["state"]
        averages: dict[str, Tensor] = {}
        if training.average is not None:
            with training.average.as_weights():
                averages = here.full_state_dict()
        momenta = {key: rows["momentum_buffer"] for key, rows in state.items()}
        return Found(history, here.full_state_dict(), averages, momenta, training.optimizer.param_groups[0]["lr"])

    with one_trace(case.net, torch.float64):
        return run_on_threads(plan.devices, work, timeout_s=30)


def assert_same(found: Found, expected: Found) -> None:
    assert found.history.losses == pytest.approx(expected.history.losses, abs=EXACT)
    assert [e.accuracy for e in found.history.evaluations] == [e.accuracy for e in expected.history.evaluations]
    assert found.rate == pytest.approx(expected.rate, abs=1e-15)
    for what in ("weights", "averages", "momenta"):
        ours, theirs = getattr(found, what), getattr(expected, what)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.allclose(ours[key], value, rtol=0, atol=EXACT), f"{what}: {key}"


@pytest.fixture(scope="module")
def expected() -> Found:
    return in_plain_pytorch(EVERYTHING)


@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid", "master", "model", "mixed"])
def test_all_features_together_match_one_device(plan: str, expected: Found) -> None:
    batch = EVERYTHING.part
    chosen = mixed("two-conv") if plan == "mixed" else by_name(plan, "two-conv", batch=batch)
    if plan == "data-by-speed":
        assert chosen.otherwise == Batch((7, 0, 2, 1))
    for found in on_devices(EVERYTHING, chosen):
        assert_same(found, expected)
    assert len(expected.history.losses) == 21


def test_the_loop_on_one_device_is_plain_pytorch(expected: Found) -> None:
    model = nets.build("two-conv")
    training, history = trained(model, EVERYTHING)
    assert history.losses == pytest.approx(expected.history.losses, abs=1e-13)
    assert all(torch.allclose(v, expected.weights[k], rtol=0, atol=1e-13) for k, v in model.state_dict().items())
    assert training.average is not None


# ----------------------------------------------------------------------------------------------------------- clipping


def test_torch_clipping_of_shards_is_refused_and_ours_is_exact() -> None:
    model = nets.build("two-conv")
    samples = Samples(10)
    F.cross_entropy(model(samples.x), samples.targets).backward()
    true = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))

    def work(group: Group) -> float:
        here = convoy.distribute(model, by_name("model", "two-conv"), group, X)
        for x, y in Loader(samples, 10, here, shuffle=False):
            F.cross_entropy(here(x), y).backward()
        norm = float(convoy.train.clip_grad_norm_(here, math.inf))
        torch.nn.utils.clip_grad_norm_(here.parameters(), math.inf)
        with pytest.raises(InputError, match=r"convoy.train.clip_grad_norm_\(model, max_norm\)"):
            torch.optim.SGD(here.parameters(), lr=0.1).step()
        return norm

    assert run_on_threads(4, work) == pytest.approx([true] * 4, abs=EXACT)


# --------------------------------------------------------------------------------------------------------- the average


def step(optimizer: torch.optim.Optimizer, model: nn.Module, by: float) -> None:
    """Decrease all weights by this amount."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, by)
    optimizer.step()


def test_weights_are_restored_after_testing_the_average() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = convoy.WeightAverage(optimizer, 0.75)
    step(optimizer, model, 1.0)
    first = model.weight.detach().clone()
    step(optimizer, model, 1.0)

    def test() -> None:
        with average.as_weights():
            assert torch.allclose(model.weight, first - 0.25)
            raise ValueError("in the test")

    with pytest.raises(ValueError, match="in the test"):
        test()
    assert torch.allclose(model.weight, first - 1.0)


@pytest.mark.parametrize("optimizer", ["SGD", "NAdam"])
def test_average_is_stored_with_any_optimizer(optimizer: str) -> None:
    model, other = nets.build("two-conv"), nets.build("two-conv")
    ours, theirs = (getattr(torch.optim, optimizer)(m.parameters(), lr=0.01) for m in (model, other))
    average, expected = WeightAverage(ours, 0.7), AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    samples, late = Samples(10), torch.empty(0)
    for index in range(4):
        for net, at in ((model, ours), (other, theirs)):
            at.zero_grad()
            F.cross_entropy(net(samples.x), samples.targets).backward()
            if index == 0:
                net.get_parameter("fc.bias").grad = None
            at.step()
        expected.update_parameters(other)
        bias = other.get_parameter("fc.bias").detach()
        late = bias.clone() if index < 2 else 0.7 * late + 0.3 * bias
    with average.as_weights():
        for key, value in expected.module.named_parameters():
            found = model.get_parameter(key)
            assert torch.allclose(found, late if key == "fc.bias" else value, rtol=0, atol=1e-14), key
    assert all(torch.equal(p, other.get_parameter(key)) for key, p in model.named_parameters())


# ------------------------------------------------------------------------------------------------- tests while training


class Noted(Observer):
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, result: StepResult) -> None:
        self.told.append(result.samples)

    def on_evaluation(self, result: Evaluation) -> None:
        self.told.append((result.epoch, result.step, result.ends_epoch, result.is_best))

    def on_epoch(self, result: EpochResult) -> None:
        self.told.append(("epoch", result.epoch, result.accuracy is not None))


def told(
    monkeypatch: pytest.MonkeyPatch, accuracies: list[float], epochs: int, recipe: Recipe
) -> tuple[list[Any], History]:
    """Return an observer's calls in epochs of three steps with these test accuracies."""
    found = iter(accuracies)
    monkeypatch.setattr("convoy.train.loop.accuracy", lambda *_: next(found))
    model, noted = nets.build("two-conv"), Noted()
    train = Loader(Samples(), 20 // recipe.accumulate)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.01), recipe)
    history = fit(training, train, Loader(Samples(), 20), epochs, noted)
    assert next(found, None) is None, "fewer tests than expected"
    return noted.told, history


def test_tests_run_every_epoch_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, history = told(monkeypatch, [0.5, 0.7, 0.7], 3, Recipe())
    assert rows == [
        *(20, 20, 6, (0, 3, True, True), ("epoch", 0, True)),
        *(20, 20, 6, (1, 6, True, True), ("epoch", 1, True)),
        *(20, 20, 6, (2, 9, True, False), ("epoch", 2, True)),
    ]
    assert history.best == Evaluation(1, 6, 0.7, True, True), "the first of equals"
    assert [e.accuracy for e in history.epochs] == [0.5, 0.7, 0.7]


def test_evaluation_runs_every_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(accumulate=4, evaluate_epochs=9, evaluate_steps=2)
    rows, _ = told(monkeypatch, [0.1, 0.3, 0.2, 0.5, 0.4], 3, recipe)
    assert rows == [
        *(20, 20, (0, 2, False, True), 6, ("epoch", 0, False)),
        *(20, (1, 4, False, True), 20, 6, (1, 6, True, False), ("epoch", 1, True)),
        *(20, 20, (2, 8, False, True), 6, (2, 9, True, False), ("epoch", 2, True)),
    ]


# ------------------------------------------------------------------------------------------------- auxiliary classifiers


def test_auxiliary_losses_are_weighted() -> None:
    y = torch.tensor([0, 2])
    main, first, second = (torch.randn(2, 3, dtype=torch.float64) for _ in range(3))
    parts = [float(F.cross_entropy(each, y, label_smoothing=0.1)) for each in (main, first, second)]
    found = float(classification_loss((main, first, second), y, 0.1))
    assert found == pytest.approx(parts[0] + AUXILIARY * (parts[1] + parts[2]), abs=1e-12)
    assert float(classification_loss(main, y, 0.1)) == parts[0]
