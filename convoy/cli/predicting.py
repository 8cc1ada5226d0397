"""convoy predict."""

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import PATH, Batch, image_of, quantity_of
from convoy.cli.top import app
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
    image: Annotated[str, typer.Option(help="Channels, height, width of the images.")] = "3,224,224",
    classes: Annotated[int, typer.Option(help="Classes.")] = 1000,
    link: Annotated[str, typer.Option(help="Of each machine's card, with --on: 1Gbit, 110MB/s.")] = "1Gbit",
    latency: Annotated[str, typer.Option(help="From machine to machine, one way, with --on: 100us.")] = "100us",
    optimizer: Annotated[
        str, typer.Option(help="Whose state counts as memory: sgd, sgd-momentum or adam.")
    ] = "sgd-momentum",
    list_them: Annotated[bool, typer.Option("--list", help="List the device classes and stop.")] = False,
) -> None:
    """Would it pay? An answer before anything is installed or measured: by which plan, from which batch or link on, what one
    device less or more brings; with an interval.

    Example: convoy predict torchvision:resnet50 --image 3,224,224 --batch 256 --on laptop-cpu,rtx3060,rtx3090 --link 1Gbit
    """
    from convoy.app.predict import list_classes, run_predict

    if list_them:
        list_classes()
        return
    if net is None:
        raise InputError("convoy predict needs a net: e.g. torchvision:resnet50 --on laptop-cpu,rtx3060")
    run_predict(
        net, image_of(image), classes, batch, on=on, fleet=fleet,
        link_bytes_per_s=quantity_of("--link", link, "bytes_per_s"), latency_s=quantity_of("--latency", latency, "s"),
        optimizer=optimizer,
    )  # fmt: skip
