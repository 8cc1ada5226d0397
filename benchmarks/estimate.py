"""About how long a benchmark will take: told before it starts, from what plans would take on devices guessed by their cores."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.configurations import ALONE, AUTO, IN_TURN, PEERS, Case, fleet_named
from benchmarks.predictions import Predictions, predict, rows_of
from benchmarks.runners import UNCOUNTED_STEPS
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

DDP_TRIALS, KNOWN_TRIALS, TRIAL_STEPS = 6, 3, 4
"""Of the search for DDP's shares and options: at the first batch of a net, and at the others, which take its options over."""

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
    graph, costs = graph_of(net), roofline_costs(fleet)
    seconds = job.budget_s + BESIDE_LAYERS_S
    for index, case in enumerate(cases):  # not auto: the planner takes seconds for each
        predictions = predict(replace(case, plans=tuple(PLANS)), graph, costs, fleet)
        seconds += case_s(job, case, predictions, is_first=index == 0)
    return seconds


def case_s(job: WorkerJob, case: Case, predictions: Predictions, *, is_first: bool = True) -> float:
    """About the seconds of one case. `auto` is taken to be as fast as the best plan by name."""
    plans = dict(predictions.plans)
    plans[AUTO] = min(plans.values(), key=lambda plan: plan.step_s)
    rows = rows_of(case, replace(predictions, plans=plans), job.round_s)
    setup_s = rounds_s = 0.0
    alone = [row for row in rows if row.plan == ALONE]
    if alone:
        rounds_s += _capped(job, max(row.steps * (row.predicted_s or 0.0) for row in alone))
    for row in rows:
        if row.plan == IN_TURN:
            rounds_s += _capped(job, row.steps * (row.predicted_s or 0.0))
        elif row.plan in PEERS and row.plan != ALONE:
            step_s = plans["data" if row.plan == "ddp-even" else "data-by-speed"].step_s
            setup_s += (DDP_TRIALS if is_first else KNOWN_TRIALS) * TRIAL_STEPS * step_s
            rounds_s += job.rounds * (row.steps + UNCOUNTED_STEPS) * step_s
        elif row.plan != ALONE:
            setup_s += BUILD_S
            if row.plan == AUTO and set(case.plans) & set(PEERS):
                setup_s += SETTLING_STEPS * (row.predicted_s or 0.0)
            rounds_s += job.rounds * (row.steps + UNCOUNTED_STEPS) * (row.predicted_s or 0.0)
    return setup_s + min(rounds_s, job.case_s)


def _capped(job: WorkerJob, round_s: float) -> float:
    """Seconds of a device alone: until it has had enough, two rounds at least."""
    return round_s * min(job.rounds, max(2.0, job.alone_s / round_s))
