"""The command itself, options that several verbs have, and options that are made from the list of settings."""

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
from typer.core import TyperCommand

from convoy._version import __version__
from convoy.config.option_types import a_path, numbers, seconds
from convoy.config.settings import FIELDS, is_often, key_of, kind_of, panel
from convoy.errors import InputError, shortened, shown
from convoy.fleet.units import Dimension, quantity

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    help="Train one CNN on all the devices you have, as fast as their speeds add up.",
)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(f"convoy {__version__}")
        raise typer.Exit


@contextmanager
def loading() -> Iterator[None]:
    """Switch Python's garbage collector off during imports, which it makes a third slower, and keep it off the modules."""
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
    """Return whether torchrun, srun or mpirun started this process, and note its rank in torchrun's variables.

    Raises:
        InputError: see :func:`convoy.machine.launch_env.as_torchrun`.
    """
    from convoy.machine.launch_env import as_torchrun, is_one_of_job

    os.environ.update(as_torchrun(os.environ))
    return is_one_of_job(os.environ)


def path_of(text: str) -> Path:
    try:
        return Path(a_path(text))
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


def seconds_of(text: str | float) -> float:
    try:
        return float(seconds(text))
    except InputError as error:
        raise typer.BadParameter(f"{shown(str(text))}: {error}") from None


PATH: Mapping[str, Any] = {"parser": path_of, "metavar": "PATH"}
SECONDS: Mapping[str, Any] = {"parser": seconds_of, "metavar": "TIME"}  # 30, 450 ms, 2 min


def help_of(name: str) -> str:
    return str(FIELDS[name].description)


Net = Annotated[str, typer.Option(help=help_of("net"))]
Batch = Annotated[int, typer.Option(help=help_of("batch"))]
JobKeyFile = Annotated[Path | None, typer.Option("--job-key", help=help_of("job_key"), **PATH)]
Image = Annotated[str, typer.Option(help="Channels, height, width of the images.")]
Classes = Annotated[int, typer.Option(help="Classes.")]
Optimizer = Annotated[str, typer.Option(help="Optimizer whose state counts as memory: sgd, sgd-momentum or adam.")]
Outputs = Annotated[
    str,
    typer.Option(
        help="Where the model's outputs are: everywhere, or where-computed: with their samples, for convoy.loss in Python."
    ),
]
Print = Annotated[bool, typer.Option("--print", help="Print a line for each host of --fleet; start nothing.")]


class SettingsCommand(TyperCommand):
    """A verb with settings as options. `--help` lists the usual ones, a line each with its default; `--help-all` lists all."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parts: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is None:
                continue
            (call, text), name = row, str(parameter.name)
            if name not in FIELDS:
                part = "Options" if parameter.param_type_name == "option" else "Arguments"
                call = call.removesuffix(" <Path>")
            elif ctx.meta.get("all"):
                part = panel(name)
            elif is_often(name):
                sentence, _, default = text.partition("  [default: ")
                part, call = "Options", call.split(" / ")[0]
                text = sentence.split(". ")[0].rstrip(".") + (f"  [{default}" if default else "")
            else:
                continue
            parts.setdefault(part, []).append((call, text))
        for title, rows in parts.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta["all"] = True
        print(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options and exit.")
]


def with_settings(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb an option for each of these settings, or for all. None if it is not given: a run file may say otherwise.

    Args:
        defaults: where the verb has others than the settings.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [_option(name, defaults.get(name)) for name in names or FIELDS]
        verb.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return verb

    return decorate


def _option(name: str, default: Any) -> inspect.Parameter:
    # A path is taken as a text, so that an empty one can be refused; as a Path it would be the current folder.
    kind = str if kind_of(name) in (tuple, Path) else kind_of(name)
    told = FIELDS[name].default if default is None else default
    metavar = "PATH" if kind_of(name) is Path else {int: "N", float: "X", str: "TEXT"}.get(kind)
    option = typer.Option(
        *([] if kind is bool else [f"--{key_of(name)}"]),
        help=help_of(name) + ("" if told is None or kind is bool else f"  [default: {told}]"),
        show_default=False,
        **(SECONDS if name.endswith("_s") else {"metavar": metavar}),
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


MOST_PIXELS = 8192  # of a side of an image


def image_of(text: str) -> tuple[int, int, int]:
    """Read channels, height and width as `--image` gives them. InputError if they are none."""
    try:
        sizes = numbers(text)
    except InputError as error:
        raise InputError(f"--image {shown(text)}: {error}") from None
    if len(sizes) != 3 or not all(n == int(n) and 1 <= n <= MOST_PIXELS for n in sizes if math.isfinite(n)):
        raise InputError(
            f"--image {shortened(text)}: give channels, height and width, whole numbers of 1 to {MOST_PIXELS}, e.g. 3,32,32"
        )
    channels, height, width = map(int, sizes)
    return channels, height, width


def quantity_of(option: str, text: str, dimension: Dimension) -> float:
    """Read an option's number with its unit, above 0. InputError if it has another."""
    try:
        number = quantity(text, dimension)
    except InputError as error:
        raise InputError(f"{option} {shown(text)}: {error}") from None
    if number <= 0:
        raise InputError(f"{option} {shown(text)}: give more than 0")
    return number
