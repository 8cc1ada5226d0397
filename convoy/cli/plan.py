"""`convoy plan`: predicts the plans of a net on a fleet, and writes the chosen one."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from convoy.config.checks import check_counts, check_output
from convoy.config.option_types import passes_of_text
from convoy.errors import InputError, shown
from convoy.files import write_whole
from convoy.layout.comm_dtype import parse_comm_dtype
from convoy.model.nets import graph_of
from convoy.plan.plan import parse_outputs
from convoy.planner.in_passes import as_memory_asks, proposal, split
from convoy.planner.predict import PlanningContext, predict_all, rates_by_devices
from convoy.report.measured import remarks
from convoy.report.plans import (
    show_basis,
    show_counts,
    show_devices,
    show_passes,
    show_plan,
    show_predictions,
    show_spare,
    show_step_parts,
)
from convoy.report.screen import Screen, Wait
from convoy.simulate.described import fleet_costs
from convoy.simulate.table import read_fleet_file


def run_plan(
    net: str,
    image: tuple[int, int, int],
    classes: int,
    batch: int,
    fleet: Path,
    output: Path | None,
    *,
    optimizer: str = "sgd-momentum",
    least_energy_s: float | None = None,
    wire: str = "exact",
    outputs: str = "everywhere",
    accumulate: str = "1",
) -> None:
    """Print the predictions for a net on a fleet, measured or described; write the chosen plan if asked to.

    Args:
        optimizer: its state counts as memory.
        least_energy_s: choose by joules per image, among the plans whose step takes at most this long.
        wire: number format of what the plans send, by its name or "bf16".
        outputs: "everywhere" or "where-computed".
        accumulate: micro-batches per step, a number or "auto".

    Raises:
        InputError: sizes that cannot be, an unknown wire format or place of outputs; a fleet file with neither
            times nor classes or peaks.
        MismatchError: times of another model.
        PlanError: no plan fits the devices' memory or the limit.
    """
    if least_energy_s is not None and not 0 < least_energy_s < math.inf:
        raise InputError(f"--least-energy {least_energy_s:g}: give the seconds that a step may take, above 0")
    check_counts(batch, classes)
    if output is not None:
        check_output("--output", output)
    numbers, place, passes = parse_comm_dtype(wire), parse_outputs(outputs), _passes(accumulate)
    described, measured = read_fleet_file(fleet)
    console = Screen(visible=True).console  # as wide as its tables if there is no terminal
    with Wait(Console(stderr=True), f"planning {net}", first_s=1.0) as tell:
        tell("reading the net")
        graph = graph_of(net, image, classes)
        costs = fleet_costs(described, measured, graph, optimizer)
        context = PlanningContext.of(graph, batch, costs, described, optimizer, numbers, outputs=place)
        context = as_memory_asks(context) if passes == "auto" else split(context, passes)
        tell("predicting plans")
        rows = predict_all(context, least_energy_s)
        tell("what fewer devices would bring")
        counts = [] if least_energy_s is not None else rates_by_devices(context)
        other = None if passes == "auto" or context.passes > 1 else proposal(context, rows[-1].step_s)
    show_predictions(console, rows, context)
    show_passes(console, rows[-1], context, other)
    show_basis(console, rows[-1], context)
    for remark in [] if measured is None else remarks(measured):
        console.print(remark, soft_wrap=True)
    show_counts(console, counts, context)
    show_devices(console, rows[-1], context)
    show_step_parts(console, rows[-1], context.least(), context)
    show_spare(console, rows[-1], context)
    show_plan(console, rows[-1], context)
    names = context.names
    if output is not None:
        write_whole(output, rows[-1].plan.to_json())
        several = f" --accumulate {context.passes}" if context.passes > 1 else ""
        console.print(
            f"Written to {output}: convoy train --plan {output} --batch {batch}{several} --devices {len(names)} ..."
        )


def _passes(text: str) -> Any:
    try:
        return passes_of_text(text)
    except InputError as error:
        raise InputError(f"--accumulate {shown(text)}: {error}") from None
