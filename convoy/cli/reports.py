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
        str | None, typer.Argument(help="Net, as of convoy train: torchvision:NAME, two-conv:K1:K2, ...")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Device classes, each a machine: laptop-cpu,2xrtx3060; + puts several into one: rtx3060+rtx3090."
        ),
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="Fleet file instead, described or measured.", **PATH)] = None,
    batch: Batch = 64,
    image: Image = "3,224,224",
    classes: Classes = 1000,
    link: Annotated[str, typer.Option(help="Speed of each machine's NIC, with --on: 1Gbit, 110MB/s.")] = "1Gbit",
    latency: Annotated[str, typer.Option(help="Latency between machines, one way, with --on.")] = "100us",
    optimizer: Optimizer = "sgd-momentum",
    outputs: Outputs = "everywhere",
    list_them: Annotated[bool, typer.Option("--list", help="List the device classes and stop.")] = False,
) -> None:
    """Predict whether a fleet would pay, before anything is installed.

    It prints the best plan and its step time with an interval, from which batch or link on the fleet pays, and what one device
    less or more changes.

    Example: convoy predict torchvision:resnet50 --image 3,224,224 --batch 256 --on laptop-cpu,rtx3060,rtx3090 --link 1Gbit
    """
    from convoy.config.checks import check_net

    if net is None and not list_them:
        raise InputError("convoy predict needs a net: e.g. torchvision:resnet50 --on laptop-cpu,rtx3060")
    if net is not None:
        check_net(net)
    with loading():
        from convoy.cli.predict import list_classes, run_predict
        from convoy.cli.question import PlanQuestion

    if net is None or list_them:
        list_classes()
        return
    run_predict(
        PlanQuestion(net, image_of(image), classes, batch, optimizer, outputs=outputs), on=on, fleet=fleet,
        link_bytes_per_s=quantity_of("--link", link, "bytes_per_s"), latency_s=quantity_of("--latency", latency, "s"),
    )  # fmt: skip


@app.command()
def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the trace (JSON) and the picture (PNG).", **PATH)
    ],
    net: Net = "alexnet:4096",
    fleet: Annotated[Path | None, typer.Option(help="Fleet file, described or measured. Required.", **PATH)] = None,
    plan: Annotated[str, typer.Option(help="A plan by name, auto, or a plan file.")] = "auto",
    batch: Batch = 64,
    image: Image = "3,32,32",
    classes: Classes = 10,
    outputs: Outputs = "everywhere",
    figures: Annotated[bool, typer.Option(help="Draw the picture too (needs the extra 'plots').")] = True,
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
    from convoy.config.checks import check_net

    check_net(net)
    with loading():
        from convoy.cli.question import PlanQuestion
        from convoy.cli.simulate import run_step

    question = PlanQuestion(net, image_of(image), classes, batch, outputs=outputs)
    run_step(output, question, fleet, plan, draw=figures, say=print)


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=path_of,
            metavar="RUN...",
            help="Folder of a run, or its log file; several are compared. Default: the latest one in runs.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write; default: report.html beside the log, or comparison.html.",
            **PATH,
        ),
    ] = None,
) -> None:
    """Write one HTML page of a run, or a comparison of several.

    It has the curves, throughput beside prediction and limit, the plan, one step, and each device. The page needs no network.
    An unfinished run gives a page of what there is.

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
