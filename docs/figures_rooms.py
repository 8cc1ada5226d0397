"""Draws the rooms of the package in the order of their imports, and what each imports.

python -m docs.figures_rooms         # writes docs/figures/rooms.svg

The order is that of the contract in pyproject.toml, which `make check` keeps; the imports are read from the source files.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from docs.drawing import Drawing, write

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).parent / "figures"
PACKAGE = "convoy"
STEP, TOP, LEFT = 23.0, 48.0, 20.0

KINDS = {
    "values and pure functions": "layout model plan fleet simulate planner errors",
    "devices, clocks, network, disk": "machine comm runtime checkpoint data elastic train measure",
    "what people write and read": "files config runlog report",
    "ways in": "api launch ray lightning idle emulate doctor setup cli",
}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def figures() -> dict[str, Drawing]:
    """The figure under the name of its file."""
    return {"rooms.svg": rooms_figure()}


def layers() -> list[list[str]]:
    """The rooms from low to high; those of one layer do not import each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (rows,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [[name.strip() for name in row.split("|")] for row in reversed(rows)]


def rooms() -> list[str]:
    """All rooms, from low to high. The version number is none."""
    return [room for layer in layers() for room in layer if not room.startswith("_")]


def imports() -> set[tuple[str, str]]:
    """Pairs of rooms: the first imports something of the second."""
    pairs = set()
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        room = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        pairs |= {(room, other) for other in _imported(ast.parse(path.read_text(encoding="utf-8"))) if other != room}
    return {(room, other) for room, other in pairs if {room, other} <= set(rooms())}


def _imported(tree: ast.AST) -> Iterator[str]:
    """The rooms that a file imports from, where it stands in no function too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}."))


def rooms_figure() -> Drawing:
    """A staircase: each room a step, dots to its left for the rooms that it imports."""
    order, found = rooms(), imports()
    colour = {room: COLOURS[i] for i, names in enumerate(KINDS.values()) for room in names.split()}
    size = len(order) * STEP
    drawing = Drawing(
        LEFT + size + 110, TOP + size + 20, "The rooms of the package in import order, and what each imports"
    )
    place = {room: (LEFT + i * STEP, TOP + i * STEP) for i, room in enumerate(order)}
    for room, (x, y) in place.items():
        middle = y + STEP / 2
        if users := [place[user][1] for user, used in found if used == room]:
            drawing.rule(x + STEP / 2, y + STEP, x + STEP / 2, max(users) + STEP / 2)
        if x > LEFT:
            drawing.rule(LEFT, middle, x, middle)
        drawing.box(x, y + 2, 84, STEP - 4, colour[room], 0.25)
        drawing.edge(x, y + 2, 84, STEP - 4)
        drawing.text(x + 8, middle + 4, room, "strong", "start")
    for room, used in sorted(found):
        drawing.box(place[used][0] + STEP / 2 - 4, place[room][1] + STEP / 2 - 4, 8, 8, colour[used])
    drawing.text(LEFT, 26, "Each room imports only rooms above it in this picture", "strong", "start")
    x, y = LEFT + size * 0.42, TOP + 8
    for kind, shade in zip(KINDS, COLOURS, strict=True):
        drawing.box(x, y, 12, 12, shade, 0.6)
        drawing.text(x + 20, y + 10, kind, "", "start")
        y += 20
    for line in ("along a row: what a room imports", "down a column: who imports it"):
        y += 18
        drawing.text(x, y, line, "small", "start")
    return drawing


if __name__ == "__main__":
    for path in write(FOLDER, figures()):
        print(path)
