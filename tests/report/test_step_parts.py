"""What a step is made of on the device that ends last: by a timeline made by hand, by a replay, and in the table."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from convoy.planner.bound import LowerBound
from convoy.planner.predict import predict_plan
from convoy.report.step_parts import show_step_parts, step_parts
from convoy.simulator.events import Event, Timeline
from tests.planner.test_bound import two_devices
from tests.simulator.test_simulate import hosts

BY_HAND = (
    Event(0, "compute", "a forward", 0.0, 2.0, 0),
    Event(1, "compute", "a forward", 0.0, 3.0, 0),
    Event(1, "compute", "Move 1 copies", 3.0, 3.5, 1),
    Event(0, "wait", "Move 1", 2.0, 6.0, 1),
    Event(1, "send", "Move 1", 4.0, 6.0, 1, 0, 8),
    Event(0, "receive", "Move 1", 4.0, 6.0, 1, 1, 8),
    Event(0, "compute", "SumGradients 2 copies", 5.0, 5.25, 2),  # on the second lane
    Event(0, "compute", "a backward", 6.0, 10.0, 3),
    Event(0, "receive", "SumGradients 2", 9.0, 11.0, 2, 1, 8),
    Event(0, "compute", "optimizer", 11.0, 12.0, 4),
)


def test_each_second_counts_once_for_what_the_device_does_or_waits_for() -> None:
    """Half a second of latency: from 2 to 3.5 it waits for the other device, until 4 for the first byte."""
    network = hosts(2, latency_s=0.5)
    parts = step_parts(Timeline(BY_HAND, 12.0, (6.0, 3.0), (4.0, 0.0)), network)
    assert (parts.device, parts.layers_s, parts.optimizer_s, parts.handling_s) == (0, 6.0, 1.0, 0.25)
    assert (parts.wire_s, parts.latency_s, parts.others_s) == (2.75, 0.5, 1.5)
    assert parts.step_s == 12.0
    loss = Event(0, "compute", "loss", 5.25, 5.5, 5)
    with_loss = step_parts(Timeline((*BY_HAND, loss), 12.0, (6.0, 3.0), (4.0, 0.0)), network)
    assert (with_loss.loss_s, with_loss.wire_s, with_loss.step_s) == (0.25, 2.5, 12.0)


def test_the_parts_of_a_replay_and_of_the_bound_sum_to_them() -> None:
    _, context = two_devices()
    least = context.least()
    assert min(least.layers_s, least.updates_s) > 0
    assert least.layers_s + least.updates_s + least.apart_s == least.compute_s
    for name in ("data", "model", "master"):
        row = predict_plan(context.named(name), context)
        parts = step_parts(row.timeline, context.costs.network)
        assert parts.step_s == pytest.approx(row.step_s)
        assert min(parts.wire_s, parts.layers_s) > 0


def test_the_table_has_what_is_beyond_the_bound() -> None:
    _, context = two_devices()
    row = predict_plan(context.named("data"), context)
    row = replace(row, timeline=Timeline(BY_HAND, 12.0, (6.0, 3.0), (4.0, 0.0)))
    console = Console(file=io.StringIO(), width=200)
    show_step_parts(console, row, LowerBound(5.0, 2.0, wire_s=8.0, device=1), context)
    told = [re.findall(r"[-+]?[\d.]+ (?:s|ms|µs)|[\d.]+%", line) for line in console.file.getvalue().splitlines()]
    assert ["6 s", "50.0%", "5 s", "+1 s"] in told
    assert ["1 s", "8.3%", "2 s", "-1 s"] in told
    assert ["12 s", "100.0%", "8 s", "+4 s"] in told
    assert "d0, which ends last" in console.file.getvalue()
