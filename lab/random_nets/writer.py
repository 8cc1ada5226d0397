"""Write the source of a random module: classes, helpers, and changes to the finished model."""

import inspect
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from textwrap import indent

from lab.random_nets import helpers

HEADER = """\
import copy, functools, math
from collections import namedtuple
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
"""
CLASSES = 5
"""Width of what a net answers."""


@dataclass
class File:
    """One source file, shared by several classes.

    Attributes:
        after: lines that are run on the finished model, which they call `net`, before it is distributed.
        before: lines that are run before step k; they call the model `net`, and the part of it on a device, too.
    """

    classes: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def text(self, inputs: str) -> str:
        build = ["net = Net()", *self.after, "return net"]
        parts = [
            *self.classes,
            "def build():\n" + indent("\n".join(build), "    "),
            "def before_step(k, net):\n" + indent("\n".join(self.before or ["pass"]), "    "),
            f"INPUTS = {inputs}\n",
        ]
        return "\n\n".join((HEADER, *_helpers("\n".join(parts)), *parts))


def _helpers(text: str) -> list[str]:
    """Return the source of the helpers that a text names."""
    words = set(re.findall(r"\w+", text))
    plain = {"SCALE": 'SCALE = {"value": 1.0}', "Pair": 'Pair = namedtuple("Pair", "main other")'}
    own = {k: v for k, v in vars(helpers).items() if getattr(v, "__module__", "") == helpers.__name__ and k in words}
    return [plain[k] if k in plain else inspect.getsource(v).strip() for k, v in own.items()] + [
        v for k, v in plain.items() if k in words and k not in own
    ]


@dataclass
class Writer:
    """One class: its `__init__` and its `forward`, in which `x` is the current value.

    Attributes:
        shape: of `x` without its batch axis: (channels, height, width).
        kept: names of earlier values of this forward, with their shapes.
        arguments: what forward takes after x.
        returns: what it returns.
    """

    file: File
    name: str
    shape: tuple[int, int, int]
    inits: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    kept: list[tuple[str, tuple[int, int, int]]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    returns: str = "x"

    def fresh(self, stem: str) -> str:
        return f"{stem}{next(self.file.numbers)}"

    def make(self, expression: str, stem: str = "") -> str:
        """Give the module an attribute; return `self.name`."""
        stem = stem or (re.findall(r"nn\.([A-Z]\w+)", expression) or ["own"])[0].lower()
        name = f"self.{self.fresh(stem)}"
        self.inits.append(f"{name} = {expression}")
        return name

    def line(self, *lines: str) -> None:
        self.lines.extend(lines)

    def write(self, text: str, rng: Random) -> None:
        """Write a line in the language of `steps.txt`."""
        number, out = self.fresh(""), rng.choice((4, 6, 8))
        text = re.sub("«([^»]*)»", lambda m: rng.choice(m[1].split("|")), text)
        text = re.sub(r"\$(c|h|w|out|n)\b", lambda m: str({**self._sizes(), "out": out, "n": number}[m[1]]), text)
        text, _, shape = text.partition(" -> ")
        names: dict[str, str] = {}

        def make(found: re.Match[str]) -> str:
            kind, name, expression = re.fullmatch(r"(buffer )?(?:(\w+): )?(.*)", found[1]).groups()  # type: ignore[union-attr]
            if kind:
                made = f"self.{self.fresh('buffer')}"
                self.inits.append(f"self.register_buffer({made.removeprefix('self.')!r}, {expression})")
            else:
                made = self.make(expression)
            names[name or ""] = made
            return made

        text = re.sub("<<(.*?)>>", make, text)
        text = re.sub(r"\$\$(\w+)", lambda m: names[m[1]].removeprefix("self."), text)
        text = re.sub(r"\$(\w+)", lambda m: names[m[1]], text)
        for row in text.split(" ;; "):
            kind, _, rest = row.partition(": ")
            where = {"init": self.inits, "after": self.file.after, "before": self.file.before}.get(kind, self.lines)
            where.append((row if where is self.lines else rest).replace("____", "    "))
        if shape:
            self.shape = eval(shape)

    def _sizes(self) -> dict[str, int]:
        return dict(zip("chw", self.shape, strict=True))

    def choose(self, rows: list[str], rng: Random) -> None:
        """Write one of the lines whose condition holds."""
        possible = []
        for row in rows:
            condition = re.match(r"\[(.*?)\] ", row) if row.startswith(("[$", "[min")) else None
            if condition is None:
                possible.append(row)
            elif eval(re.sub(r"\$(\w+)", lambda m: str({**self._sizes(), "out": 4}[m[1]]), condition[1])):
                possible.append(row[condition.end() :])
        if possible:
            self.write(rng.choice(possible), rng)

    def finish(self) -> None:
        init = ["super().__init__()", *self.inits]
        takes = "".join(f", {a}" for a in self.arguments)
        body = [
            f"class {self.name}(nn.Module):",
            "    def __init__(self):",
            indent("\n".join(init), " " * 8),
            f"    def forward(self, x{takes}):",
            indent("\n".join([*self.lines, f"return {self.returns}"]), " " * 8),
        ]
        self.file.classes.append("\n".join(body))


def _read(file: str) -> dict[str, tuple[str, list[str]]]:
    _, *sections = (Path(__file__).parent / file).read_text().split("## ")
    result = {}
    for section in sections:
        title, *rows = filter(None, section.splitlines())
        group, name = title.split(": ")
        result[name] = (group, rows)
    return result


STEPS = _read("steps.txt")
"""Name -> (group, its lines)."""
