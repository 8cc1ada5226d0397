"""convoy simulate, convoy report."""

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import Batch, Net, image_of
from convoy.cli.top import app


@app.command()
def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for tables (CSV), figures (PNG), traces (JSON).")
    ],
    net: Net = "alexnet:4096",
    figures: Annotated[bool, typer.Option(help="Draw figures too (needs the extra 'plots').")] = True,
    published: Annotated[bool, typer.Option(help="Also check the figures that were published.")] = True,
    fleet: Annotated[
        Path | None,
        typer.Option(
            help="Instead of the study, replay one step on this fleet: as convoy measure wrote it, or described."
        ),
    ] = None,
    plan: Annotated[str, typer.Option(help="With --fleet: a plan by name, auto, or a plan file.")] = "auto",
    batch: Batch = 64,
    image: Annotated[str, typer.Option(help="With --fleet: channels, height, width of the images.")] = "3,32,32",
    classes: Annotated[int, typer.Option(help="With --fleet: classes.")] = 10,
) -> None:
    """Data, model, hybrid and master parallelism at any size: batch, FLOP/s, bandwidths, thousands of devices.

    With --fleet, one step of a plan on that fleet instead: who computes, sends and receives when, as a picture and as a trace
    for Perfetto or chrome://tracing.

    Example: convoy simulate -o step --net two-conv:150:800 --fleet fleet.toml --plan hybrid --batch 256
    """
    if fleet is None:
        from studies.run import run_study

        run_study(output, net, draw=figures, published=published, say=print)
        return
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
