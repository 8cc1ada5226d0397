"""`convoy plan`: predicts the plans of a net on a fleet, and writes the chosen one."""

import math
from pathlib import Path

from rich.console import Console

from convoy.cli.question import PlanQuestion
from convoy.config.checks import check_output
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.planner.bound import lower_bound
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import predict_all, rates_by_devices
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


def run_plan(
    question: PlanQuestion, fleet: Path, output: Path | None = None, *, least_energy_s: float | None = None
) -> None:
    """Print the predictions for a net on a fleet, measured or described; write the chosen plan if asked to.

    Args:
        least_energy_s: choose by joules per image, among the plans whose step takes at most this long.

    Raises:
        InputError, MismatchError: see `PlanQuestion.request`.
        PlanError: no plan fits the devices' memory or the limit.
    """
    if least_energy_s is not None and not 0 < least_energy_s < math.inf:
        raise InputError(f"--least-energy {least_energy_s:g}: give the seconds that a step may take, above 0")
    question.check()
    if output is not None:
        check_output("--output", output)
    known = FleetKnowledge.from_file(fleet)
    console = Screen(visible=True).console  # as wide as its tables where there is no terminal
    with Wait(Console(stderr=True), f"planning {question.net}", first_s=1.0) as tell:
        tell("reading the net")
        request = question.request(known)
        tell("predicting plans")
        rows = predict_all(request, least_energy_s)
        tell("what fewer devices would bring")
        counts = [] if least_energy_s is not None else rates_by_devices(request)
    show_predictions(console, rows, request)
    show_passes(console, rows[-1], request)
    show_basis(console, rows[-1], request)
    for remark in [] if known.measured is None else remarks(known.measured):
        console.print(remark, soft_wrap=True)
    show_counts(console, counts, request)
    show_devices(console, rows[-1], request)
    show_step_parts(console, rows[-1], lower_bound(request), request)
    show_spare(console, rows[-1], request)
    show_plan(console, rows[-1], request)
    if output is not None:
        write_whole(output, rows[-1].plan.to_json())
        several = f" --accumulate {request.micro_batches}" if request.micro_batches > 1 else ""
        console.print(
            f"Written to {output}: convoy train --plan {output} --batch {question.batch}{several} "
            f"--devices {len(request.names)} ..."
        )
