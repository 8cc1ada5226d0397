"""Defines the verbs plan and predict."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from convoy.cli.options import app, argument, flag, help_of, option, with_options
from convoy.config.train_options import numbers
from convoy.errors import InputError, shortened, shown
from convoy.files import unwritable, write_whole
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.fleet.catalogue import device_class, device_classes
from convoy.layout.comm_dtype import parse_comm_dtype

if TYPE_CHECKING:  # these import torch
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.request import PlanRequest
    from convoy.report.screen import Wait

NetName = argument("NET", "Net, as for convoy train: two-conv:K1:K2, torchvision:NAME, ...")
FleetFile = option("PATH", "Fleet file, measured for this net by `convoy measure`, or described.")
Optimizer = Annotated[str, option("TEXT", "Optimizer, for the memory of its state: sgd, sgd-momentum or adam.")]
Outputs = Annotated[str, option("TEXT", "Where the outputs are: everywhere, or where-computed (for convoy.loss).")]
PLAN_OPTIONS: dict[str, tuple[Any, Any]] = {
    "batch": (Annotated[int, option("N", help_of("batch"))], 64),
    "image": (Annotated[str, option("C,H,W", "Channels, height, width of the images.")], "3,32,32"),
    "classes": (Annotated[int, option("N", "Classes.")], 10),
    "optimizer": (Optimizer, "sgd-momentum"),
    "outputs": (Outputs, "everywhere"),
}
"""Options of `convoy plan`, and with other images those of `convoy predict`: annotation and default."""

IMAGENET = {"image": (PLAN_OPTIONS["image"][0], "3,224,224"), "classes": (PLAN_OPTIONS["classes"][0], 1000)}

MAX_PIXELS = 8192  # per side of an image
MAX_NAMED = 64  # devices in `--on`


def image_sizes(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = sizes = numbers(text)
    except ValueError:  # no numbers, or not three
        sizes = ()
    if not sizes or not all(size in range(1, MAX_PIXELS + 1) for size in sizes):
        raise InputError(f"--image {shortened(text)}: give three whole numbers of 1 to {MAX_PIXELS}, e.g. 3,32,32")
    return int(channels), int(height), int(width)


def request_builder(
    net: str, chosen: Mapping[str, Any], wire: str = "exact"
) -> Callable[["FleetKnowledge"], "PlanRequest"]:
    """Check a net and its `PLAN_OPTIONS` before torch is imported. Return a function that builds the planning request."""
    from convoy.config.checks import check_net
    from convoy.plan.plan import parse_outputs

    check_net(net)
    sizes, comm_dtype, place = image_sizes(chosen["image"]), parse_comm_dtype(wire), parse_outputs(chosen["outputs"])

    def build(fleet: "FleetKnowledge") -> "PlanRequest":
        from convoy.model.nets import graph_of
        from convoy.planner.request import PlanRequest

        graph, optimizer = graph_of(net, sizes, chosen["classes"]), chosen["optimizer"]
        return PlanRequest(graph, chosen["batch"], fleet, optimizer=optimizer, wire=comm_dtype, outputs=place)

    return build


@contextmanager
def _waiting(text: str) -> Iterator["Wait"]:
    from rich.console import Console

    from convoy.report.screen import Wait

    with Wait(Console(stderr=True), text, first_s=1.0) as show:
        show("reading the net")
        yield show


@app.command()
@with_options(PLAN_OPTIONS)
def plan(
    net: Annotated[str, NetName],
    fleet: Annotated[Path, FleetFile],
    output: Annotated[Path | None, option("PATH", "Write the chosen plan to this file.", "--output", "-o")] = None,
    wire: Annotated[str, option("TEXT", help_of("wire"))] = "exact",
    accumulate: Annotated[int, option("N", "Equal micro-batches per step.")] = 1,
    trace: Annotated[Path | None, option("PATH", "Folder for a trace and a picture of each plan's step.")] = None,
    **given: Any,
) -> None:
    """Predict every plan on a fleet, measured or described, and choose one.

    It prints step time, efficiency, traffic, memory, joules and bottleneck of each plan. Plans that exceed a device's
    memory are marked, and never chosen. A trace (JSON) shows when each device computes, sends and receives: open it in
    Perfetto or chrome://tracing.

    Example: convoy plan two-conv:150:800 --batch 256 --fleet fleet.toml -o plan.json
    """
    chosen = {name: default for name, (_, default) in PLAN_OPTIONS.items()} | given
    build = request_builder(net, chosen, wire)
    if trace is not None and (why := unwritable(trace)):
        raise InputError(f"cannot make the folder {shown(trace)}: {why}; give one that can be made")
    from convoy.config.checks import check_output
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.prediction import predict_all
    from convoy.report.plans import show_all
    from convoy.report.screen import Screen

    if output is not None:
        check_output("--output", output)
    known = FleetKnowledge.from_file(fleet)
    with _waiting(f"planning {net}") as show:
        request = build(known).split(accumulate)
        show("predicting plans")
        rows, counts = predict_all(request)
    console = Screen(visible=True).console  # as wide as its tables where there is no terminal
    show_all(console, rows, request, counts)
    if trace is not None:
        from convoy.report.page import write_step
        from convoy.report.timeline import write_chrome_trace
        from convoy.runlog.writer import prediction_line

        trace.mkdir(parents=True, exist_ok=True)
        for row in rows:
            name, title = row.plan.name, f"{net}, plan {row.plan.name}, batch {row.plan.batch}"
            print(f"wrote {write_chrome_trace(row.timeline, trace / f'{name}.json', request.names)}")
            print(f"wrote {write_step(prediction_line(row, request), trace / f'{name}.html', title)}")
    if output is not None:
        write_whole(output, rows[-1].plan.to_json())
        options = f"--batch {chosen['batch']}" + (f" --accumulate {accumulate}" if accumulate > 1 else "")
        devices = len(request.names)
        console.print(f"Written to {output}: convoy train --plan {output} {options} --devices {devices} ...")


@app.command()
@with_options(PLAN_OPTIONS | IMAGENET)
def predict(
    net: Annotated[str | None, NetName] = None,
    on: Annotated[str | None, option("CLASSES", "Devices by machine: laptop-cpu,2xrtx3060,rtx3060+rtx3090.")] = None,
    fleet: Annotated[Path | None, FleetFile] = None,
    link: Annotated[float, option("RATE", "Speed of each machine's NIC, with --on.", show_default="1Gbit")] = 125e6,
    latency: Annotated[float, option("TIME", "From machine to machine, with --on.", show_default="100us")] = 1e-4,
    list_them: Annotated[bool, flag("List the device classes and stop.", "--list")] = False,
    **given: Any,
) -> None:
    """Predict whether a fleet would pay, before anything is installed.

    It prints the best plan and its step time with an interval, and the smallest batch and the slowest link that pay.

    Example: convoy predict torchvision:resnet50 --image 3,224,224 --batch 256 --on laptop-cpu,rtx3060,rtx3090 --link 1Gbit
    """
    begin_s = time.perf_counter()
    if list_them:
        from convoy.report.plans import show_classes

        show_classes(list(device_classes().values()))
        return
    if net is None:
        raise InputError("convoy predict needs a net: e.g. torchvision:resnet50 --on laptop-cpu,rtx3060")
    chosen = {name: default for name, (_, default) in (PLAN_OPTIONS | IMAGENET).items()} | given
    build = request_builder(net, chosen)
    if (on is None) == (fleet is None):
        raise InputError("give the fleet, once: --on laptop-cpu,rtx3060 (--list has the names), or --fleet FILE")
    from convoy.planner.knowledge import FleetKnowledge
    from convoy.planner.payoff import forecast
    from convoy.report.plans import show_forecast
    from convoy.report.screen import Screen
    from convoy.simulate.table import read_fleet_file

    described, measured = (fleet_on(on or "", link, latency), None) if fleet is None else read_fleet_file(fleet)
    with _waiting(f"predicting {net}") as show:
        found = forecast(build(FleetKnowledge(described, measured)), show)
    took_s = time.perf_counter() - begin_s
    show_forecast(Screen(visible=True).console, found, described, net, image_sizes(chosen["image"]), took_s)


def fleet_on(text: str, link_bytes_per_s: float, latency_s: float) -> Fleet:
    """Parse device classes, e.g. `laptop-cpu,2xrtx3060,rtx3090+rtx3090`, into a fleet. Raises InputError."""
    machines: list[list[str]] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x*]\s*)?(\S.*?)\s*", part)
        names = [] if found is None else [name.strip() for name in found[2].split("+")]
        if found is None or not all(names) or found[1] == "0":
            raise InputError(f"--on {text!r}: give classes of devices, e.g. laptop-cpu,2xrtx3060,rtx3090+rtx3090")
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
