"""`convoy plan`: from a measured fleet and a net to predictions, and a plan file."""

import math
from pathlib import Path

import torch

from convoy.config.files import write_whole
from convoy.cost.table import Measurement
from convoy.errors import InputError
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.planner.predict import PlanningContext, predict_all, rates_by_devices
from convoy.report.plans import show_counts, show_devices, show_plan, show_predictions
from convoy.report.screen import Screen
from convoy.sharding.comm_dtype import parse_comm_dtype


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
) -> None:
    """Print the predictions for a net on a measured fleet; write the chosen plan if asked to.

    Args:
        optimizer: whose state counts as memory.
        least_energy_s: choose by joules per image, among the plans whose step takes at most this long.
        wire: of every plan, by its name or "bf16".

    Raises:
        InputError: sizes that cannot be, an unknown wire format, a fleet file without measured times, or measured with
            another model.
        PlanError: no plan fits the devices' memory or the limit.
    """
    if least_energy_s is not None and not 0 < least_energy_s < math.inf:
        raise InputError(f"--least-energy {least_energy_s:g}: give the seconds that a step may take, above 0")
    if batch < 1 or classes < 1:
        raise InputError(f"--batch {batch}, --classes {classes}: give 1 or more")
    numbers = parse_comm_dtype(wire)
    try:
        measured = Measurement.from_toml(fleet.read_text(encoding="utf-8"), str(fleet))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {fleet}: {error}; give a file that convoy measure wrote") from None
    channels, height, width = image
    model = build_net(net, (channels, height, width), classes)
    graph = trace(model, torch.zeros(2, channels, height, width)).graph
    costs = measured.costs(graph)
    context = PlanningContext.of(graph, batch, costs, measured.fleet, optimizer, numbers)
    console = Screen(visible=True).console  # as wide as its tables where there is no terminal
    rows = predict_all(context, least_energy_s)
    show_predictions(console, rows, context)
    if least_energy_s is None:
        show_counts(console, rates_by_devices(context), context)
    show_devices(console, rows[-1], context)
    show_plan(console, rows[-1], graph)
    names = context.names
    if output is not None:
        write_whole(output, rows[-1].plan.to_json())
        console.print(f"Written to {output}: convoy train --plan {output} --batch {batch} --devices {len(names)} ...")
