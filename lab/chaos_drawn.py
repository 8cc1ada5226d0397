"""Draw a chaos case on threads from its seed: plan, optimizer, devices and faults."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from convoy.errors import PlanError
from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Graph
from convoy.plan import strategy as strategies
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.network import Network
from lab.chaos import PLANS, Blow, Case


def plan_of(case: Case, graph: Graph) -> Plan:
    """Return a case's plan: by name, "free" (sharded weights freed after use), "auto", or "mixed" from the seed."""
    speeds = Speeds(tuple(1.0 + 0.5 * d for d in range(case.devices)))
    if case.plan == "auto":
        return candidates(PlanRequest(graph, case.batch, FleetKnowledge(given=_costs(case))))[0].plan
    if case.plan == "mixed":
        return _mixed(case, graph)
    if case.plan == "free":
        plan = named_plan("sharded", graph, case.batch, speeds)
        return replace(plan, sharded={key: replace(each, form="free") for key, each in plan.sharded.items()})
    return named_plan(case.plan, graph, case.batch, speeds)


def _costs(case: Case) -> Costs:
    """Return random slow devices with fast links, so that the planner splits layers."""
    dice = random.Random(case.seed)
    count = case.devices
    rates = tuple(Rate(speed, speed) for speed in (1e6 * dice.uniform(0.3, 1.0) for _ in range(count)))
    per_s = (10 ** dice.uniform(5.5, 8),) * count
    latency = tuple(tuple(0.0 if i == j else 1e-5 for j in range(count)) for i in range(count))
    pairs = tuple(tuple(per_s[0] for _ in range(count)) for _ in range(count))
    return Costs(
        Roofline(rates, 8),
        Network(tuple(range(count)), per_s, per_s, (1e9,) * count, latency, pairs, (0.0,) * count),
        8,
    )


def _mixed(case: Case, graph: Graph) -> Plan:
    """Return a plan with a random strategy and shares for every layer, zeros included."""
    dice = random.Random(case.seed)

    def shares(extent: int) -> Shares:
        weights = [float(dice.randint(0, 3)) for _ in range(case.devices)]
        return apportion(extent, weights if any(weights) else [1.0] * case.devices)

    layers: dict[str, Strategy] = {}
    for layer in graph.layers.values():
        if layer.kind in ("input", "parameter", "pick") or not layer.batched:
            continue
        drawn: list[Strategy | None] = [None, Batch(shares(case.batch)), One(dice.randrange(case.devices))]
        if layer.weighted and layer.kind in ("conv", "linear"):
            drawn += [Filter(shares(layer.channels_out)), Channel(shares(layer.channels_in))]
        chosen = dice.choice(drawn)
        try:
            if chosen is not None:
                strategies.check(layer, chosen, case.batch, case.devices)
                strategies.place(graph, layer, chosen, case.batch, case.devices)
                layers[layer.name] = chosen
        except PlanError:
            pass
    reduce = dice.choice(("ring", "butterfly", "direct", "star"))
    return Plan(
        "mixed", graph.fingerprint, case.devices, case.batch, layers, Batch(shares(case.batch)), reduce,
        dice.choice((1, 1, 2)),
    )  # fmt: skip


def example() -> Tensor:
    return torch.zeros(2, 2, 8, 8, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ what is drawn

ALL_PLANS = (*PLANS, "free", "auto", "mixed")


def drawn(seed: int) -> Case:
    """Draw a case from its seed: two to six devices, at least one of which survives."""
    dice = random.Random(seed)
    devices = dice.choice((2, 3, 3, 4, 4, 5, 5, 6))
    spared = dice.randrange(devices)
    struck = [device for device in range(devices) if device != spared]
    dice.shuffle(struck)
    blows: list[Blow] = []
    stops = False
    for device in struck[: max(dice.randint(1, devices - 1), dice.randint(1, devices - 1))]:
        if any(blow.beside == device for blow in blows):
            continue
        at, call = dice.randint(1, 8), dice.choice((dice.randint(1, 10), dice.randint(1, 60)))
        kind = dice.choice(("kill",) * 12 + ("term",) * 6 + ("stop",))
        if kind == "stop" and (stops or devices < 3):
            kind = "kill"
        stops |= kind == "stop"
        free = [d for d in struck if d != device and all(d not in (b.device, b.beside) for b in blows)]
        beside = dice.choice(free) if free and kind != "stop" and dice.random() < 0.2 else None
        if dice.random() < 0.3:
            blows.append(Blow(device, "doze", max(1, at - dice.randint(0, 4)), dice.randint(1, 30)))
        blows.append(Blow(device, kind, at, call, beside))
    blows = [b for i, b in enumerate(blows) if not any(b.device == a.beside for a in blows[:i])]
    several = sum(1 + (blow.beside is not None) for blow in blows if blow.kind != "doze") > 1
    return Case(
        seed, devices, dice.choice(ALL_PLANS), dice.choice(("sgd", "sgd-plain", "adam")),
        epochs=2, samples=dice.choice((48, 44, 32)), every=dice.choice((1, 1, 1, 3)), rebalance=dice.random() < 0.25,
        blows=tuple(blows), schedule=dice.choice(("cosine", "step", "one-cycle")), accumulate=dice.choice((1, 1, 2)),
        clip_norm=dice.choice((None, None, 0.5)), average=dice.random() < 0.3,
        saves=1 if several or dice.random() < 0.2 else None,
    )  # fmt: skip
