"""The peers: DDP's gradient is that of one device for any shares, and its search finds the best setting there is to find."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import ddp, tuning, worker
from benchmarks.bench_page import Sources, bench_page
from benchmarks.configurations import SETS
from benchmarks.ddp import UNCOUNTED_STEPS, DdpRunner, FsdpRunner, leave, meet
from benchmarks.figure import draw_efficiency
from benchmarks.hardware import Ground
from benchmarks.results import FleetResult, NetResult, Row, read_result
from benchmarks.runners import sgd
from benchmarks.tuning import Setting, Trial, tune, tune_even
from benchmarks.worker import WorkerJob, run_fleet
from convoy.comm.group import Group
from convoy.data import Images
from convoy.model.nets import build_net
from convoy.sharding.shares import Shares
from convoy.train.loader import Loader
from tests.support.processes import on_processes

STEPS = 3
GROUND = Ground("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", "abc")


def images() -> Images:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(40) % 10, 10, (0.5,) * 3, (0.3,) * 3, torch.float64)


def trained_alone(batch: int, steps: int) -> dict[str, list[float]]:
    """Gradients of the last step and weights after it, by plain PyTorch."""
    model = build_net("two-conv:4:8", (3, 8, 8), 10).double()
    optimizer, batches = sgd(model), iter(Loader(images(), batch, drop_last=True))
    for _ in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> dict[str, list[float]]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.detach().flatten().tolist()
        found[f"gradient of {name}"] = parameter.grad.flatten().tolist()
    return found


def train_ddp(group: Group, shares: list[int], static_graph: bool, between: bool, zero: bool) -> dict[str, list[float]]:
    meet(group)
    model = build_net("two-conv:4:8", (3, 8, 8), 10).double()
    kept = copy.deepcopy(model.state_dict())
    runner = DdpRunner(model, Setting(tuple(shares), 1, static_graph, zero), group.device, images())
    try:
        for _ in range(2):  # every turn starts anew
            assert runner.wake() is None
            runner.train(STEPS - UNCOUNTED_STEPS)
            assert runner._model is not None
            found = flat(runner._model.module)
            if between:
                runner.compute(2)
            runner.rest()
            assert runner._model is None
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in kept.items())
        return found
    finally:
        leave()


@pytest.mark.parametrize(
    ("shares", "static_graph", "between", "zero"),
    [
        ([4, 3, 1], False, False, False),
        ([7, 0, 1], False, True, False),
        ([2, 2, 4], True, False, False),
        ([4, 3, 1], False, False, True),
    ],
)
def test_ddp_takes_the_gradient_steps_of_one_device(
    shares: Shares, static_graph: bool, between: bool, zero: bool
) -> None:
    expected = trained_alone(8, STEPS)
    for found in on_processes(3, "tests.benchmarks.test_benchmarks_ddp:train_ddp", shares, static_graph, between, zero):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-10, abs=1e-14), name


def train_fsdp(group: Group, shares: list[int]) -> dict[str, list[float]]:
    meet(group)
    runner = FsdpRunner(build_net("two-conv:4:8", (3, 8, 8), 10).double(), shares, group.device, images())
    try:
        assert runner.wake() is None
        runner.train(STEPS - UNCOUNTED_STEPS)
        assert runner._model is not None
        return {name: p.full_tensor().detach().flatten().tolist() for name, p in runner._model.named_parameters()}  # type: ignore[attr-defined]
    finally:
        leave()


@pytest.mark.parametrize("shares", [[4, 3, 1], [7, 0, 1]])
def test_fsdp_takes_the_steps_of_one_device(shares: list[int]) -> None:
    expected = trained_alone(8, STEPS)
    for found in on_processes(3, "tests.benchmarks.test_benchmarks_ddp:train_fsdp", shares):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-10, abs=1e-14), name


# --- the search, on a fleet that exists only as numbers ---------------------------------------------------------------


class Fleet:
    """A step takes the slowest rank's samples and 20 ms of network, less with one bucket size or a static graph."""

    def __init__(self, sample_s: list[float], best_bucket: int = 100, fixed_s: float = 0.0) -> None:
        self.sample_s, self.best_bucket, self.fixed_s = sample_s, best_bucket, fixed_s
        self.seen: list[Setting] = []

    def attempt(self, setting: Setting) -> Trial:
        assert setting not in self.seen, "no setting is tried twice"
        self.seen.append(setting)
        rows = zip(setting.shares, self.sample_s, strict=True)
        compute_s = tuple(share * each + (self.fixed_s if share else 0) for share, each in rows)
        network_s = 0.02 - 0.004 * (setting.bucket_mb == self.best_bucket) - 0.001 * setting.static_graph
        step_s = max(compute_s) + network_s
        return Trial(step_s, compute_s, 5 * step_s)


def test_wrong_speeds_are_corrected_by_what_computing_takes() -> None:
    fleet = Fleet([0.001, 0.003])
    setting, trial = tune(fleet.attempt, 64, [1.0, 1.0], budget_s=1e9)
    assert [s.shares for s in fleet.seen[:2]] == [(32, 32), (48, 16)]
    assert setting.shares == (48, 16)
    assert (setting.bucket_mb, setting.static_graph) == (100, True)
    assert trial.step_s == pytest.approx(0.048 + 0.02 - 0.005)


def test_neighbours_find_what_correction_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sharing only, the search starts two samples off the best, 12 and 4."""
    monkeypatch.setattr(tuning, "MOST_SHARINGS", 1)
    setting, _ = tune(Fleet([0.001, 0.003]).attempt, 16, [10.0, 6.0], budget_s=1e9)
    assert setting.shares == (12, 4)


def test_without_a_budget_the_first_correction_and_the_options_are_tried_still() -> None:
    fleet = Fleet([0.001, 0.003], best_bucket=5)
    setting, _ = tune(fleet.attempt, 64, [1.0, 1.0], budget_s=0.0)
    assert [s.shares for s in fleet.seen[:2]] == [(32, 32), (48, 16)]
    assert (setting.shares, setting.bucket_mb) == ((48, 16), 5)
    assert len(fleet.seen) == 2 + len(tuning.BUCKETS_MB) + 1, "buckets, a static graph, shared updates"


def test_a_rank_that_only_delays_can_be_left_without_samples() -> None:
    """It has 300 ms of fixed work; the others carry all 8 samples in 40 ms."""
    fleet = Fleet([0.01, 0.01, 0.3], fixed_s=0.0)
    setting, _ = tune(fleet.attempt, 8, [1.0, 1.0, 1.0], budget_s=1e9)
    assert setting.shares == (4, 4, 0)


def test_options_that_are_known_from_another_batch_are_taken_over() -> None:
    known = Setting((32, 32), 5, static_graph=True)
    fleet = Fleet([0.001, 0.003])
    setting, _ = tune(fleet.attempt, 16, [10.0, 6.0], budget_s=1e9, known=known)
    assert {(s.bucket_mb, s.static_graph) for s in fleet.seen} == {(5, True)}
    assert setting.shares == (12, 4)
    even, _ = tune_even(Fleet([0.001, 0.003]).attempt, 8, 2, 1e9, known)
    assert even == Setting((4, 4), 5, static_graph=True)


def test_even_shares_stay_even() -> None:
    fleet = Fleet([0.001, 0.003])
    setting, _ = tune_even(fleet.attempt, 9, 2, budget_s=1e9)
    assert sorted(setting.shares) == [4, 5]
    assert {s.shares for s in fleet.seen} == {setting.shares}
    assert (setting.bucket_mb, setting.static_graph) == (100, True)


# --- the page --------------------------------------------------------------------------------------------------------


def row(plan: str, predicted_s: float | None, *rounds_s: float, device: int | None = None) -> Row:
    return Row("f", "net", 12, plan, device, predicted_s, {}, 2, rounds_s)


def result() -> FleetResult:
    rows = (
        row("one-device", 2.1, 2.0, 2.0, device=0), row("one-device", 6.0, 6.0, 6.0, device=1),
        row("ddp-even", None, 3.0, 3.1), row("ddp-tuned", None, 2.0, 2.0), row("auto", 1.5, 1.5, 1.5),
    )  # fmt: skip
    net = NetResult("net", "2026-01-01T0", "2026-01-01T1", "2026-01-01T2", {}, {}, rows)
    return FleetResult("bench", "f", (("a", 1.0), ("b", 0.3)), GROUND, "python -m it", "CIFAR-10", {}).with_net(net)


def test_the_page_of_benchmarks_has_efficiencies_from_what_was_measured(tmp_path: Path) -> None:
    page = bench_page(Sources([result()]))
    # Alone 12/2 + 12/6 = 8 samples/s; auto 12/1.5 = 8, tuned 6, even 12/3.05 = 3.93.
    assert "| f | net | 12 | 8 | 0.75 | 0.49 | 0.75 | 1.00 |" in page
    assert "`auto` was faster in 1 of 1 cases; its speed was 1.33 to 1.33 times that of `ddp-tuned`" in page
    assert "2.03 to 2.03 times that of `ddp-even`" in page
    assert "Efficiency of `auto`: 1.00 to 1.00 in 1 cases." in page
    assert "| f | net | 12 | `one-device` 1 | 6 s | 2 | 0.25 | 6 s | +0.0% | 0.0% | 0.0% | 2 x 2 |" in page
    assert "| f | net | 12 | `ddp-even` | 3.05 s | 3.93 | 0.49 |  |  | 3.3% | 1.6% | 2 x 2 |" in page
    assert draw_efficiency([result()], tmp_path / "figures" / "it.png") == (tmp_path / "figures" / "it.png").exists()


# --- the worker with peers, on real processes ------------------------------------------------------------------------


def run_with_peers(group: Group, folder: str) -> None:
    job = WorkerJob(
        set="smoke-peers", fleet="straggler2", series=SETS["smoke-peers"], output=Path(folder), measurements=None,
        data_dir=None, rounds=2, round_s=0.01, alone_s=1.0, budget_s=0.2, links_budget_s=0.5, tuning_s=0.1, case_s=60.0,
        ground=GROUND, command="it",
    )  # fmt: skip
    measure, trial_s = worker.measure_job, ddp.TRIAL_S
    worker.measure_job, ddp.TRIAL_S = partial(measure, stretch_s=1e-4), 0.01
    try:
        run_fleet(group, job, None, lambda _: None)
    finally:
        worker.measure_job, ddp.TRIAL_S = measure, trial_s


@pytest.mark.slow
def test_peers_take_turns_with_plans(tmp_path: Path) -> None:
    path = tmp_path / "straggler2.two-conv-4-8.8.json"
    on_processes(2, "tests.benchmarks.test_benchmarks_ddp:run_with_peers", str(tmp_path), limit_s=150.0)
    rows = read_result(path).measured_rows()
    assert [(r.plan, r.device) for r in rows] == [
        ("each-alone", 0), ("each-alone", 1), ("one-device", 0), ("one-device", 1), ("ddp-even", None), ("ddp-tuned", None),
        ("data", None), ("auto", None),
    ]  # fmt: skip
    assert all(len(r.rounds_s) == 2 and min(r.rounds_s) > 0 for r in rows if r.plan not in ("ddp-tuned", "auto"))
    pair = [r.rounds_s for r in rows if r.plan in ("ddp-tuned", "auto")]
    assert 2 <= len(pair[0]) == len(pair[1]) <= 2 * worker.MOST_TIMES, "until their ratio is known"
    losses: Any = [r.loss for r in rows if not r.plan.startswith("ddp")]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)
    even, tuned = (next(r for r in rows if r.plan == name) for name in ("ddp-even", "ddp-tuned"))
    assert even.strategies["*"] == "batch(4,4)"
    assert sum(map(int, tuned.strategies["*"].removeprefix("batch(").removesuffix(")").split(","))) == 8
    assert tuned.predicted_s is None
