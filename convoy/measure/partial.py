"""The file of a measuring that is not finished: the layers that all devices have measured, from which a second run goes on."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from convoy.errors import InputError
from convoy.files import parse_json, read_text

Rows = Sequence[Sequence[float]]
"""Of one layer on one device: samples, outputs, inputs, forward_s, backward_s, spread, shared (0 or 1)."""


class Partial:
    """A file of JSON lines: what is measured, then one line per layer with the rows of every device.

    Args:
        path: where; None keeps nothing.
        header: what must be the same for a second run to continue.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, json.loads(json.dumps(header))
        self.tables: dict[str, list[Rows]] = {}
        if path is not None:
            self.tables = self._read(path)
            self._write()

    def add(self, layer: str, rows: Sequence[Rows]) -> None:
        """Keep a layer that all devices have measured."""
        self.tables[layer] = [list(device) for device in rows]
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([layer, rows]) + "\n")

    def remove(self) -> None:
        """The measuring is done, or not wanted."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, list[Rows]]:
        """Whole lines of a run with the same header; nothing of any other, nor of a file that is none."""
        with suppress(InputError):
            first, *lines = read_text(path, "the measurement", "measure again").split("\n")
            if _parsed(first) != self.header:
                return {}
            # The last line of a run that was killed may be a part of one.
            pairs = [pair for pair in map(_parsed, lines) if _is_table(pair, len(self.header["devices"]))]
            return dict(pairs)
        return {}

    def _write(self) -> None:
        assert self.path is not None
        lines = [json.dumps(self.header), *(json.dumps(pair) for pair in self.tables.items())]
        try:
            self.path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; name a file in a folder you may write"
            ) from None


def unfinished(path: Path) -> str:
    """What to tell a person whose measuring ended early; empty where no layer was finished."""
    with suppress(InputError):
        text = read_text(path, "the measurement", "measure again")
        done = sum(_parsed(line) is not None for line in text.split("\n")[1:])
        if done:
            return f"{done} layers are measured and kept in {path}: the same command goes on from there"
    return ""


def _parsed(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _is_table(pair: Any, devices: int) -> bool:
    """Whether a line is a layer with rows of seven numbers from each device."""
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], list)):
        return False
    if len(pair[1]) != devices or not all(isinstance(table, list) for table in pair[1]):
        return False
    return all(
        isinstance(row, list) and len(row) == 7 and all(isinstance(n, int | float) and 0 <= n < 1e12 for n in row)
        for table in pair[1]
        for row in table
    )
