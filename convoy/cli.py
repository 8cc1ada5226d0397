"""The command line: verbs, thin. Options become values; everything else happens elsewhere."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy._version import __version__
from convoy.errors import ConvoyError, InputError
from convoy.notation import device_names, numbers
from convoy.settings import FIELDS, key_of, kind_of, panel

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train one CNN on all the devices you have, as fast as their speeds add up.",
)


def _meaning(name: str) -> Any:
    """An option that means what the setting of that name means."""
    return typer.Option(help=FIELDS[name].description)


Data = Annotated[str, _meaning("data")]
DataDir = Annotated[Path | None, _meaning("data_dir")]
Net = Annotated[str, _meaning("net")]
PlanName = Annotated[str, _meaning("plan")]
Devices = Annotated[str, _meaning("devices")]
Batch = Annotated[int, _meaning("batch")]
Slowdown = Annotated[str | None, _meaning("slowdown")]
Timeout = Annotated[float, _meaning("timeout_s")]
Port = Annotated[int | None, _meaning("port")]


def _with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb an option for every setting; None where it is not given, so that a run file can say otherwise."""
    own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = []
    for name, field in FIELDS.items():
        kind = str if kind_of(name) is tuple else kind_of(name)
        default = "" if field.default is None or kind is bool else f" [dim]\\[default: {field.default}][/]"
        option = typer.Option(
            *([] if kind is bool else [f"--{key_of(name)}"]),
            help=f"{field.description}{default}", show_default=False, rich_help_panel=panel(name),
        )  # fmt: skip
        options.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    verb.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    return verb


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(f"convoy {__version__}")
        raise typer.Exit


@app.command()
@_with_settings
def train(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.TOML", help="Settings in a file: the options below, without the dashes in front."),
    ] = None,
    **given: Any,
) -> None:
    """Train a network on images, over this machine's devices or as one process of a torchrun job.

    The numbers are those of one device: same batches, same loss curve, whatever the plan.

    Settings come from a run file (lines such as batch = 64) and from options; an option overrides the file.

    Example: convoy train --data cifar10 --data-dir D --net two-conv:150:800 --plan master --devices 4 --batch 64 --epochs 2
    """
    from convoy.run_file import settle

    settled = settle(run, {name: value for name, value in given.items() if value is not None})
    devices, port = settled.settings.device_names, settled.settings.port
    if "RANK" in os.environ or len(devices) == 1:
        from convoy.job import run_device

        run_device(settled)
        return
    from convoy.execute.launch import launch_local
    from convoy.inputs import rehearse

    rehearse(settled.settings)
    raise typer.Exit(launch_local(sys.argv[1:], devices, port=port))


@app.command()
def demo(
    plan: PlanName = "master",
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 4,
) -> None:
    """Four local processes of unequal speed train one CNN on real images; then one device does, for comparison."""
    options = [
        "--data",
        "digits",
        "--net",
        "two-conv:32:128",
        "--plan",
        plan,
        "--devices",
        "4",
        "--slowdown",
        "1,1,2,4",
    ]
    options += ["--batch", "64", "--epochs", str(epochs), "--lr", "0.02", "--compare"]
    print(f"$ convoy train {' '.join(options)}\n", flush=True)
    sys.argv[1:] = ["train", *options]
    raise typer.Exit(app(args=sys.argv[1:], standalone_mode=False) or 0)


@app.command()
def measure(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Fleet file to write: devices, links, times of layers.")
    ],
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file with what is known; default: what the devices say.")
    ] = None,
    data: Data = "digits",
    data_dir: DataDir = None,
    net: Net = "two-conv:50:500",
    devices: Devices = "1",
    batch: Batch = 64,
    slowdown: Slowdown = None,
    budget: Annotated[float, typer.Option(help="Seconds that each device may spend on layers.")] = 60.0,
    timeout: Timeout = 60.0,
    port: Port = None,
) -> None:
    """Measure this fleet: a model's layers on each device, latency and bandwidth between hosts, what traffic costs.

    Run it on all devices at once: here over local processes, under torchrun, or under convoy rehearse.
    """
    from convoy.execute.launch import launch_local
    from convoy.measure.command import MeasureJob, run_measure

    known = device_names(devices)
    factors = (1.0,) * len(known) if slowdown is None else _numbers("--slowdown", slowdown)
    job = MeasureJob(output, fleet, data, data_dir, net, known, batch, factors, budget, timeout)
    job.check()
    if "RANK" in os.environ or len(known) == 1:
        run_measure(job)
        return
    raise typer.Exit(launch_local(sys.argv[1:], known, port=port))


@app.command()
def plan(
    net: Annotated[str, typer.Argument(help="two-conv:K1:K2, alexnet:F, resnet:DEPTH:WIDTH.")],
    fleet: Annotated[Path, typer.Option(help="Fleet file that `convoy measure` wrote for this net.")],
    batch: Batch = 64,
    image: Annotated[str, typer.Option(help="Channels, height, width of the images.")] = "3,32,32",
    classes: Annotated[int, typer.Option(help="Classes.")] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the chosen plan to this file (JSON).")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Whose state counts as memory: sgd, sgd-momentum or adam.")
    ] = "sgd-momentum",
    least_energy: Annotated[
        float | None,
        typer.Option(
            help="Choose the least joules per image among the plans whose step takes at most so many seconds."
        ),
    ] = None,
) -> None:
    """Predict every plan on a measured fleet, and choose: step time, share of the limit, traffic, memory, joules, what
    bounds it. Plans that do not fit a device's memory are marked, and never chosen.

    Example: convoy plan two-conv:150:800 --batch 256 --fleet fleet.toml -o plan.json
    """
    from convoy.forecast import forecast

    forecast(
        net,
        _image(image),
        classes,
        batch,
        fleet,
        output,
        optimizer=optimizer,
        least_energy_s=least_energy,
    )


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
        from convoy.study.run import run_study

        run_study(output, net, draw=figures, published=published, say=print)
        return
    from convoy.study.step import run_step

    run_step(output, net, fleet, plan, batch, _image(image), classes, draw=figures, say=print)


@app.command(context_settings={"allow_interspersed_args": False})
def rehearse(
    fleet: Annotated[Path, typer.Argument(help="Fleet file (TOML): hosts, their cards, devices with their cores.")],
    command: Annotated[
        list[str], typer.Argument(help="Program and arguments, run once per device; write -- before it.")
    ],
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds after which the command is ended.")] = 3600.0,
) -> None:
    """Run a command on every device of a fleet that is emulated on this machine (Linux, root).

    Each host gets a network namespace with its card's rates (tc tbf), each device its cores as a processor quota (cgroup) and
    torchrun's environment. Everything is removed afterwards, also after an interrupt.

    Example: convoy rehearse benchmarks/fleets/mixed4.toml -- convoy train --plan hybrid
    """
    from convoy.fleet import read_fleet
    from convoy.rehearse import rehearse as run

    program = command[1:] if command[0] == "--" else command
    if not program:
        raise InputError("nothing to run: write a command after --, e.g. convoy rehearse fleet.toml -- convoy train")
    raise typer.Exit(run(read_fleet(fleet), program, timeout_s=limit_s, fleet_path=fleet))


def _image(text: str) -> tuple[int, int, int]:
    sizes = [int(n) for n in _numbers("--image", text)]
    if len(sizes) != 3 or min(sizes) < 1:
        raise InputError(f"--image {text}: give channels, height and width, e.g. 3,32,32")
    return sizes[0], sizes[1], sizes[2]


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return numbers(text)
    except InputError as error:
        raise InputError(f"{option} {text!r}: {error}") from None


def main() -> None:
    """The `convoy` command: errors of ours are one message and exit status 2, without a traceback."""
    try:
        app()
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
