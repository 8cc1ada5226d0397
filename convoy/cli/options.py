"""Defines the typer app, options shared by verbs, and options made from the list of settings."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from convoy._version import __version__
from convoy.config.train_options import FIELDS, a_path, extra_of, key_of, kind_of, seconds
from convoy.errors import InputError, shown

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


def help_of(name: str) -> str:
    return str(FIELDS[name].description)


PATH: Mapping[str, Any] = {"parser": path_of, "metavar": "PATH"}
SECONDS: Mapping[str, Any] = {"parser": seconds_of, "metavar": "TIME"}  # 30, 450 ms, 2 min

Print = Annotated[bool, typer.Option("--print", help="Print a line for each host of --fleet; start nothing.")]


class SettingsCommand(TyperCommand):
    """A verb with settings as options. `--help` lists common ones with their defaults; `--help-all` lists all."""

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
                part = extra_of(name)["panel"]
            elif extra_of(name)["often"]:
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
    """Add an option to a verb for each named setting, or for all. An option not given is None: a run file may set it.

    Args:
        defaults: of this verb, where they differ from the settings'.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = []
        for name in names or FIELDS:
            kind = kind_of(name)
            metavar = {Path: "PATH", int: "N", float: "X", str: "TEXT"}.get(kind)
            # Parse a path as text, to refuse an empty one: as a Path it would be the current folder.
            kind = str if kind in (tuple, Path) else kind
            default = defaults.get(name, FIELDS[name].default)
            option = typer.Option(
                *([] if kind is bool else [f"--{key_of(name)}"]),
                help=help_of(name) + ("" if default is None or kind is bool else f"  [default: {default}]"),
                show_default=False,
                **(SECONDS if name.endswith("_s") else {"metavar": metavar}),
            )
            annotation: Any = Annotated[kind | None, option]
            options.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation
                )
            )
        verb.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return verb

    return decorate
