"""`convoy plan`: from a measured fleet and a net to predictions, and a plan file."""

from pathlib import Path

import torch
from rich.console import Console

from convoy.errors import InputError
from convoy.files import write_whole
from convoy.measurement import Measurement
from convoy.nets import build_net
from convoy.planner import solo_speeds
from convoy.prospect import fewer_and_more, prospects
from convoy.report.plans import show_counts, show_plan, show_prospects
from convoy.trace import trace


def forecast(net: str, image: tuple[int, ...], classes: int, batch: int, fleet: Path, output: Path | None) -> None:
    """Print the predictions for a net on a measured fleet; write the chosen plan if asked to.

    Raises:
        InputError: sizes that cannot be, a fleet file without measured times, or measured with another model.
    """
    if len(image) != 3 or min(image) < 1:
        raise InputError(f"--image {','.join(map(str, image))}: give channels, height and width, e.g. 3,32,32")
    if batch < 1 or classes < 1:
        raise InputError(f"--batch {batch}, --classes {classes}: give 1 or more")
    try:
        measured = Measurement.from_toml(fleet.read_text(encoding="utf-8"), str(fleet))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {fleet}: {error}; give a file that convoy measure wrote") from None
    channels, height, width = image
    model = build_net(net, (channels, height, width), classes)
    graph = trace(model, torch.zeros(2, channels, height, width)).graph
    costs = measured.costs(graph)
    names = [device.name for device in measured.fleet.devices]
    speeds = solo_speeds(graph, batch, costs)
    rows = prospects(graph, batch, costs, names)
    console = Console(highlight=False)
    show_prospects(console, rows, speeds, names)
    show_counts(console, fewer_and_more(graph, batch, costs, speeds), speeds, names)
    show_plan(console, rows[-1], graph)
    if output is not None:
        write_whole(output, rows[-1].plan.to_json())
        console.print(f"Written to {output}: convoy train --plan {output} --batch {batch} --devices {len(names)} ...")
