"""The DDP and FSDP peers: gradients match one device for any shares, and the search finds the best setting."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import ddp, tuning, worker
from benchmarks.bench_page import Sources, bench_page
from benchmarks.configurations import SETS, fleet_named
from benchmarks.ddp import UNCOUNTED_STEPS, DdpRunner, FsdpRunner, leave, meet
from benchmarks.figure import draw_efficiency
from benchmarks.hardware import Ground
from benchmarks.results import FleetResult, NetResult, Row, read_result
from benchmarks.runners import sgd
from benchmarks.tuning import Setting, Trial, tune, tune_even
from benchmarks.wire import Gradients, Wire, buckets
from benchmarks.worker import WorkerJob, run_fleet
from convoy.comm.group import AloneGroup, Group
from convoy.data import Images
from convoy.layout.shares import Shares
from convoy.model.nets import build_net
from convoy.train.loader import Loader
from tests.support.processes import on_processes

STEPS = 3
GROUND = Ground("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", "abc")


def images() -> Images:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(40) % 10, 10, (0.5,) * 3, (0.3,) * 3, torch.float64)


def trained_alone(batch: int, steps: int) -> dict[str, list[float]]:
    """Return the last gradients and the weights of plain PyTorch."""
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
def test_ddp_gradients_match_one_device(shares: Shares, static_graph: bool, between: bool, zero: bool) -> None:
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
        runner.rest()
        leave()


@pytest.mark.parametrize("shares", [[4, 3, 1], [7, 0, 1]])
def test_fsdp_steps_match_one_device(shares: list[int]) -> None:
    expected = trained_alone(8, STEPS)
    for found in on_processes(3, "tests.benchmarks.test_benchmarks_ddp:train_fsdp", shares):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-10, abs=1e-14), name


class Recorded:
    """A runner with known seconds, on a clock that only it advances."""

    now_s = 0.0

    def __init__(self, _model: Any, setting: Setting, _rank: int, _images: Any) -> None:
        self.step_s = 2.0 + setting.bucket_mb / 100
        self.story: list[str] = []
        self.stays = False

    def build(self) -> None:
        self.story.append("build")

    def train(self, steps: int) -> None:
        self.story.append(f"train {steps}")
        Recorded.now_s += steps * self.step_s

    def compute(self, steps: int) -> Gradients:
        self.story.append(f"compute {steps}")
        return Gradients((4,), ((1.5,),))

    def rest(self) -> None:
        if not self.stays:
            self.story.append("rest")


def test_best_long_trial_is_reused_for_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another first step of DDP takes as long as a counted one: 26 s each on a slow link."""
    monkeypatch.setattr(ddp, "DdpRunner", Recorded)
    monkeypatch.setattr(ddp.time, "perf_counter", lambda: Recorded.now_s)
    trials = ddp._Trials(AloneGroup(torch.device("cpu")), torch.nn.Linear(1, 1), images())
    made: list[Recorded] = []
    make = trials._made
    monkeypatch.setattr(trials, "_made", lambda setting: made.append(make(setting)) or made[-1])
    first = trials.attempt(Setting((8,), 25), math.inf)
    assert (first.first_s, first.step_s, first.compute_s, first.given_up) == (2.25, 2.25, (1.5,), False)
    slower = trials.attempt(Setting((8,), 100), 2.5)
    assert (slower.step_s, slower.given_up, slower.gradients) == (3.0, True, None)
    trials.attempt(Setting((8,), 5), math.inf)
    whole = ["build", "train 1", "train 1", "compute 1"]
    assert [each.story for each in made] == [[*whole, "rest"], ["build", "train 1", "rest"], whole]
    chosen = trials.runner(Setting((8,), 5), stays=True)
    assert chosen is made[-1]
    chosen.rest()
    assert made[-1].story == whole
    other = trials.runner(Setting((8,), 25), stays=False)
    assert other is made[-1] is not chosen, "a setting that is not ready is made anew"


# --- the search, on a fleet that exists only as numbers ---------------------------------------------------------------


class Fleet:
    """A simulated fleet: a step takes the slowest rank's samples and 20 ms of network, less with some options."""

    def __init__(
        self,
        sample_s: list[float],
        best_bucket: int = 100,
        network_s: float = 0.02,
        size_bytes: int = 0,
        first: float = 1.0,
    ) -> None:
        self.sample_s, self.best_bucket, self.network_s, self.first = sample_s, best_bucket, network_s, first
        self.size_bytes = size_bytes
        self.seen: list[Setting] = []

    def attempt(self, setting: Setting, first_limit_s: float) -> Trial:
        assert self.seen.count(setting) < 2, "the finals are the only second trial"
        self.seen.append(setting)
        compute_s = tuple(share * each for share, each in zip(setting.shares, self.sample_s, strict=True))
        network_s = self.network_s - 0.004 * (setting.bucket_mb == self.best_bucket) - 0.001 * setting.static_graph
        step_s = max(compute_s) + network_s
        first_s = step_s * (self.first if setting.zero else 1.0)
        if first_s > first_limit_s:
            return Trial(first_s, (), first_s, first_s, given_up=True)
        gradients = Gradients((self.size_bytes,), tuple((each,) for each in compute_s))
        return Trial(step_s, compute_s, 5 * step_s, first_s, gradients=gradients)


def test_wrong_speeds_are_corrected_by_compute_time() -> None:
    fleet = Fleet([0.001, 0.003])
    tuned = tune(fleet.attempt, 64, [1.0, 1.0], budget_s=1e9)
    assert [s.shares for s in fleet.seen[:2]] == [(32, 32), (48, 16)]
    assert tuned.setting.shares == (48, 16)
    assert (tuned.setting.bucket_mb, tuned.setting.static_graph) == (100, True)
    assert tuned.trial.step_s == pytest.approx(0.048 + 0.02 - 0.005)
    assert {each.end for each in tuned.considered} == {"tried"}
    assert str(tuned.setting) == "batch(48,16), 100 MB, static graph"


def test_neighbour_search_improves_the_corrected_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sharing only, the search starts two samples off the best, 12 and 4."""
    monkeypatch.setattr(tuning, "MOST_SHARINGS", 1)
    assert tune(Fleet([0.001, 0.003]).attempt, 16, [10.0, 6.0], budget_s=1e9).setting.shares == (12, 4)


def test_zero_budget_still_tries_correction_and_options() -> None:
    fleet = Fleet([0.001, 0.003], best_bucket=5)
    tuned = tune(fleet.attempt, 64, [1.0, 1.0], budget_s=0.0)
    assert [s.shares for s in fleet.seen[:2]] == [(32, 32), (48, 16)]
    assert (tuned.setting.shares, tuned.setting.bucket_mb) == ((48, 16), 5)
    assert len(dict.fromkeys(fleet.seen)) == 2 + len(tuning.BUCKETS_MB) + 1, "buckets, a static graph, shared updates"


def test_slow_rank_can_get_no_samples() -> None:
    """It takes 300 ms per sample; the others process all 8 in 40 ms."""
    fleet = Fleet([0.01, 0.01, 0.3])
    assert tune(fleet.attempt, 8, [1.0, 1.0, 1.0], budget_s=1e9).setting.shares == (4, 4, 0)


def test_known_options_are_reused_for_another_batch() -> None:
    known = Setting((32, 32), 5, static_graph=True)
    fleet = Fleet([0.001, 0.003])
    setting = tune(fleet.attempt, 16, [10.0, 6.0], budget_s=1e9, known=known).setting
    assert {(s.bucket_mb, s.static_graph) for s in fleet.seen} == {(5, True)}
    assert setting.shares == (12, 4)
    even = tune_even(Fleet([0.001, 0.003]).attempt, 8, 2, 1e9, known).setting
    assert even == Setting((4, 4), 5, static_graph=True)


def test_even_shares_stay_even() -> None:
    fleet = Fleet([0.001, 0.003])
    setting = tune_even(fleet.attempt, 9, 2, budget_s=1e9).setting
    assert sorted(setting.shares) == [4, 5]
    assert {s.shares for s in fleet.seen} == {setting.shares}
    assert (setting.bucket_mb, setting.static_graph) == (100, True)


SLOW = Wire(1e6, (1e6, 1e6))
"""Two ranks: a sum of 10 MB takes 10 s."""


def test_options_that_cannot_win_are_reported_and_skipped() -> None:
    """Steps of 0.3 s of computing and 10 s of wire, measured 10.32 s: no bucket and no share wins 3 % of that; shared updates
    need 5 s more. The search took more than seven minutes for such a net, and found the same."""
    fleet = Fleet([0.01, 0.01], network_s=10.02, size_bytes=10_000_000)
    tuned = tune(fleet.attempt, 60, [1.0, 1.0], budget_s=1e9, wire=SLOW)
    assert fleet.seen == [Setting((30, 30))]
    assert tuned.setting == fleet.seen[0]
    ends = {each.setting: (each.least_s, each.end) for each in tuned.considered}
    assert ends["batch(30,30), 25 MB"] == (None, "tried")
    assert ends["batch(30,30), 5 MB"] == (pytest.approx(10.3), "cannot win")
    assert ends["batch(30,30), 25 MB, shared updates"] == (pytest.approx(15.3), "cannot win")
    assert ends["batch(27,33), 25 MB"] == (pytest.approx(10.3), "cannot win"), "more samples take as long at least"


def test_long_steps_are_tried_within_the_budget_and_dropped_if_far_behind() -> None:
    """Two seconds of computing, which the network never limits, on ranks that the measuring took for equal."""
    fleet = Fleet([0.01, 0.03], network_s=1.0, first=2.0)
    tuned = tune(fleet.attempt, 64, [1.0, 1.0], budget_s=60.0, wire=Wire(1e12, (1e12, 1e12)))
    ends = {each.setting: each.end for each in tuned.considered}
    assert ends["batch(48,16), 100 MB, static graph, shared updates"] == "given up after its first step"
    assert tuned.setting == Setting((48, 16), 100, static_graph=True)
    poor = tune(
        Fleet([0.01, 0.03], network_s=1.0).attempt, 64, [1.0, 1.0], budget_s=15.0, wire=Wire(1e12, (1e12, 1e12))
    )
    assert [each.end for each in poor.considered] == ["tried", "tried", *["no time left"] * 4], (
        "a correction while any second is left"
    )
    assert poor.setting == Setting((48, 16))


def test_step_communication_time_by_hand() -> None:
    """Three gradients of 3, 1 and 2 MB, ready after 4, 2 and 3 s on the later rank; the ring takes a second for each MB."""
    gradients = Gradients((3_000_000, 1_000_000, 2_000_000), ((4.0, 2.0, 1.0), (3.0, 2.0, 3.0)))
    assert buckets([4.0, 2.0, 3.0], gradients.size_bytes, (1e6, 5e6)) == [[1], [2, 0]]
    assert buckets([4.0, 2.0, 3.0], gradients.size_bytes, (2e6, 2e6)) == [[1, 2], [0]]
    # 2 + 6 s from the first on, 4 + 5 from the second; with three buckets 3 + 5 and 4 + 3; with one 4 + 6.
    assert SLOW.least_s(gradients, (1e6, 5e6)) == pytest.approx(9.0)
    assert SLOW.least_s(gradients, (1e6, 1e6)) == pytest.approx(8.0)
    assert SLOW.least_s(gradients, (1e9, 1e9)) == pytest.approx(10.0)
    # Half of the parameters come to each rank after the update.
    assert SLOW.least_s(gradients, (1e9, 1e9), broadcasts=True) == pytest.approx(13.0)
    scaled = gradients.scaled((4, 4), (2, 6))
    assert scaled.ready_s == ((2.0, 1.0, 0.5), (3.0, 2.0, 3.0))


def test_ring_is_limited_by_the_slowest_link() -> None:
    """lab8: 100 Mbit/s in each room, 50 from room to room, which the ring crosses once each way."""
    wire = Wire.of(fleet_named("lab8"))
    assert wire is not None
    assert wire.ring_s(8e6) == pytest.approx(14e6 / 6.25e6)
    assert wire.receive_bytes_per_s == (12.5e6,) * 8
    four = fleet_named("mixed4")
    together = replace(four, hosts=four.hosts[:1], devices=tuple(replace(d, host="a") for d in four.devices))
    assert Wire.of(together) is None, "bytes that no card carries"


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


def test_page_compares_auto_with_tuned_ddp_and_single_devices(tmp_path: Path) -> None:
    page = bench_page(Sources([result()]))
    assert "`auto` was faster than tuned DDP in 1 of 1 cases: 1.33 to 1.33 times its speed." in page
    assert "`auto` was faster than even DDP in 1 of 1 cases: 2.03 to 2.03 times its speed." in page
    # Alone 12/2 + 12/6 = 8 samples/s; auto 12/1.5 = 8.
    assert "Efficiency of `auto`: 1.00 to 1.00 in 1 cases." in page
    assert "`auto` has 1.33 times the speed of the fastest device alone" in page
    assert "| f | net | 12 |" in page
    assert "| f | net | 12 | 2 s, 6 s | 3.05 s | 2 s | 1.5 s |" in page
    assert draw_efficiency([result()], tmp_path / "figures" / "it.png") == (tmp_path / "figures" / "it.png").exists()


# --- the worker with peers, on real processes ------------------------------------------------------------------------


def run_with_peers(group: Group, folder: str) -> None:
    job = WorkerJob(
        set="smoke-peers", fleet="straggler2", series=SETS["smoke-peers"], output=Path(folder), measurements=None,
        data_dir=None, rounds=2, round_s=0.01, alone_s=1.0, budget_s=0.2, links_budget_s=0.5, tuning_s=0.1, case_s=60.0,
        ground=GROUND, command="it",
    )  # fmt: skip
    measure, trial_s = worker.measure_job, ddp.TRIAL_S
    worker.measure_job = lambda *given: measure(*given[:-1], replace(given[-1], slice_s=1e-4))
    ddp.TRIAL_S = 0.01
    try:
        run_fleet(group, job, None, lambda _: None)
    finally:
        worker.measure_job, ddp.TRIAL_S = measure, trial_s


@pytest.mark.slow
def test_peers_alternate_with_plans(tmp_path: Path) -> None:
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
