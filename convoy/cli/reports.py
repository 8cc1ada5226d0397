"""convoy simulate, convoy report."""

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import Batch, Net, image_of
from convoy.cli.top import app
from convoy.errors import InputError


@app.command()
def simulate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the trace (JSON) and the picture (PNG).")],
    net: Net = "alexnet:4096",
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file, as convoy measure wrote it, or described. Required.")
    ] = None,
    plan: Annotated[str, typer.Option(help="A plan by name, auto, or a plan file.")] = "auto",
    batch: Batch = 64,
    image: Annotated[str, typer.Option(help="Channels, height, width of the images.")] = "3,32,32",
    classes: Annotated[int, typer.Option(help="Classes.")] = 10,
    figures: Annotated[bool, typer.Option(help="Draw the picture too (needs the extra 'plots').")] = True,
) -> None:
    """Simulate one training step of a plan on a fleet, and write who computes, sends and receives when.

    The result is a picture and a trace for Perfetto or chrome://tracing.

    Example: convoy simulate -o step --net two-conv:150:800 --fleet fleet.toml --plan hybrid --batch 256
    """
    if fleet is None:
        raise InputError(
            "convoy simulate needs a fleet: give --fleet FILE, as `convoy measure` writes it or with the devices' peaks. The "
            "study of all plans at any size is `python -m studies DIR [NET]`, in a checkout of the repository"
        )
    from convoy.app.simulate import run_step

    run_step(output, net, fleet, plan, batch, image_of(image), classes, draw=figures, say=print)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or its log file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file to write; default: report.html beside the log.")
    ] = None,
) -> None:
    """Make one HTML page of a run: curves, throughput beside prediction and limit, the plan, one step, each device.

    The page needs no network and no program. A run that still goes on, or was ended, gives a page of what there is.

    Example: convoy report runs/2026-11-21-19.37.45-two-conv-50-500
    """
    from convoy.report.page import write_report

    print(f"wrote {write_report(run, output)}")
