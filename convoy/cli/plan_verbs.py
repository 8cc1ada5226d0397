"""Defines the verbs plan and predict."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.options import (
    PATH,
    SECONDS,
    app,
    help_of,
)
from convoy.config.train_options import numbers
from convoy.errors import InputError, shortened, shown
from convoy.files import write_whole
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.fleet.catalogue import device_class, device_classes
from convoy.fleet.units import Dimension, quantity
from convoy.layout.comm_dtype import parse_comm_dtype

if TYPE_CHECKING:  # these import torch
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.request import PlanRequest
    from convoy.report.screen import Wait

Batch = Annotated[int, typer.Option(help=help_of("batch"), min=1, max=10**9)]
Image = Annotated[str, typer.Option(help="Channels, height, width of the images.")]
Classes = Annotated[int, typer.Option(help="Classes.", min=1, max=10**9)]
Optimizer = Annotated[str, typer.Option(help="Optimizer, for the memory of its state: sgd, sgd-momentum or adam.")]
Outputs = Annotated[
    str,
    typer.Option(
        help="Where the model's outputs are: everywhere, or where-computed: with their samples, for convoy.loss in Python."
    ),
]

MAX_PIXELS = 8192  # per side of an image
MAX_NAMED = 64  # devices in `--on`


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """A net and its planning options from the command line."""

    net: str
    image: str
    classes: int
    batch: int
    optimizer: str = "sgd-momentum"
    wire: str = "exact"
    outputs: str = "everywhere"
    micro_batches: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels, height and width. Raises InputError if `image` is invalid."""
        try:
            sizes = numbers(self.image)
        except InputError as error:
            raise InputError(f"--image {shown(self.image)}: {error}") from None
        if len(sizes) != 3 or not all(size in range(1, MAX_PIXELS + 1) for size in sizes):
            raise InputError(
                f"--image {shortened(self.image)}: give channels, height and width, whole numbers of 1 to {MAX_PIXELS}, e.g. "
                "3,32,32"
            )
        channels, height, width = map(int, sizes)
        return channels, height, width

    def check(self) -> None:
        """Check the options that need no torch. Raises InputError."""
        from convoy.config.checks import check_net
        from convoy.plan.plan import parse_outputs

        check_net(self.net)
        _ = self.sizes
        parse_comm_dtype(self.wire)
        parse_outputs(self.outputs)

    def request(self, fleet: "FleetKnowledge") -> "PlanRequest":
        """Build the net, and return the planning request for one micro-batch.

        Raises InputError, MismatchError and PlanError as `PlanRequest` and `graph_of` do.
        """
        from convoy.model.nets import graph_of
        from convoy.plan.plan import parse_outputs
        from convoy.planner.request import PlanRequest

        graph = graph_of(self.net, self.sizes, self.classes)
        wire, outputs = parse_comm_dtype(self.wire), parse_outputs(self.outputs)
        whole = PlanRequest(graph, self.batch, fleet, optimizer=self.optimizer, wire=wire, outputs=outputs)
        return whole.split(self.micro_batches)


@contextmanager
def _waiting(text: str) -> Iterator["Wait"]:
    """Show the current task on standard error."""
    from rich.console import Console

    from convoy.report.screen import Wait

    with Wait(Console(stderr=True), text, first_s=1.0) as show:
        show("reading the net")
        yield show


@app.command()
def plan(
    net: Annotated[str, typer.Argument(help="Net, as for convoy train: two-conv:K1:K2, torchvision:NAME, ...")],
    fleet: Annotated[
        Path, typer.Option(help="Fleet file, measured for this net by `convoy measure`, or described.", **PATH)
    ],
    batch: Batch = 64,
    image: Image = "3,32,32",
    classes: Classes = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the chosen plan to this file (JSON).", **PATH)
    ] = None,
    optimizer: Optimizer = "sgd-momentum",
    least_energy: Annotated[
        float | None,
        typer.Option(help="Choose the least joules per image among plans with at most this time per step.", **SECONDS),
    ] = None,
    wire: Annotated[str, typer.Option(help=help_of("wire"))] = "exact",
    outputs: Outputs = "everywhere",
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches per step, each with an equal part of the batch.")
    ] = 1,
) -> None:
    """Predict every plan on a fleet, measured or described, and choose one.

    It prints step time, efficiency, traffic, memory, joules and bottleneck of each plan. Plans that exceed a device's
    memory are marked, and never chosen.

    Example: convoy plan two-conv:150:800 --batch 256 --fleet fleet.toml -o plan.json
    """
    if least_energy is not None and not 0 < least_energy < math.inf:
        raise InputError(f"--least-energy {least_energy:g}: give the seconds that a step may take, above 0")
    question = PlanQuestion(net, image, classes, batch, optimizer, wire, outputs, accumulate)
    question.check()
    from convoy.config.checks import check_output
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.prediction import predict_all, rates_by_devices
    from convoy.report.plans import show_all
    from convoy.report.screen import Screen

    if output is not None:
        check_output("--output", output)
    known = FleetKnowledge.from_file(fleet)
    with _waiting(f"planning {net}") as show:
        request = question.request(known)
        show("predicting plans")
        rows = predict_all(request, least_energy)
        show("predicting fewer devices")
        counts = [] if least_energy is not None else rates_by_devices(request)
    console = Screen(visible=True).console  # as wide as its tables where there is no terminal
    show_all(console, rows, request, counts)
    if output is not None:
        write_whole(output, rows[-1].plan.to_json())
        several = f" --accumulate {accumulate}" if accumulate > 1 else ""
        console.print(
            f"Written to {output}: convoy train --plan {output} --batch {batch}{several} --devices {len(request.names)} ..."
        )


@app.command()
def predict(
    net: Annotated[
        str | None, typer.Argument(help="Net, as for convoy train: torchvision:NAME, two-conv:K1:K2, ...")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Device classes, one per machine: laptop-cpu,2xrtx3060; + puts several into one: rtx3060+rtx3090."
        ),
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="Fleet file instead, described or measured.", **PATH)] = None,
    batch: Batch = 64,
    image: Image = "3,224,224",
    classes: Classes = 1000,
    link: Annotated[str, typer.Option(help="Speed of each machine's NIC, with --on: 1Gbit, 110MB/s.")] = "1Gbit",
    latency: Annotated[str, typer.Option(help="One-direction latency between machines, with --on.")] = "100us",
    optimizer: Optimizer = "sgd-momentum",
    outputs: Outputs = "everywhere",
    list_them: Annotated[bool, typer.Option("--list", help="List the device classes and stop.")] = False,
) -> None:
    """Predict whether a fleet would pay, before anything is installed.

    It prints the best plan and its step time with an interval, the smallest batch and the slowest link that pay, and the effect
    of one device less or more.

    Example: convoy predict torchvision:resnet50 --image 3,224,224 --batch 256 --on laptop-cpu,rtx3060,rtx3090 --link 1Gbit
    """
    begin_s = time.perf_counter()
    if list_them:
        from convoy.report.forecasts import show_classes
        from convoy.report.screen import Screen

        show_classes(Screen(visible=True).console, list(device_classes().values()))
        return
    if net is None:
        raise InputError("convoy predict needs a net: e.g. torchvision:resnet50 --on laptop-cpu,rtx3060")
    question = PlanQuestion(net, image, classes, batch, optimizer, outputs=outputs)
    question.check()
    rate, delay_s = _quantity("--link", link, "bytes_per_s"), _quantity("--latency", latency, "s")
    if on is not None and fleet is None:
        described, measured = fleet_on(on, rate, delay_s), None
    elif fleet is not None and on is None:
        from convoy.simulate.table import read_fleet_file

        described, measured = read_fleet_file(fleet)
    else:
        raise InputError(
            "give the fleet, once: --on laptop-cpu,rtx3060 (`convoy predict --list` has the names), or --fleet FILE"
        )
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.payoff import forecast
    from convoy.report.forecasts import show_forecast
    from convoy.report.screen import Screen

    with _waiting(f"predicting {net}") as show:
        found = forecast(question.request(FleetKnowledge(described, measured)), show)
    took_s = time.perf_counter() - begin_s
    show_forecast(Screen(visible=True).console, found, described, net, question.sizes, took_s)


def _quantity(option: str, text: str, dimension: Dimension) -> float:
    """Parse an option's positive number with its unit. Raises InputError if it is invalid."""
    try:
        number = quantity(text, dimension)
    except InputError as error:
        raise InputError(f"{option} {shown(text)}: {error}") from None
    if number <= 0:
        raise InputError(f"{option} {shown(text)}: give more than 0")
    return number


def fleet_on(text: str, link_bytes_per_s: float, latency_s: float) -> Fleet:
    """Parse device classes, e.g. `laptop-cpu,2xrtx3060,rtx3090+rtx3090`, into a fleet. Raises InputError."""
    machines: list[list[str]] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x*]\s*)?(\S.*?)\s*", part)
        names = [] if found is None else [name.strip() for name in found[2].split("+")]
        if found is None or not all(names) or found[1] == "0":
            raise InputError(
                f"--on {text!r}: give classes of devices with commas between them, e.g. "
                "laptop-cpu,2xrtx3060,rtx3090+rtx3090"
            )
        machines += [names] * int(found[1] or 1)
    total = sum(map(len, machines))
    if total > MAX_NAMED:
        raise InputError(f"--on {text!r}: {total} devices; at most {MAX_NAMED} can be named here")
    count = Counter(device_class(name).name for names in machines for name in names)
    seen: Counter[str] = Counter()
    hosts, devices = [], []
    for index, names in enumerate(machines):
        hosts.append(Host(f"machine-{index + 1}"))
        for known in map(device_class, names):
            seen[known.name] += 1
            own = f"{known.name}-{seen[known.name]}" if count[known.name] > 1 else known.name
            devices.append(Device.of_class(known, own, hosts[-1].name))
    return Fleet(tuple(hosts), tuple(devices), Nic(link_bytes_per_s, link_bytes_per_s, latency_s))
