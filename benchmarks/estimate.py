"""About how long a benchmark will take: told before it starts, from what plans would take on devices guessed by their cores."""

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.configurations import ALONE, AUTO, FSDP, IN_TURN, PEERS, Case, fleet_named
from benchmarks.predictions import Predictions, predict, rows_of
from benchmarks.rounds import FEWEST_ROUNDS
from benchmarks.runners import UNCOUNTED_STEPS
from benchmarks.targets import TUNED
from benchmarks.tasks import task_of
from benchmarks.tuning import BUCKETS_MB, FINALISTS, LONG_S
from benchmarks.worker import WorkerJob
from convoy.fleet import Fleet
from convoy.model.nets import graph_of
from convoy.plan.presets import PLANS
from studies.roofline import roofline_costs

FLOP_PER_CORE_S = 80e9
BYTES_PER_CORE_S = 10e9
"""What a core of a server does in the convolutions of these nets, and what it reads from memory."""

START_CORE_S = 4.0
"""Importing torch, on one core."""

BESIDE_LAYERS_S = 15.0
"""Of measuring a net: what steps cost beside their layers, shares of the processor, agreeing."""

BUILD_S = 3.0
"""Tracing and sharing out one plan."""

TRIAL_STEPS, TRIAL_S = 4, 1.0
"""Of a trial in the search for DDP's shares and options, where steps are short, and seconds beside them."""

MOST_TRIALS = 24
"""Of one search, the finals included."""

PLAN_CORE_S = 0.15
"""Of planning, for each pair of devices, on one core."""

PAIR_TIMES = 2.0
"""Of the rounds of all others, for `auto` and tuned DDP: until their ratio is known."""

SETTLING_STEPS = 30
"""Of `auto` beside peers, before its steps count: a trial of two plans, and rebalancing."""


def estimate_s(job: WorkerJob, cases: Sequence[Case]) -> float:
    """About the seconds of these cases of one fleet."""
    fleet = guessed(fleet_named(job.fleet))
    start_s = START_CORE_S / min(device.cores or 1.0 for device in fleet.devices)
    nets = dict.fromkeys(case.net for case in cases)
    nets_s = sum(_net_s(job, net, [case for case in cases if case.net == net], fleet) for net in nets)
    return start_s + job.links_budget_s + nets_s


def guessed(fleet: Fleet) -> Fleet:
    """The fleet with a roofline for every device."""
    devices = [
        replace(
            device, peak_flop_per_s=(device.cores or 1.0) * FLOP_PER_CORE_S,
            memory_bytes_per_s=(device.cores or 1.0) * BYTES_PER_CORE_S,
        )
        for device in fleet.devices
    ]  # fmt: skip
    return replace(fleet, devices=tuple(devices))


def _net_s(job: WorkerJob, net: str, cases: Sequence[Case], fleet: Fleet) -> float:
    task = task_of(net)
    graph, costs = graph_of(net, task.image, task.classes), roofline_costs(fleet)
    seconds = job.budget_s + BESIDE_LAYERS_S
    planning_s = PLAN_CORE_S * len(fleet.devices) ** 2 / (fleet.devices[0].cores or 1.0)
    for index, case in enumerate(cases):  # not auto: the planner takes seconds for each
        predictions = predict(replace(case, plans=tuple(PLANS)), graph, costs, fleet)
        seconds += planning_s + case_s(job, case, predictions, is_first=index == 0)
    return seconds


def case_s(job: WorkerJob, case: Case, predictions: Predictions, *, is_first: bool = True) -> float:
    """About the seconds of one case, at most. `auto` is taken to be as fast as the best plan by name, or one device."""
    plans = dict(predictions.plans)
    best = min(plans.values(), key=lambda plan: plan.step_s)
    plans[AUTO] = replace(best, step_s=min(best.step_s, *predictions.solo_s))
    compute_s = 1 / sum(1 / each_s for each_s in predictions.solo_s)
    rows = rows_of(case, replace(predictions, plans=plans), job.round_s)
    setup_s = rounds_s = alone_s = 0.0
    most = 1.0
    for row in rows:
        step_s = row.predicted_s or 0.0
        round_s = (row.steps + UNCOUNTED_STEPS) * step_s
        if row.plan == ALONE:
            alone_s = max(alone_s, _capped(job, row.steps * step_s))
            continue
        if row.plan == IN_TURN:
            alone_s += _capped(job, row.steps * step_s)
            continue
        if row.plan in PEERS:
            step_s = plans["data" if row.plan == "ddp-even" else "data-by-speed"].step_s
            is_long = step_s >= LONG_S
            round_s = step_s if is_long and row.plan != FSDP else (row.steps + UNCOUNTED_STEPS) * step_s
            setup_s += 0.0 if row.plan == FSDP else search_s(job.tuning_s, step_s, compute_s, is_first=is_first)
        else:
            setup_s += BUILD_S
            if row.plan == AUTO and set(case.plans) & set(PEERS):
                setup_s += SETTLING_STEPS * step_s
        rounds_s += round_s
        if {AUTO, TUNED} <= set(case.plans):
            most = PAIR_TIMES
    rounds = max(FEWEST_ROUNDS, min(job.rounds * most, job.case_s / rounds_s + 1)) if rounds_s else 0.0
    return setup_s + rounds * rounds_s + alone_s


def search_s(tuning_s: float, step_s: float, compute_s: float = 0.0, *, is_first: bool = True) -> float:
    """About the seconds of one search for DDP's shares and options, at most.

    Args:
        compute_s: of the step, without communication.
        is_first: whether this is the first batch of a net; the others take its options over.
    """
    if step_s >= LONG_S:
        trial_s = 2 * step_s + compute_s
        return trial_s * max(1, min(MOST_TRIALS, math.ceil(tuning_s / trial_s)))
    trial_s = TRIAL_STEPS * step_s + TRIAL_S
    options_s = (len(BUCKETS_MB) + 4) * trial_s if is_first else 2 * trial_s
    return min(max(tuning_s, options_s) + FINALISTS * trial_s, MOST_TRIALS * trial_s)


def _capped(job: WorkerJob, round_s: float) -> float:
    """Seconds of a device alone: until it has had enough, two rounds at least."""
    return round_s * min(job.rounds, max(2.0, job.alone_s / round_s))
