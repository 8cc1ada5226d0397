"""What a person names as a file may be anything: what is read, what is refused, and that nothing but a file is replaced."""

import os
import time
from pathlib import Path

import pytest

from convoy.errors import MOST_LINE, MOST_LINES, MOST_SHOWN, ConvoyError, InputError, PlanError, bounded, shown
from convoy.files import open_regular, parse_json, parse_toml, read_text, unwritable, write_whole


def read(path: Path, **options: int) -> str:
    return read_text(path, "the plan", "give another", kind=PlanError, **options)


def test_text_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"caf\xc3\xa9\n", b"\xef\xbb\xbfcaf\xc3\xa9\n"):
        path.write_bytes(content)
        assert read(path) == "café\n"
    (tmp_path / "link").symlink_to(path)
    assert read(tmp_path / "link") == "café\n"


def test_binary_file_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"ab\xff")
    os.mkfifo(tmp_path / "pipe")
    rows = {
        path: r"it is not UTF-8 text \(invalid start byte at byte 2\)",
        tmp_path: "it is a folder, not a regular file",
        tmp_path / "gone": "No such file or directory",
        path / "x": "Not a directory",
        tmp_path / "pipe": "it is a pipe, not a regular file",
        Path("/dev/zero"): "it is a device, not a regular file",
        tmp_path / "a\0b": "embedded null byte",
        tmp_path / ("x" * 5000): "File name too long",
    }
    for each, why in rows.items():
        with pytest.raises(PlanError, match=rf"^cannot read the plan (?s:.*): {why}; give another$"):
            read(each)
    with pytest.raises(PlanError, match="it has more than 2 bytes"):
        read(path, most_bytes=2)
    with pytest.raises(OSError, match="it is a pipe"):
        open_regular(tmp_path / "pipe")


def test_depth_and_digits_are_limited() -> None:
    assert parse_toml('a.b = [[1]]\nc = "[[[["', "x") == {"a": {"b": [[1]]}, "c": "[[[["}
    assert parse_json('"' + "[" * 5000 + '"') == "[" * 5000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    for text in (f"a = {'[' * 5000}{']' * 5000}", f"a = {'9' * 5000}", "a = "):
        with pytest.raises(InputError, match=r"^my\.toml: not TOML: .*; correct that line$"):
            parse_toml(text, "my.toml")


def test_atomic_write_replaces_only_its_file(tmp_path: Path) -> None:
    """As root, `--save-plan /dev/null` put a file in the place of the device."""
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    path.write_text("old")
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(path)
    for name, age_s in ((".file.12", 100), (".file.13", 0), (".file.name", 100)):  # the first one of a killed process
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    write_whole(tmp_path / "link", "new \ud800")
    assert (tmp_path / "link").is_symlink()
    assert path.read_text() == "new \\ud800"
    for other, why in ((pipe, "it is a pipe"), (tmp_path, "it is a folder"), (path / "x", "Not a directory")):
        with pytest.raises(InputError, match=rf"cannot write .*: {why}.*; name a file in a folder that you may write"):
            write_whole(other, "text")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".file.13", ".file.name", "file", "link", "pipe"]


def test_creatable_folders_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unwritable(tmp_path / "a" / "b") == ""
    assert unwritable(tmp_path / "file" / "b") == f"{tmp_path / 'file'} is no folder"
    assert unwritable(tmp_path / ("x" * 5000)) == "File name too long"


def test_messages_and_the_values_in_them_are_bounded() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    values = ["x" * 400_000, 10**10_000, nested, list(range(10**5)), {"a": "b" * 10**5}, b"\0" * 10**5]
    assert max(len(shown(value)) for value in values) <= MOST_SHOWN
    assert shown("it's") == '"it\'s"'
    assert shown(Path("a/b")) == "a/b"
    message = str(ConvoyError("value " + "x" * 10**6 + " remedy"))
    assert len(message) <= MOST_LINE
    assert (message[:9], message[-9:]) == ("value xxx", "xx remedy")
    lines = bounded("\n".join(map(str, range(10**5)))).split("\n")
    assert len(lines) <= MOST_LINES + 1
    assert (lines[0], lines[-1]) == ("0", "99999")
