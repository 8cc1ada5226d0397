"""Directives whose content is read from the code while the pages are built, so that it cannot go stale.

`{settings}`      the settings of a training, from `convoy.config.train_options`
`{commands}`      the verbs of the command line with their options, from typer's own description of them
`{builtin-nets}`  the networks that Convoy builds, from `convoy.model.nets.builtin`
`{rooms}`         the rooms of the package, each with the first sentence of its docstring
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from convoy.cli import app as command_line
from convoy.config.train_options import FIELDS, MAX_NUMBER, extra_of, key_of, kind_of
from convoy.model.nets.builtin import NETS
from docs.figures_rooms import PACKAGE, ROOT, rooms


def settings_markdown() -> str:
    """A table for each part of the list of settings."""
    panels: dict[str, list[list[str]]] = {}
    for name, field in FIELDS.items():
        default = "" if field.default is None else f"`{_as_written(field.default)}`"
        row = [f"`{key_of(name)}`", f"{_plain(field.description or '')}{_rule_of(name)}", default]
        panels.setdefault(extra_of(name)["panel"], []).append(row)
    parts = [f"## {title}\n\n{_table(['key', 'meaning', 'default'], rows)}" for title, rows in panels.items()]
    return "\n\n".join(parts)


_BOUNDS = {"ge": "at least {:,}", "gt": "above {:,}", "le": "at most {:,}", "lt": "below {:,}"}
_KINDS = {int: "whole number", float: "number", tuple: "numbers with commas between them, e.g. 1,1,2,4"}


def _rule_of(name: str) -> str:
    """What may be given for a setting, beyond a text, a path or a switch."""
    bounds = [
        words.format(getattr(each, side))
        for each in FIELDS[name].metadata
        for side, words in _BOUNDS.items()
        if getattr(each, side, MAX_NUMBER) != MAX_NUMBER
    ]
    kind = _KINDS.get(kind_of(name))
    return f" *A {', '.join([kind, *bounds])}.*".replace("A numbers", "Numbers") if kind else ""


def commands_markdown() -> str:
    """A section for each verb."""
    top: Any = typer.main.get_command(command_line)
    return "\n\n".join(_verbs("convoy", top))


def nets_markdown() -> str:
    """The networks by name."""
    rows = []
    for name, (build, defaults, meaning, least) in NETS.items():
        default = ":".join(map(str, (name, *defaults)))
        rows.append([f"`{default}`", _first_line(build.__doc__), meaning, f"{least}x{least}"])
    return _table(["net (with its default sizes)", "what it is", "sizes", "smallest image"], rows)


def rooms_markdown() -> str:
    """The rooms of the package, from low to high."""
    return _table(["room", "what it is for"], [[f"`{room}`", purpose_of(room)] for room in rooms()])


def purpose_of(room: str) -> str:
    """The first sentence of a room's docstring; empty where it has none."""
    place = ROOT / PACKAGE / room
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    paragraph = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return re.split(r"(?<=\.) ", " ".join(paragraph.split()))[0].rstrip(".:")


def _verbs(path: str, command: Any) -> Iterator[str]:
    for name, verb in getattr(command, "commands", {}).items():
        if verb.hidden:
            continue
        if getattr(verb, "commands", None):
            yield from _verbs(f"{path} {name}", verb)
        else:
            yield _section(f"{path} {name}", verb)


def _section(title: str, verb: Any) -> str:
    """A verb's help, its arguments and its options; the settings of a training are told elsewhere."""
    own = [
        each
        for each in verb.params
        if not getattr(each, "hidden", False) and (each.name not in FIELDS or title != "convoy train")
    ]
    rows = [
        [_call(each), _plain(getattr(each, "help", "") or ""), _default(each)] for each in own if each.name != "help"
    ]
    lines = [f"## `{title}`", _help(verb.help or "")]
    if rows:
        lines.append(_table(["argument or option", "meaning", "default"], rows))
    if len(own) < len(verb.params):
        lines.append("All other options are the [settings of a training](settings.md), with `--` in front.")
    return "\n\n".join(lines)


def _help(text: str) -> str:
    """Paragraphs; a line that begins with "Example:" as a console block."""
    paragraphs = []
    for part in _plain(text).strip().split("\n\n"):
        words = " ".join(part.split())
        example = words.removeprefix("Example: ")
        paragraphs.append(words if example == words else f"```console\n$ {example}\n```")
    return "\n\n".join(paragraphs)


def _call(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or str(parameter.name).upper()}`"
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    return f"{names}, `{parameter.secondary_opts[0]}`" if parameter.secondary_opts else names


def _default(parameter: Any) -> str:
    if parameter.required or parameter.default in (None, False, ()) or callable(parameter.default):
        return "required" if parameter.required else ""
    return f"`{_as_written(parameter.default)}`"


def _as_written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ",".join(map(str, value))
    return str(value)


def _plain(markup: str) -> str:
    """Guard what Markdown would read as marks."""
    return markup.replace("<", "&lt;").replace("*", "\\*")


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().splitlines()[0]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


class _Written(SphinxDirective):
    """Markdown that a function of this file writes."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(Path(__file__)))
        writers = {
            "settings": settings_markdown,
            "commands": commands_markdown,
            "builtin-nets": nets_markdown,
            "rooms": rooms_markdown,
        }
        return self.parse_text_to_nodes(writers[self.name](), allow_section_headings=True)


def join_names(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Attributes that are told together, "reads, writes: ...": Sphinx would take the first for the type of the second."""
    for number, line in enumerate(lines):
        if found := re.match(r"(\s+)(\w+(?:, \w+)+)(:.*)", line):
            indent, names, rest = found.groups()
            lines[number] = f"{indent}{names.replace(' ', '')}{rest}"


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", join_names, priority=400)  # before napoleon reads them
    for name in ("settings", "commands", "builtin-nets", "rooms"):
        app.add_directive(name, _Written)
    return {"parallel_read_safe": True}
