"""Reads and writes run files: the settings of a training in TOML. Also tracks the source of each value.

    # convoy train run.toml --epochs 20
    data = "cifar10"
    net = "two-conv:150:800"
    devices = 4
    slowdown = [1, 1, 2, 4]
    weight-decay = 5e-4

Keys are the options of `convoy train` without the dashes in front. The command line overrides the file, the file overrides
the defaults. Relative paths start at the working folder.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from convoy.config.train_options import FIELDS, Settings, extra_of, key_of
from convoy.errors import InputError, shortened, shown
from convoy.files import parse_toml, read_text

_NAMES = {key_of(name): name for name in FIELDS}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The resolved settings of a run.

    Attributes:
        sources: by name of a setting: "default", "command line", or file and line.
    """

    settings: Settings
    sources: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return key, value and source of every setting, for people."""
        values = self.settings.model_dump()
        return [(key, _shown(values[name]), self.sources[name]) for key, name in _NAMES.items()]


def resolve_settings(file: Path | None, given: Mapping[str, Any]) -> RunSettings:
    """Merge defaults, run file and command line.

    Args:
        given: command line values by setting name; they override the file's. None: not given.
    """
    values, sources = ({}, {}) if file is None else _read(file)
    given = {name: value for name, value in given.items() if value is not None}
    values |= given
    sources |= dict.fromkeys(given, "command line")

    def refused(name: str, rule: object) -> InputError:
        value = shortened(_shown(values[name]))
        place = f"--{key_of(name)} {value}" if name in given else f"{sources[name]}: {key_of(name)} = {value}"
        return InputError(f"{place}: {rule}")

    for name, value in values.items():
        if isinstance(value, str | Path) and not str(value).isprintable():
            raise refused(name, "give a text in UTF-8, without line breaks and zero bytes")
    try:
        settings = Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        # Messages of our own validators already contain the remedy.
        rule = first.get("ctx", {}).get("error") or first["msg"][0].lower() + first["msg"][1:]
        raise refused(str(first["loc"][0]), rule) from None
    return RunSettings(settings, {name: sources.get(name, "default") for name in FIELDS})


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a run file, by name of the setting, and file and line of each."""
    text = read_text(file, "the run file", "give a TOML file, or settings as options: --net NET")
    table = parse_toml(text, str(file), 'write lines such as net = "two-conv:50:500"')
    if table.pop("try-again", False):  # in files of older versions
        raise InputError(
            f"{file}: try-again = true: lost devices are not restarted any more; remove the line, and let systemd run "
            "`convoy join` on machines that should rejoin"
        )
    values, places = {}, {}
    for key, value in table.items():
        pattern = re.compile(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
        line = next((number for number, row in enumerate(text.splitlines(), 1) if pattern.match(row)), None)
        place = str(file) if line is None else f"{file} line {line}"
        if key not in _NAMES:
            near = difflib.get_close_matches(key[:80].replace("_", "-").lower(), _NAMES, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "convoy train --help-all lists them, with -- before each"
            raise InputError(f"{place}: unknown key {shown(key)}: {remedy}")
        values[_NAMES[key]], places[_NAMES[key]] = value, place
    return values, places


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "-" if value is None else repr(value) if isinstance(value, str) else str(value)


def to_toml(settings: Settings) -> str:
    """Return all settings that have a value as a run file."""
    document = tomlkit.document()
    document.add(tomlkit.comment("convoy train FILE"))
    values, part = settings.model_dump(mode="json", exclude_none=True, exclude={"save_run"}), ""
    for name, value in values.items():
        if (panel := extra_of(name)["panel"]) != part:
            part = panel
            document.add(tomlkit.nl())
            document.add(tomlkit.comment(part))
        document.add(key_of(name), value)
    return tomlkit.dumps(document)
