"""`convoy simulate`: writes one training step of a plan on a fleet as a Chrome trace and a picture."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from convoy.config.checks import check_counts
from convoy.errors import InputError, shown, unknown_name
from convoy.files import unwritable
from convoy.model.nets import graph_of
from convoy.plan.plan import Plan, parse_outputs
from convoy.plan.presets import PLANS, named_plan
from convoy.planner.predict import PlanningContext, predict_plan
from convoy.planner.speeds import predicted_speeds
from convoy.report.numbers import in_bytes
from convoy.report.plans import between
from convoy.report.timeline import draw as draw_timeline
from convoy.report.timeline import write_chrome_trace
from convoy.simulate.described import fleet_costs
from convoy.simulate.interval import Basis
from convoy.simulate.table import read_fleet_file

HOW: Mapping[Basis | None, str] = {
    None: "given costs", "measured": "measured times", "rates": "rates measured with another net",
    "described": "described devices",
}  # fmt: skip
"""The source of a step's times, for a title."""


def run_step(
    out: Path,
    net: str,
    fleet: Path,
    plan: str,
    batch: int,
    image: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    *,
    outputs: str = "everywhere",
    draw: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> list[Path]:
    """Replay one step and write `step.json` (for Perfetto or chrome://tracing) and `step.png` into a folder.

    Args:
        fleet: a fleet file. Its measured times of this net count, or else what its devices can do.
        plan: a plan by name, "auto", or a plan file.
        outputs: "everywhere" or "where-computed"; a plan file says its own.
        draw: the picture too (needs matplotlib).
        say: called with a line for each result.

    Returns:
        the files written.

    Raises:
        InputError: an unknown net or plan, a fleet without times and peaks, a folder that cannot be written.
        PlanError: a plan that does not fit the model, the batch or the fleet.
        MismatchError: times of another model.
    """
    check_counts(batch, classes)
    place = parse_outputs(outputs)
    if why := unwritable(out):
        raise InputError(f"cannot make the folder {shown(out)}: {why}; give one that can be made")
    described, measured = read_fleet_file(fleet)
    say(f"reading {net}")
    graph = graph_of(net, image, classes)
    costs = fleet_costs(described, measured, graph)
    if plan == "auto":
        say(f"planning for {len(described.devices)} devices")
    context = PlanningContext.of(graph, batch, costs, described, outputs=place)
    chosen = _plan(plan, context, len(described.devices))
    if chosen.batch != batch:
        context = PlanningContext.of(graph, chosen.batch, costs, described)
    row = predict_plan(chosen, context)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {shown(out)}: {error.strerror}; give one that can be made") from None
    how = HOW[costs.errors.basis]
    energy = "" if row.energy is None else f", {row.energy.image_j:.4g} J/image"
    say(
        f"plan {chosen.name}, batch {chosen.batch}, {how}: {row.step_s:.3g} s a step (nine of ten: {between(row.within)}), "
        f"{row.samples_per_s:,.4g} samples/s, {row.efficiency:.1%} of the limit, "
        f"{in_bytes(row.traffic_bytes)} on the wire{energy}; {row.bound}"
    )
    for words in row.overfull:
        say(f"does not fit: {words}")
    written = [write_chrome_trace(row.timeline, out / "step.json", context.names)]
    if draw:
        title = f"{net}, plan {chosen.name}, batch {chosen.batch}, {how}"
        written.append(draw_timeline(row.timeline, out / "step.png", context.names, title))
    for path in written:
        say(f"wrote {path}")
    return written


def _plan(name: str, context: PlanningContext, devices: int) -> Plan:
    if name == "auto":
        return context.candidates()[0].plan.named("auto")
    if name in PLANS:
        made = named_plan(
            name, context.graph, context.batch, predicted_speeds(context.graph, context.batch, context.costs)
        )
        return replace(made, outputs=context.outputs)
    if not name.endswith(".json") and not os.path.isfile(name):
        raise unknown_name("plan", name, [*PLANS, "auto", "a plan file (….json)"])
    saved = Plan.load(Path(name))
    saved.check(context.graph, devices)
    return saved
