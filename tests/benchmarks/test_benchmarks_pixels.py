"""A net with a label per pixel in the benchmarks: outputs stay local, and it trains as on one device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tasks, worker
from benchmarks.configurations import AUTO, SETS, Series, fleet_named
from benchmarks.ddp import DdpRunner, FsdpRunner, leave, meet
from benchmarks.hardware import Ground
from benchmarks.predictions import predict
from benchmarks.results import read_result
from benchmarks.runners import UNCOUNTED_STEPS, ConvoyRunner, sgd, train_steps
from benchmarks.tasks import PixelImages, Task, images_of, task_of
from benchmarks.tuning import Setting
from benchmarks.worker import WorkerJob, run_fleet
from convoy.comm.group import Group
from convoy.model.nets import build_net, graph_of
from convoy.plan.compile import compile_all
from convoy.plan.device_program import ExchangeRound, PlannedMessage
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move
from convoy.train.loader import Loader
from studies.roofline import roofline_costs
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

SMALL = Task((3, 32, 32), 5, per_pixel=True, kept=24)
BATCH = 8
GROUND = Ground("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", "abc")


def images() -> PixelImages:
    made = images_of(SMALL, None)
    assert isinstance(made, PixelImages)
    return made


def net() -> torch.nn.Module:
    return build_net("unet:2", SMALL.image, SMALL.classes)


def trained_alone(steps: int) -> tuple[float, list[list[float]]]:
    """Return the first loss and the later weights of plain PyTorch."""
    model = net()
    first = train_steps(model, sgd(model), iter(Loader(images(), BATCH, drop_last=True)), steps)
    return first, flat(model)


def flat(model: torch.nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


# --- what travels ----------------------------------------------------------------------------------------------------


def test_no_pixel_output_is_sent() -> None:
    """Check every plan that `auto` may try: no message holds logits or their gradient, 88 MB each."""
    (series,) = [each for each in SETS["lab"] if (each.fleet, each.net) == ("mixed4", "unet:8")]
    (case,) = series.cases()
    task, described = task_of(case.net), fleet_named(case.fleet)
    devices = [
        replace(each, peak_flop_per_s=(each.cores or 1) * 80e9, memory_bytes_per_s=(each.cores or 1) * 10e9)
        for each in described.devices
    ]
    fleet = replace(described, devices=tuple(devices))
    graph = graph_of(case.net, task.image, task.classes)
    found = predict(replace(case, plans=("data-by-speed", AUTO)), graph, roofline_costs(fleet), fleet)
    logits = (case.batch, task.classes, *task.image[1:])

    def with_logits(plan: Plan) -> list[PlannedMessage]:
        steps = lower(plan, graph)
        moved = {each.id for each in steps.steps if isinstance(each, Move) and each.reads.shape == logits}
        operations = [op for each in compile_all(steps, graph) for op in (*each.forward, *each.backward)]
        rounds = [op for op in operations if isinstance(op, ExchangeRound) and op.step in moved]
        return [message for each in rounds for message in each.sends]

    plans = [Plan.from_json(each.plan) for each in (*found.plans.values(), *found.others)]
    assert [plan.name for plan in plans][:2] == ["data-by-speed", "auto"]
    for plan in plans:
        assert not with_logits(plan)
        copies = sum(op.size for op in with_logits(replace(plan, outputs="everywhere")))
        assert copies == 3 * 16 * 21 * 256 * 256, "each sample's logits to three others"


def by_speed() -> tuple[torch.nn.Module, Plan]:
    model = net()
    graph = graph_of("unet:2", SMALL.image, SMALL.classes)
    plan = named_plan("data-by-speed", graph, BATCH, Speeds((3.0, 1.0)))
    return model, replace(plan, outputs="where-computed")


def test_step_sends_only_gradients_and_two_loss_values() -> None:
    model, plan = by_speed()
    first, weights = trained_alone(UNCOUNTED_STEPS + 1)

    def work(group: Group) -> tuple[float | None, int, list[list[float]]]:
        runner = ConvoyRunner(model, plan, group, images(), BATCH)
        loss = runner.wake()
        group.clear_counters()
        runner.train(1)
        sent = sum(group.sent_bytes)
        return loss, sent, flat(runner._part)

    rows = run_on_threads(2, work)
    gradients = sum(lower(plan, graph_of("unet:2", SMALL.image, SMALL.classes)).traffic(4).values())
    assert sum(sent for _, sent, _ in rows) == gradients + 2 * 2 * 8
    for loss, _, found in rows:
        assert loss == pytest.approx(first, rel=1e-5)
        for own, expected in zip(found, weights, strict=True):
            assert own == pytest.approx(expected, rel=1e-3, abs=1e-5)


# --- the peers -------------------------------------------------------------------------------------------------------


def train_peer(group: Group, name: str, shares: list[int]) -> list[list[float]]:
    meet(group)
    peer: Any
    if name == "ddp":
        peer = DdpRunner(net(), Setting(tuple(shares)), group.device, images())
    else:
        peer = FsdpRunner(net(), shares, group.device, images())
    try:
        peer.wake()
        peer.train(1)
        if name == "ddp":
            return flat(peer._model.module)
        return [p.full_tensor().detach().flatten().tolist() for p in peer._model.parameters()]
    finally:
        peer.rest()
        leave()


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_peers_train_a_pixel_net_as_one_device(name: str) -> None:
    _, weights = trained_alone(UNCOUNTED_STEPS + 1)
    for found in on_processes(2, "tests.benchmarks.test_benchmarks_pixels:train_peer", name, [6, 2]):
        for own, expected in zip(found, weights, strict=True):
            assert own == pytest.approx(expected, rel=1e-3, abs=1e-5)


# --- the cell --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pixel_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure, predict and train with small images, on threads."""
    monkeypatch.setattr(tasks, "PIXELS", SMALL)
    measure = worker.measure_job
    quick = lambda *given: measure(*given[:-1], replace(given[-1], slice_s=1e-4))  # noqa: E731
    monkeypatch.setattr(worker, "measure_job", quick)
    series = Series("straggler2", "unet:2", (BATCH,), ("data-by-speed", AUTO))
    job = WorkerJob(
        set="", fleet="straggler2", series=(series,), output=tmp_path, measurements=None, data_dir=None, rounds=2, round_s=0.01,
        alone_s=1.0, budget_s=0.1, links_budget_s=0.1, tuning_s=0.1, case_s=60.0, ground=GROUND, command="it",
    )  # fmt: skip
    run_on_threads(2, lambda group: run_fleet(group, job, None, lambda _: None), timeout_s=60.0)
    result = read_result(tmp_path / "straggler2.unet-2.8.json")
    assert result.data == "random images of 32x32 with 5 classes of pixels"
    rows = {row.plan: row for row in result.measured_rows()}
    assert list(rows) == ["data-by-speed", "auto"]
    first, _ = trained_alone(1)
    for row in rows.values():
        assert row.loss == pytest.approx(first, rel=1e-5)
        assert len(row.rounds_s) == 2
    assert rows["auto"].least_s is not None
    assert 0 < rows["auto"].least_s <= rows["auto"].predicted_s * 1.001
    assert rows["data-by-speed"].least_s is None
