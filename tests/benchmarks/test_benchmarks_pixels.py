"""A net with a label per pixel in the benchmarks: outputs stay local, and it trains as on one device."""

from dataclasses import replace

import torch

from benchmarks.configurations import AUTO, SETS, fleet_named
from benchmarks.predictions import predict
from benchmarks.tasks import Task, task_of
from convoy.model.nets import build_net, graph_of
from convoy.plan.compile import compile_all
from convoy.plan.device_program import ExchangeRound, PlannedMessage
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import Move
from studies.roofline import roofline_costs

SMALL = Task((3, 32, 32), 5, per_pixel=True, kept=24)


def net() -> torch.nn.Module:
    return build_net("unet:2", SMALL.image, SMALL.classes)


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


# --- the peers -------------------------------------------------------------------------------------------------------


# --- the cell --------------------------------------------------------------------------------------------------------
