"""Defines the typer app, options shared by verbs, and options made from the list of settings."""

import inspect
import os
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy._version import __version__
from convoy.config.train_options import FIELDS, a_path, extra_of, key_of, kind_of
from convoy.errors import InputError, shown
from convoy.fleet.units import quantity

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


def in_job() -> bool:
    """Return whether torchrun, srun or mpirun started this process. Set torchrun's variables from its rank."""
    from convoy.machine.launch_env import as_torchrun, is_one_of_job

    os.environ.update(as_torchrun(os.environ))
    return is_one_of_job(os.environ)


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of an option's text, whose errors name the option."""

    def parsed(text: str) -> Any:
        try:
            return parse(text) if isinstance(text, str) else text  # a default is parsed already
        except InputError as error:
            raise typer.BadParameter(f"{shown(text)}: {error}") from None

    return parsed


def help_of(name: str) -> str:
    return str(FIELDS[name].description)


path_of = _parser(lambda text: Path(a_path(text)))
_KINDS: dict[str, dict[str, Any]] = {
    "PATH": {"parser": path_of},
    "TIME": {"parser": _parser(lambda text: quantity(text, "s"))},  # 30, 450 ms, 2 min
    "RATE": {"parser": _parser(lambda text: quantity(text, "bytes_per_s"))},  # 1 Gbit/s, 110 MB/s
    "N": {"min": 1, "max": 10**9},
}


def option(metavar: str, meaning: str, *names: str, **more: Any) -> Any:
    """Return an option of a verb. PATH, TIME, RATE and N are parsed and checked."""
    return typer.Option(*names, help=meaning, metavar=metavar, **_KINDS.get(metavar, {}) | more)


def flag(meaning: str, *names: str) -> Any:
    return typer.Option(*names, help=meaning)


def argument(metavar: str, meaning: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=meaning, **more)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        formatter = ctx.make_formatter()
        for panel, names in groupby(FIELDS, lambda name: extra_of(name)["panel"]):
            with formatter.section(panel):
                formatter.write_dl([(f"--{key_of(name)}", help_of(name) + _default_of(name)) for name in names])
        print(f"{formatter.getvalue()}\nA switch is turned off by --no-NAME.")
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options and exit.")
]


def _default_of(name: str, **defaults: Any) -> str:
    value = defaults.get(name, FIELDS[name].default)
    return "" if value in (None, False) else f"  [default: {value}]"


def with_settings(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option to a verb for each named setting, or for all. An option not given is None: a run file may set it.

    `--help` shows the first sentence of each text, and of all settings only the common ones.

    Args:
        defaults: of this verb, where they differ from the settings'.
    """

    options = {}
    for name in names or FIELDS:
        kind = kind_of(name)
        metavar = {Path: "PATH", int: "N", float: "X", str: "TEXT"}.get(kind)
        option = typer.Option(
            *([] if kind is bool else [f"--{key_of(name)}"]),
            help=help_of(name).split(". ")[0].rstrip(".") + _default_of(name, **defaults).replace("default: ", ""),
            hidden=not names and not extra_of(name)["often"],
            show_default=False,
            **({"metavar": "TIME"} | _KINDS["TIME"] if name.endswith("_s") else {"metavar": metavar}),
        )
        # Parse a path as text, to refuse an empty one: as a Path it would be the current folder.
        options[name] = Annotated[(str if kind in (tuple, Path) else kind) | None, option], defaults.get(name)
    return with_options(options)


def with_options(options: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a verb, which takes them as `**given`: annotation and default by name."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        parameters = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, (annotation, default) in options.items():
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return verb

    return decorate
