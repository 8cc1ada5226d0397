"""The command line: verbs, thin. Options become a `Job`; everything else happens elsewhere."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from convoy._version import __version__
from convoy.errors import ConvoyError, InputError

MAX_DEVICES = 1024
"""More processes than that on one machine are a slip of the finger."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train one CNN on all the devices you have, as fast as their speeds add up.",
)

Data = Annotated[str, typer.Option(help="Images: digits (ships with scikit-learn), fashion-mnist or cifar10.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the data set's own files. Default: a cache folder, filled by download and checksum."
    ),
]
Net = Annotated[
    str,
    typer.Option(help="two-conv:K1:K2 (filters), alexnet:F (features), resnet:DEPTH:WIDTH."),
]
PlanName = Annotated[
    str,
    typer.Option(
        help="Who computes what. [b]data[/]: the batch in even shares, as PyTorch DDP does. [b]data-by-speed[/]: the batch by "
        "measured speed. [b]master[/]: filters of the convolutions by measured speed, the rest on the fastest device "
        "(Marques 2018). [b]model[/]: every weighted layer by filter, evenly (Castello 2021). [b]hybrid[/]: convolutions by "
        "batch, fully connected layers by filter (Jin 2018). [b]auto[/]: measures, and lets the planner choose (train "
        "only). Or a plan file."
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        help="How many processes on this machine, or their devices: 4, or cuda:0,cpu. Ignored under torchrun."
    ),
]
Batch = Annotated[int, typer.Option(help="Global batch: samples per step, over all devices.")]
Slowdown = Annotated[
    str | None,
    typer.Option(
        help="A factor per device that stretches its computing, e.g. 1,1,2,4: unequal devices on one machine."
    ),
]
SpeedsOption = Annotated[
    str | None, typer.Option("--speeds", help="Speeds per device instead of measured ones, e.g. 4,4,2,1.")
]
ReduceOption = Annotated[
    str | None,
    typer.Option(
        "--reduce",
        help="How sums over devices are made: ring, butterfly, star; or inexact-butterfly-mixing, which is not a sum and "
        "does not train like one device. Default: butterfly for hybrid, ring for the others.",
    ),
]


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(f"convoy {__version__}")
        raise typer.Exit


@app.command()
def train(
    data: Data = "digits",
    data_dir: DataDir = None,
    net: Net = "two-conv:50:500",
    plan: PlanName = "data-by-speed",
    devices: Devices = "1",
    batch: Batch = 64,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.01,
    momentum: Annotated[float, typer.Option(help="Momentum of sgd.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.")] = "sgd",
    seed: Annotated[int, typer.Option(help="Decides the first weights and the order of the images.")] = 0,
    slowdown: Slowdown = None,
    speeds: SpeedsOption = None,
    reduce: ReduceOption = None,
    limit: Annotated[int | None, typer.Option(help="Use only so many training images.")] = None,
    workers: Annotated[int, typer.Option(help="Processes per device that prepare batches ahead; 0: none.")] = 0,
    rebalance: Annotated[
        bool,
        typer.Option(help="Change the shares while training when a device turns out faster or slower than thought."),
    ] = False,
    compare: Annotated[
        bool, typer.Option(help="Afterwards, the same training on one device by plain PyTorch.")
    ] = False,
    explain: Annotated[
        bool, typer.Option(help="Print the step list: every computation, move and sum of one step.")
    ] = False,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan to this file (JSON).")] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write every loss and result to this file, a JSON object per line.")
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="For --plan auto: the file that convoy measure wrote; default: measure now.")
    ] = None,
    budget: Annotated[float, typer.Option(help="For --plan auto: about the seconds that measuring may take.")] = 20.0,
    port: Annotated[int | None, typer.Option(help="Port where the processes meet; default: a free one.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a silent device counts as lost.")] = 60.0,
) -> None:
    """Train a network on images, over this machine's devices or as one process of a torchrun job.

    The numbers are those of one device: same batches, same loss curve, whatever the plan.

    Example: convoy train --data cifar10 --data-dir D --net two-conv:150:800 --plan master --devices 4 --batch 64 --epochs 2
    """
    from convoy.job import Job

    known = _devices(devices)
    job = Job(
        data=data, data_dir=data_dir, net=net, plan=plan, devices=known, batch=batch, epochs=epochs, lr=lr,
        momentum=momentum, weight_decay=weight_decay, optimizer=optimizer, seed=seed,
        slowdown=_numbers("--slowdown", slowdown) or (1.0,) * len(known), speeds=_numbers("--speeds", speeds),
        reduce=reduce, limit=limit, workers=workers, timeout_s=timeout, compare=compare, explain=explain,  # type: ignore[arg-type]
        save_plan=save_plan, log=log, fleet=fleet, budget_s=budget, rebalance=rebalance,
    )  # fmt: skip
    _run(job, sys.argv[1:], port)


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
    timeout: Annotated[float, typer.Option(help="Seconds after which a silent device counts as lost.")] = 60.0,
    port: Annotated[int | None, typer.Option(help="Port where the processes meet; default: a free one.")] = None,
) -> None:
    """Measure this fleet: a model's layers on each device, latency and bandwidth between hosts, what traffic costs.

    Run it on all devices at once: here over local processes, under torchrun, or under convoy rehearse.
    """
    from convoy.execute.launch import launch_local
    from convoy.measure.command import MeasureJob, run_measure

    known = _devices(devices)
    factors = _numbers("--slowdown", slowdown) or (1.0,) * len(known)
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


def _run(job: object, argv: list[str], port: int | None) -> None:
    from convoy.execute.launch import launch_local
    from convoy.job import Job, run_device

    assert isinstance(job, Job)
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"--port {port}: a port is a number from 0 to 65535; 0 or none takes a free one")
    if "RANK" in os.environ or len(job.devices) == 1:
        run_device(job)
        return
    job.rehearse_inputs()
    raise typer.Exit(launch_local(argv, job.devices, port=port))


def _devices(text: str) -> tuple[str, ...]:
    if "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"].isdigit():
        count = int(os.environ["WORLD_SIZE"])
        named = tuple(part.strip() for part in text.split(","))
        return named if len(named) == count and not text.isdigit() else ("auto",) * count
    if text.strip().isdigit():
        count = int(text)
        if not 1 <= count <= MAX_DEVICES:
            raise InputError(f"--devices {count}: give a number from 1 to {MAX_DEVICES}, or their names: cuda:0,cpu")
        return ("cpu",) * count if count > 1 else ("auto",)
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise InputError(f"--devices {text!r}: give a number, or names with commas between them: cuda:0,cpu")
    return names


def _image(text: str) -> tuple[int, int, int]:
    sizes = [int(n) for n in _numbers("--image", text) or ()]
    if len(sizes) != 3 or min(sizes) < 1:
        raise InputError(f"--image {text}: give channels, height and width, e.g. 3,32,32")
    return sizes[0], sizes[1], sizes[2]


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r}: give numbers with commas between them, e.g. {option} 1,1,2,4") from None


def main() -> None:
    """The `convoy` command: errors of ours are one message and exit status 2, without a traceback."""
    try:
        app()
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
