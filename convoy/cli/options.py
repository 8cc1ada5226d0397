"""The command itself, options that several verbs have, and those that are made from the list of settings."""

import gc
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy._version import __version__
from convoy.config.option_types import a_path, numbers, seconds
from convoy.config.settings import FIELDS, key_of, kind_of, panel
from convoy.errors import InputError, shortened, shown
from convoy.fleet.units import Dimension, quantity

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train one CNN on all the devices you have, as fast as their speeds add up.",
)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(f"convoy {__version__}")
        raise typer.Exit


@contextmanager
def loading() -> Iterator[None]:
    """For imports: modules stay, so Python's garbage collector need not go through them, neither now nor while training.

    Its passes took more than a third of the time in which torch and Convoy are imported.
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()


def in_job() -> bool:
    """Whether torchrun, srun or mpirun started this process as one of a job.

    Its place is then told in torchrun's variables, to all that follows here and to the processes that this one starts.

    Raises:
        InputError: as :func:`convoy.machine.launch_env.as_torchrun`.
    """
    from convoy.machine.launch_env import as_torchrun, is_one_of_job

    os.environ.update(as_torchrun(os.environ))
    return is_one_of_job(os.environ)


def _meaning(name: str) -> Any:
    """An option that means what the setting of that name means."""
    return typer.Option(help=FIELDS[name].description)


Data = Annotated[str, _meaning("data")]


def path_of(text: str) -> Path:
    """A path that a person gives. The command's own error where it names nothing."""
    try:
        return Path(a_path(text))
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


PATH: Mapping[str, Any] = {"parser": path_of, "metavar": "PATH"}
"""Of every option and argument that is a path."""


def seconds_of(text: str | float) -> float:
    """Seconds that a person gives, with a unit or without. The command's own error where they are none."""
    try:
        return float(seconds(text))
    except InputError as error:
        raise typer.BadParameter(f"{shown(str(text))}: {error}") from None


SECONDS: Mapping[str, Any] = {"parser": seconds_of, "metavar": "TIME"}
"""Of every option that is a time: 30, 450 ms, 2 min."""

DataDir = Annotated[Path | None, typer.Option(help=FIELDS["data_dir"].description, **PATH)]
ImageSize = Annotated[int | None, _meaning("image_size")]
Net = Annotated[str, _meaning("net")]
PlanName = Annotated[str, _meaning("plan")]
Precision = Annotated[str, _meaning("precision")]
Devices = Annotated[str, _meaning("devices")]
Batch = Annotated[int, _meaning("batch")]
Slowdown = Annotated[str | None, _meaning("slowdown")]
Timeout = Annotated[float, typer.Option(help=FIELDS["timeout_s"].description, **SECONDS)]
Port = Annotated[int | None, _meaning("port")]
Image = Annotated[str, typer.Option(help="Channels, height, width of the images.")]
Classes = Annotated[int, typer.Option(help="Classes.")]
Optimizer = Annotated[str, typer.Option(help="Whose state counts as memory: sgd, sgd-momentum or adam.")]
Outputs = Annotated[
    str,
    typer.Option(
        help="The model's outputs: everywhere, or where-computed: they stay with their samples, for convoy.loss in Python."
    ),
]
JobKeyFile = Annotated[Path | None, typer.Option("--job-key", help=FIELDS["job_key"].description, **PATH)]
TrustNetwork = Annotated[bool, typer.Option("--trust-network", help=FIELDS["trust_network"].description)]
Print = Annotated[
    bool,
    typer.Option("--print", help="Start nothing: print the line to paste in a shell on each host of --fleet."),
]


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb an option for every setting; None where it is not given, so that a run file can say otherwise."""
    own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = []
    for name, field in FIELDS.items():
        # A path is taken as a text: an empty one is to be refused, and would be the current folder.
        kind, is_path = (str if kind_of(name) in (tuple, Path) else kind_of(name)), kind_of(name) is Path
        default = "" if field.default is None or kind is bool else f" [dim]\\[default: {field.default}][/]"
        option = typer.Option(
            *([] if kind is bool else [f"--{key_of(name)}"]),
            help=f"{field.description}{default}", show_default=False, rich_help_panel=panel(name),
            **(SECONDS if name.endswith("_s") else {"metavar": "PATH" if is_path else None}),
        )  # fmt: skip
        options.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    verb.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    return verb


MOST_PIXELS = 8192
"""Of a side of an image."""


def image_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width as `--image` gives them. InputError if it does not."""
    sizes = numbers_of("--image", text)
    if len(sizes) != 3 or not all(n == int(n) and 1 <= n <= MOST_PIXELS for n in sizes if math.isfinite(n)):
        raise InputError(
            f"--image {shortened(text)}: give channels, height and width, whole numbers of 1 to {MOST_PIXELS}, e.g. 3,32,32"
        )
    channels, height, width = map(int, sizes)
    return channels, height, width


def numbers_of(option: str, text: str) -> tuple[float, ...]:
    """An option's numbers with commas between them. InputError if it has others."""
    try:
        return numbers(text)
    except InputError as error:
        raise InputError(f"{option} {shown(text)}: {error}") from None


def quantity_of(option: str, text: str, dimension: Dimension) -> float:
    """An option's number with its unit, above 0. InputError if it has another."""
    try:
        number = quantity(text, dimension)
    except InputError as error:
        raise InputError(f"{option} {shown(text)}: {error}") from None
    if number <= 0:
        raise InputError(f"{option} {shown(text)}: give more than 0")
    return number
