"""`convoy simulate`: writes one training step of a plan on a fleet as a Chrome trace and a picture."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from convoy.cli.question import PlanQuestion
from convoy.errors import InputError, shown, unknown_name
from convoy.files import unwritable
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import plan_auto
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.report.numbers import in_bytes
from convoy.report.plans import between
from convoy.report.timeline import draw as draw_timeline
from convoy.report.timeline import write_chrome_trace
from convoy.simulate.interval import Basis

HOW: Mapping[Basis | None, str] = {
    None: "given costs", "measured": "measured times", "rates": "rates measured with another net",
    "described": "described devices",
}  # fmt: skip
"""The source of a step's times, for a title."""


def run_step(
    out: Path,
    question: PlanQuestion,
    fleet: Path,
    plan: str,
    *,
    draw: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> list[Path]:
    """Replay one step and write `step.json` (for Perfetto or chrome://tracing) and `step.png` into a folder.

    Args:
        fleet: a fleet file. Its measured times of this net count, or else what its devices can do.
        plan: a plan by name, "auto", or a plan file.
        draw: the picture too (needs matplotlib).
        say: called with a line for each result.

    Returns:
        the files written.

    Raises:
        InputError: an unknown net or plan, a fleet without times and peaks, a folder that cannot be written.
        PlanError: a plan that does not fit the model, the batch or the fleet.
        MismatchError: times of another model.
    """
    question.check()
    if why := unwritable(out):
        raise InputError(f"cannot make the folder {shown(out)}: {why}; give one that can be made")
    known = FleetKnowledge.from_file(fleet)
    say(f"reading {question.net}")
    request = question.request(known)
    if plan == "auto":
        say(f"planning for {len(request.names)} devices")
    chosen = _plan(plan, request)
    request = replace(request, batch=chosen.batch)
    row = predict_plan(chosen, request)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {shown(out)}: {error.strerror}; give one that can be made") from None
    how = HOW[request.costs.errors.basis]
    energy = "" if row.energy is None else f", {row.energy.image_j:.4g} J/image"
    say(
        f"plan {chosen.name}, batch {chosen.batch}, {how}: {row.step_s:.3g} s a step (nine of ten: {between(row.within)}), "
        f"{row.samples_per_s:,.4g} samples/s, {row.efficiency:.1%} of the limit, "
        f"{in_bytes(row.traffic_bytes)} on the wire{energy}; {row.bound}"
    )
    for words in row.overfull:
        say(f"does not fit: {words}")
    written = [write_chrome_trace(row.timeline, out / "step.json", request.names)]
    if draw:
        title = f"{question.net}, plan {chosen.name}, batch {chosen.batch}, {how}"
        written.append(draw_timeline(row.timeline, out / "step.png", request.names, title))
    for path in written:
        say(f"wrote {path}")
    return written


def _plan(name: str, request: PlanRequest) -> Plan:
    if name == "auto":
        return plan_auto(request).named("auto")
    if name in PLANS:
        return request.named(name)
    if not name.endswith(".json") and not os.path.isfile(name):
        raise unknown_name("plan", name, [*PLANS, "auto", "a plan file (….json)"])
    saved = Plan.load(Path(name))
    saved.check(request.graph, len(request.names))
    return saved
