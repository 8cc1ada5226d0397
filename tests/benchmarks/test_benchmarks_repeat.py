"""Whether predictions repeat, and what the fall of a host's speed costs: what is made of the seconds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import typer

from benchmarks.fall import ANSWER, Fallen, Setting
from benchmarks.fall import main as fall
from benchmarks.repeat import repeats, spread
from convoy.comm.group import AloneGroup
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.nets import build_net
from convoy.model.tracing import trace


def test_a_spread_is_of_the_median() -> None:
    assert spread([1.0, 2.0, 4.0]) == 1.5


def test_what_differs_between_measurements_is_told_by_the_part_that_does() -> None:
    model = build_net("two-conv:4:6", (3, 32, 32), 10)
    traced = trace(model, torch.zeros(1, 3, 32, 32))
    group = AloneGroup(torch.device("cpu"))
    first = measure_job(group, traced, model, 8, MeasureOptions("two-conv:4:6", budget_s=0.3, slice_s=1e-4))
    slower = replace(
        first, layer=tuple(replace(p, forward_s=2 * p.forward_s, backward_s=2 * p.backward_s) for p in first.layer)
    )
    costs = replace(first, device=tuple(replace(d, step_s=d.step_s + 0.5) for d in first.device))
    found = repeats("two-conv:4:6", 8, traced.graph, [first, slower, costs])
    for part, changed in (("layers", 1), ("handling", 2)):
        same = 3 - changed
        assert found.parts[part][same] == found.parts[part][0] < found.parts[part][changed]
    assert set(found.parts["jitter"]) == set(found.parts["wire"]) == {found.parts["layers"][0]}
    assert found.plans["auto, of the first"][2] == pytest.approx(found.plans["auto, of the first"][0] + 0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--net", "alexnet:8", "--batch", "8", "--plan", "mastr"), "unknown plan .mastr.: choose one of auto"),
        (("--net", "alexnet:8", "--batch", "8", "--plan", "master", "--plan", "auto"), "1 nets, 1 batches, 2 plans"),
        (("--net", "alexnet:8"), "1 nets, 2 batches, 1 plans"),
    ],
)
def test_a_fall_is_refused_where_nets_batches_and_plans_do_not_fit(words: tuple[str, ...], message: str) -> None:
    options: dict[str, Any] = {name: [] for name in ("net", "batch", "plan")}
    for name, value in zip(words[::2], words[1::2], strict=True):
        options[name[2:]].append(int(value) if name == "--batch" else value)
    with pytest.raises(typer.BadParameter, match=message):
        fall(**{name: given or None for name, given in options.items()})


def test_the_stretches_of_a_training_around_a_fall() -> None:
    """1 s a step; 3, 2.9, ... for five steps after the fall, then 1.5; the same way back."""
    setting = Setting(fall_at=20, recover_at=60, steps=100, part=1 / 3, budget_s=1.0)
    falling = [3.0 - 0.1 * n for n in range(ANSWER)]
    steps = [*[1.0] * 20, *falling, *[1.5] * 35, *[s - 1 for s in falling], *[1.0] * 35]
    row = Fallen("net", 8, setting, (9.0,) * 15 + (1.4,) * 15, tuple(steps), (5.0, 5.0, 2.5, 2.5, 2.5), ())
    found = row.stretches()
    assert (found["before"], found["fallen: best split"], found["fallen: nobody does anything"]) == (1.0, 1.4, 2.5)
    assert [found[f"fallen: step {n + 1}"] for n in range(ANSWER)] == falling
    assert found["fallen: steps 6 to 10"] == found["fallen: later"] == 1.5
    assert found["recovered: step 1"] == 2.0
    assert found["recovered: later"] == 1.0
