"""The ratchet of `make check`: limits of lines and counts that only fall."""

import tomllib
from pathlib import Path

import pytest

from tests.support.room_lines import ROOMS, faults, main, room_lines, structure_counts, with_limits


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two rooms that import each other's files, with one long signature, one repeated file name and one repeated class."""
    files = {
        "__init__.py": "",
        "top.py": "import convoy.a.one\n",
        "a/__init__.py": "",
        "a/one.py": "class Same: ...\n\n\ndef few(self, a, b, c, d, e, f, g, h): ...\n",
        "b/__init__.py": "",
        "b/one.py": "from convoy.a.one import Same as Other\n\n\nclass Same(Other): ...\n",
        "b/two.py": "from convoy.b import one\n\n\ndef many(a, b, c, d, e, f, g, *, h, i): ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "convoy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "convoy"


def test_counts_by_hand(package: Path) -> None:
    assert room_lines(package) == {"a": 4, "b": 8, "top": 1}
    assert structure_counts(package) == {
        "long_signatures": 1,
        "many_imports": 0,
        "repeated_file_names": 1,
        "repeated_class_names": 1,
        "single_importer_files": 1,  # b.one; two modules import a.one
    }


def test_counts_above_or_far_below_their_limit_fail() -> None:
    assert faults({"a": 97, "b": 100}, {"a": 100, "b": 100}, 0.03) == []
    assert faults({"a": 101}, {"a": 100}, 0.03) == ["a: 101, above the limit of 100: remove 1"]
    assert faults({"a": 96}, {"a": 100}, 0.03) == ["a: 96, below the limit of 100: lower the limit to 96"]
    assert faults({"a": 7}, {}, 0.03) == ["a: 7, and no limit: add `a = 7`"]
    assert faults({}, {"gone": 7}, 0.03) == ["gone: limit without a count: remove it"]


def test_writing_lowers_limits_and_never_raises_one() -> None:
    text = '[project]\nname = "x"\n\n[tool.convoy.rooms]\na = 10\nb = 10\ngone = 3\n\n[tool.other]\nkeep = 1\n'
    written = tomllib.loads(with_limits(text, ROOMS, {"a": 8, "b": 12, "new": 5}))
    assert written["tool"]["convoy"]["rooms"] == {"a": 8, "b": 10, "new": 5}
    assert written["project"] == {"name": "x"}
    assert written["tool"]["other"] == {"keep": 1}
    first = tomllib.loads(with_limits('[project]\nname = "x"\n', ROOMS, {"a": 8}))
    assert first["tool"]["convoy"]["rooms"] == {"a": 8}


def test_growing_room_fails_even_after_writing(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = package.parent
    (root / "pyproject.toml").write_text("")
    assert main(root, ["--write"]) == 0
    with (package / "b" / "one.py").open("a") as file:
        file.write("\n\nx = 1\n")
    assert main(root, ["--write"]) == 1
    assert "b: 11, above the limit of 8: remove 3" in capsys.readouterr().out
