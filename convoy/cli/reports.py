"""convoy predict, convoy simulate, convoy report."""

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import (
    PATH,
    Batch,
    Classes,
    Image,
    Net,
    Optimizer,
    Outputs,
    app,
    image_of,
    loading,
    path_of,
    quantity_of,
)  # fmt: skip
from convoy.errors import InputError


@app.command()
def predict(
    net: Annotated[
        str | None, typer.Argument(help="As for convoy train: torchvision:NAME, timm:NAME, two-conv:K1:K2.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Device classes with commas between them, each a machine: laptop-cpu,2xrtx3060; + for several in one: "
            "rtx3060+rtx3090."
        ),
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="A fleet file instead, described or as convoy measure wrote it.", **PATH)
    ] = None,
    batch: Batch = 64,
    image: Image = "3,224,224",
    classes: Classes = 1000,
    link: Annotated[str, typer.Option(help="Of each machine's card, with --on: 1Gbit, 110MB/s.")] = "1Gbit",
    latency: Annotated[str, typer.Option(help="From machine to machine, one way, with --on: 100us.")] = "100us",
    optimizer: Optimizer = "sgd-momentum",
    outputs: Outputs = "everywhere",
    list_them: Annotated[bool, typer.Option("--list", help="List the device classes and stop.")] = False,
) -> None:
    """Would it pay? An answer before anything is installed or measured: by which plan, from which batch or link on, what one
    device less or more brings; with an interval.

    Example: convoy predict torchvision:resnet50 --image 3,224,224 --batch 256 --on laptop-cpu,rtx3060,rtx3090 --link 1Gbit
    """
    with loading():
        from convoy.cli.predict import list_classes, run_predict

    if list_them:
        list_classes()
        return
    if net is None:
        raise InputError("convoy predict needs a net: e.g. torchvision:resnet50 --on laptop-cpu,rtx3060")
    run_predict(
        net, image_of(image), classes, batch, on=on, fleet=fleet,
        link_bytes_per_s=quantity_of("--link", link, "bytes_per_s"), latency_s=quantity_of("--latency", latency, "s"),
        optimizer=optimizer, outputs=outputs,
    )  # fmt: skip


@app.command()
def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the trace (JSON) and the picture (PNG).", **PATH)
    ],
    net: Net = "alexnet:4096",
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file, as convoy measure wrote it, or described. Required.", **PATH)
    ] = None,
    plan: Annotated[str, typer.Option(help="A plan by name, auto, or a plan file.")] = "auto",
    batch: Batch = 64,
    image: Image = "3,32,32",
    classes: Classes = 10,
    outputs: Outputs = "everywhere",
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
    with loading():
        from convoy.cli.simulate import run_step

    run_step(output, net, fleet, plan, batch, image_of(image), classes, outputs=outputs, draw=figures, say=print)


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=path_of,
            metavar="RUN...",
            help="The folder of a run, or its log file; several are compared. Default: the latest run in the folder runs.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write; default: report.html beside the log; of several, comparison.html.",
            **PATH,
        ),
    ] = None,
) -> None:
    """Make one HTML page of a run: curves, throughput beside prediction and limit, the plan, one step, each device.

    The page needs no network and no program but a browser. A run that is not finished gives a page of what there is. Several
    runs are compared on one page.

    Example: convoy report runs/2026-11-21-19.37.45-two-conv-50-500
    """  # fmt: skip
    if runs is not None and len(runs) > 1:
        from convoy.report.compare import write_comparison

        print(f"wrote {write_comparison(runs, output)}")
    else:
        from convoy.report.page import write_report
        from convoy.runlog.directory import runs_folder
        from convoy.runlog.reader import newest_run

        print(f"wrote {write_report(runs[0] if runs else newest_run(runs_folder()), output)}")
