"""Defines the verbs simulate and report."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.options import PATH, app, help_of
from convoy.cli.plan_verbs import Batch, Classes, Image, Outputs, PlanQuestion
from convoy.errors import InputError, shown, unknown_name
from convoy.files import unwritable

if TYPE_CHECKING:  # these import torch
    from convoy.plan.plan import Plan
    from convoy.planner.request import PlanRequest


@app.command()
def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the trace (JSON) and the picture (HTML).", **PATH)
    ],
    net: Annotated[str, typer.Option(help=help_of("net"))] = "alexnet:4096",
    fleet: Annotated[Path | None, typer.Option(help="Fleet file, described or measured. Required.", **PATH)] = None,
    plan: Annotated[str, typer.Option(help="A plan by name, auto, or a plan file.")] = "auto",
    batch: Batch = 64,
    image: Image = "3,32,32",
    classes: Classes = 10,
    outputs: Outputs = "everywhere",
) -> None:
    """Simulate one training step of a plan on a fleet: a picture and a trace.

    The trace shows when each device computes, sends and receives; open it in Perfetto or chrome://tracing.

    Example: convoy simulate -o step --net two-conv:150:800 --fleet fleet.toml --plan hybrid --batch 256
    """
    if fleet is None:
        raise InputError(
            "convoy simulate needs a fleet: give --fleet FILE, as `convoy measure` writes it or with the devices' peaks. The "
            "study of all plans at any size is `python -m studies DIR [NET]`, in a checkout of the repository"
        )
    question = PlanQuestion(net, image, classes, batch, outputs=outputs)
    question.check()
    if why := unwritable(output):
        raise InputError(f"cannot make the folder {shown(output)}: {why}; give one that can be made")
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.prediction import predict_plan
    from convoy.report.numbers import in_bytes
    from convoy.report.page import write_step
    from convoy.report.plans import BASIS, between
    from convoy.report.timeline import write_chrome_trace
    from convoy.runlog.writer import prediction_line

    known = FleetKnowledge.from_file(fleet)
    print(f"reading {net}")
    request = question.request(known)
    if plan == "auto":
        print(f"planning for {len(request.names)} devices")
    chosen = _plan_named(plan, request)
    request = replace(request, batch=chosen.batch)
    row = predict_plan(chosen, request)
    energy = "" if row.image_j is None else f", {row.image_j:.4g} J/image"
    print(
        f"plan {chosen.name}, batch {chosen.batch}: {row.step_s:.3g} s a step (nine of ten: {between(row.within)}), "
        f"{row.samples_per_s:,.4g} samples/s, {row.efficiency:.1%} of the sum of solo throughputs, "
        f"{in_bytes(row.traffic_bytes)} sent{energy}; limited by {row.bound}"
    )
    print(f"based on {BASIS[request.costs.errors.basis]}")
    for line in row.overfull:
        print(f"does not fit: {line}")
    output.mkdir(parents=True, exist_ok=True)
    print(f"wrote {write_chrome_trace(row.timeline, output / 'step.json', request.names)}")
    title = f"{net}, plan {chosen.name}, batch {chosen.batch}"
    print(f"wrote {write_step(prediction_line(row, request), output / 'step.html', title)}")


def _plan_named(name: str, request: "PlanRequest") -> "Plan":
    from convoy.plan.plan import Plan
    from convoy.plan.presets import PLANS
    from convoy.planner.planner import plan_auto

    if name == "auto":
        return plan_auto(request).named("auto")
    if name in PLANS:
        return request.named(name)
    if not name.endswith(".json") and not os.path.isfile(name):
        raise unknown_name("plan", name, [*PLANS, "auto", "a plan file (….json)"])
    saved = Plan.load(Path(name))
    saved.check(request.graph, len(request.names))
    return saved


@app.command()
def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run, or its log file. Default: the latest one in runs.", **PATH),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file to write. Default: report.html next to the log.", **PATH),
    ] = None,
) -> None:
    """Write the HTML page of a run.

    It has the curves, throughput with prediction and limit, the plan, one step, and each device. The page needs no network.
    The page of an unfinished run shows its data so far.

    Example: convoy report runs/2026-11-21-19.37.45-two-conv-50-500
    """
    from convoy.report.page import write_report
    from convoy.runlog.directory import runs_folder
    from convoy.runlog.reader import newest_run

    print(f"wrote {write_report(run or newest_run(runs_folder()), output)}")
