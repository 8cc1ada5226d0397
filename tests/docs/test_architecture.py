"""The architecture page matches the code: every room has a purpose, every named file and name exists."""

import re

import pytest

from docs import figures_rooms
from docs.from_code import purpose_of, rooms_markdown
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_import_contract_lists_every_room() -> None:
    there = {path.name.removesuffix(".py") for path in (ROOT / "convoy").iterdir() if path.suffix in ("", ".py")}
    assert set(figures_rooms.rooms()) == {name for name in there if not name.startswith("_")}


def test_every_room_has_one_kind() -> None:
    kinds = [room for names in figures_rooms.KINDS.values() for room in names.split()]
    assert sorted(kinds) == sorted(figures_rooms.rooms())


def test_figure_finds_every_import_form() -> None:
    found = figures_rooms.imports()
    assert ("plan", "layout") in found
    # Imports in functions count too: the command line loads what a verb needs when it is called.
    assert ("cli", "emulate") in found
    order = figures_rooms.rooms()
    assert all(order.index(used) < order.index(room) for room, used in found)


@pytest.mark.parametrize("room", figures_rooms.rooms())
def test_every_room_states_its_purpose(room: str) -> None:
    assert 10 < len(purpose_of(room)) <= 130, f"the first sentence of {room}'s docstring: {purpose_of(room)!r}"
    assert f"| `{room}` |" in rooms_markdown()


def test_files_and_names_on_the_page_exist() -> None:
    paths = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(paths) > 30
    missing = {path for path in paths if not any((ROOT / at / path).is_file() for at in ("convoy", "."))}
    assert not missing, f"docs/architecture.md points to {sorted(missing)}"
    for path, names in re.findall(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", PAGE):
        text = (ROOT / "convoy" / path).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?:class |def )?{name}\b", text, re.M), f"{path} has no {name}"
