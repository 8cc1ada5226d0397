"""The DDP and FSDP peers: gradients match one device for any shares, and the search finds the best setting."""

import copy

import pytest
import torch
import torch.nn.functional as F

from benchmarks.ddp import UNCOUNTED_STEPS, DdpRunner, FsdpRunner, leave, meet
from benchmarks.runners import sgd
from benchmarks.tuning import Setting, Trial, tune
from benchmarks.wire import Gradients, Wire, buckets
from convoy.comm.group import Group
from convoy.data import Images
from convoy.layout.shares import Shares
from convoy.model.nets import build_net
from convoy.train.loader import Loader
from tests.support.processes import on_processes

STEPS = 3


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
        ([7, 0, 1], False, True, False),
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


@pytest.mark.parametrize("shares", [[7, 0, 1]])
def test_fsdp_steps_match_one_device(shares: list[int]) -> None:
    expected = trained_alone(8, STEPS)
    for found in on_processes(3, "tests.benchmarks.test_benchmarks_ddp:train_fsdp", shares):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-10, abs=1e-14), name


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


def test_slow_rank_can_get_no_samples() -> None:
    """It takes 300 ms per sample; the others process all 8 in 40 ms."""
    fleet = Fleet([0.01, 0.01, 0.3])
    assert tune(fleet.attempt, 8, [1.0, 1.0, 1.0], budget_s=1e9).setting.shares == (4, 4, 0)


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


# --- the page --------------------------------------------------------------------------------------------------------


# --- the worker with peers, on real processes ------------------------------------------------------------------------
