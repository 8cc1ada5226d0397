"""The figure of "How predictions work": one training step as the event simulation plays it, with overlap and without.

python -m docs.figures_step         # writes docs/figures/step-overlap.svg
"""

from pathlib import Path

import torch

from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.presets import named_plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.request import PlanRequest
from convoy.simulate.events import Activity, Event, Timeline
from convoy.simulate.simulator import simulate
from docs.drawing import Drawing, write
from studies.fleets import layer_speeds
from studies.roofline import roofline_costs

FOLDER = Path(__file__).parent / "figures"

NET, BATCH, PLAN = "two-conv:150:800", 16, "hybrid"
GFLOP_PER_S = (80.0, 50.0, 30.0)
ROWS: tuple[Activity, ...] = ("compute", "send", "receive")
COLOURS = {"forward": "#0072B2", "backward": "#56B4E9", "send": "#E69F00", "receive": "#009E73", "optimizer": "#CC79A7"}


def figures() -> dict[str, Drawing]:
    """The figure under the name of its file."""
    return {"step-overlap.svg": step_figure()}


def fleet() -> Fleet:
    """Three hosts that are only described: unequal processors, 1 Gbit/s between them."""
    rates = {f"{name}-cpu": rate for name, rate in zip("abc", GFLOP_PER_S, strict=True)}
    devices = [
        Device(name, name[0], "cpu", peak_flop_per_s=rate * 1e9, memory_bytes_per_s=2e10)
        for name, rate in rates.items()
    ]
    return Fleet(tuple(Host(name) for name in "abc"), tuple(devices), Nic(125e6, 125e6, 5e-5))


def replays() -> tuple[Timeline, Timeline]:
    """The step without and with overlap."""
    graph = trace(build_net(NET, (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    costs = roofline_costs(fleet())
    steps = lower(
        named_plan(PLAN, graph, BATCH, layer_speeds(PlanRequest(graph, BATCH, FleetKnowledge(given=costs)))), graph
    )
    return simulate(steps, graph, costs, overlap=False), simulate(steps, graph, costs)


def step_figure() -> Drawing:
    """Time to the right; three rows for each device."""
    awaited, overlapped = replays()
    drawing = Drawing(720, 456, "One training step as it is simulated, without overlap and with it")
    scale = 560 / awaited.step_s
    _timeline(drawing, 14, "Everything awaited where it stands", awaited, scale)
    _timeline(drawing, 218, "Communication overlaps computation", overlapped, scale)
    x = 130.0
    for kind, colour in COLOURS.items():
        drawing.box(x, 430, 12, 12, colour)
        drawing.text(x + 18, 440, kind, "small", "start")
        x += 110
    return drawing


def _timeline(drawing: Drawing, top: float, title: str, timeline: Timeline, scale: float) -> None:
    drawing.text(20, top + 16, f"{title}: {timeline.step_s * 1e3:.0f} ms", "strong", "start")
    for device, part in enumerate(timeline.compute_s):
        y = top + 30 + 56 * device
        drawing.text(20, y + 18, f"device {device}", "", "start")
        drawing.text(20, y + 32, f"computes {part / timeline.step_s:.0%}", "small", "start")
        for row, activity in enumerate(ROWS):
            for event in timeline.events:
                if (event.device, event.activity) == (device, activity):
                    width = max(0.3, (event.end_s - event.start_s) * scale)
                    drawing.box(130 + event.start_s * scale, y + 15 * row, width, 13, COLOURS[_kind(event)])
        drawing.rule(130 + timeline.step_s * scale, y, 130 + timeline.step_s * scale, y + 44)


def _kind(event: Event) -> str:
    if event.activity != "compute":
        return event.activity
    return next((phase for phase in ("backward", "optimizer") if phase in event.label.split()), "forward")


if __name__ == "__main__":
    for path in write(FOLDER, figures()):
        print(path)
