"""Parses user input: numbers, devices, addresses. Every function raises InputError, with the correct form."""

import importlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from convoy.errors import InputError, shortened, shown
from convoy.fleet.units import quantity
from convoy.layout.comm_dtype import parse_comm_dtype

MAX_DEVICES = 1024  # more processes on one machine are a typing error

AUTO_DEVICE = "auto"
"""As `--devices`: every GPU of this machine, or its CPU if there is none. As one device's name: the best for its rank."""

ALL = "all"
"""As `--devices`: every GPU of this machine, and its CPU."""


def numbers(value: Any) -> tuple[float, ...]:
    """Parse comma-separated numbers, or a list."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if isinstance(parts, list | tuple) and not any(isinstance(part, bool) for part in parts):
            return tuple(float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError("give numbers with commas between them, e.g. 1,1,2,4")


def seconds(value: Any) -> Any:
    """Parse seconds from text: 450 ms, 2 min, 30. Return other types unchanged."""
    return quantity(value, "s") if isinstance(value, str) else value


def sizes(value: Any) -> Any:
    """Parse comma-separated byte sizes: 6 GB,8 GB."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int | float) else value
    found = tuple(quantity(part, "bytes") for part in parts) if isinstance(parts, list | tuple) else (0.0,)
    if not found or min(found) < 1:
        raise InputError("give a memory above zero, or one for each device: 6 GB or 6 GB,8 GB")
    return found


def device_names(text: str) -> tuple[str, ...]:
    """Parse `--devices`: a number, names, `auto` or `all`. Under torchrun, WORLD_SIZE gives the number."""
    named = tuple(part.strip() for part in text.split(","))
    is_number = text.isdecimal()
    if (processes := os.environ.get("WORLD_SIZE", "")).isdecimal():
        count = int(processes)
        return named if len(named) == count and not is_number and text != ALL else (AUTO_DEVICE,) * count
    if text == ALL or (text == AUTO_DEVICE and not os.environ.get("CONVOY_DEVICE")):
        # Imported here, because it imports torch.
        here: tuple[str, ...] = importlib.import_module("convoy.machine.accelerator").local_devices()
        chosen = here if text == ALL else here[:-1]
        return chosen if len(chosen) > 1 else (AUTO_DEVICE,)
    if is_number:
        if len(text) > 9 or not 1 <= int(text) <= MAX_DEVICES:
            raise InputError(
                f"--devices {shortened(text)}: give a number from 1 to {MAX_DEVICES}, or their names: cuda:0,cpu"
            )
        return ("cpu",) * int(text) if int(text) > 1 else (AUTO_DEVICE,)
    if not all(named) or any(name[0] in "-+." for name in named):
        raise InputError(f"--devices {shown(text)}: give a number, or names with commas between them: cuda:0,cpu")
    return named


def devices_text(value: Any) -> Any:
    """Convert a run file's number or list to the text of `--devices`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return ",".join(map(str, value)) if isinstance(value, list) else value


def a_path(value: Any) -> Any:
    """Refuse an empty path, which would mean the current folder."""
    if isinstance(value, str) and not value.strip():
        raise InputError("give a path: this is empty; the current folder is .")
    return value


def read_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, as a job prints it."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(
            f"{shown(text)} is no address of a job: give HOST:PORT, as the job prints it, e.g. 192.168.1.5:7000"
        )
    host = host.strip("[]")
    if host in ("0.0.0.0", "::", "*"):
        raise InputError(
            f"{shown(text)} means all addresses of this machine, but other machines need one that they can reach: give that, "
            "e.g. 192.168.1.5:7000"
        )
    return host, int(port)


def listen_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT or HOST. Port 0 means a free one."""
    return read_address(text) if ":" in text else (read_address(f"{text}:1")[0], 0)


# These checks need modules that import torch. Import them only for the check, so that --help is quick.


def one_of(home: str) -> AfterValidator:
    """Check a name against `module:NAMES`."""

    def check(name: str) -> str:
        module, _, names = home.partition(":")
        choices: Iterable[str] = getattr(importlib.import_module(module), names)
        if name not in choices:
            raise InputError(f"choose one of {', '.join(sorted(choices))}")
        return name

    return AfterValidator(check)


def checked_by(home: str) -> AfterValidator:
    """Check a text by calling `module:function`."""

    def check(text: str) -> str:
        module, _, function = home.partition(":")
        getattr(importlib.import_module(module), function)(text)
        return text

    return AfterValidator(check)


def needs(package: str) -> AfterValidator:
    """Refuse a setting if its package is not installed."""

    def check(value: Any) -> Any:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:  # W&B keeps its files in a folder "wandb", which is no package
            raise InputError(f"{package} is not installed: pip install 'convoy-train[{package}]', or leave it out")
        return value

    return AfterValidator(check)


Seconds = Annotated[float, BeforeValidator(seconds)]
Sizes = Annotated[tuple[float, ...], BeforeValidator(sizes)]
File = Annotated[Path, BeforeValidator(a_path), Field(strict=False)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(numbers)]
Devices = Annotated[str, BeforeValidator(devices_text)]
Wire = BeforeValidator(lambda value: parse_comm_dtype(value) if isinstance(value, str) else value)
Listen = Annotated[str, checked_by(f"{__name__}:listen_address")]
