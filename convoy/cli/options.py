"""Options that several verbs have, and those that are made from the list of settings."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.config.option_types import numbers
from convoy.config.settings import FIELDS, key_of, kind_of, panel
from convoy.errors import InputError


def _meaning(name: str) -> Any:
    """An option that means what the setting of that name means."""
    return typer.Option(help=FIELDS[name].description)


Data = Annotated[str, _meaning("data")]
DataDir = Annotated[Path | None, _meaning("data_dir")]
ImageSize = Annotated[int | None, _meaning("image_size")]
Net = Annotated[str, _meaning("net")]
PlanName = Annotated[str, _meaning("plan")]
Precision = Annotated[str, _meaning("precision")]
Devices = Annotated[str, _meaning("devices")]
Batch = Annotated[int, _meaning("batch")]
Slowdown = Annotated[str | None, _meaning("slowdown")]
Timeout = Annotated[float, _meaning("timeout_s")]
Port = Annotated[int | None, _meaning("port")]
Print = Annotated[
    bool,
    typer.Option("--print", help="Start nothing: print the line to paste in a shell on each host of --fleet."),
]


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
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


def image_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width as `--image` gives them. InputError if it does not."""
    sizes = [int(n) for n in numbers_of("--image", text)]
    if len(sizes) != 3 or min(sizes) < 1:
        raise InputError(f"--image {text}: give channels, height and width, e.g. 3,32,32")
    return sizes[0], sizes[1], sizes[2]


def numbers_of(option: str, text: str) -> tuple[float, ...]:
    """An option's numbers with commas between them. InputError if it has others."""
    try:
        return numbers(text)
    except InputError as error:
        raise InputError(f"{option} {text!r}: {error}") from None
