"""Values as people write them: numbers with commas between them, devices, addresses, names out of a list.

Every function here raises InputError, which says what to give.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from convoy.errors import InputError, shortened, shown
from convoy.files import unwritable
from convoy.fleet.units import quantity
from convoy.layout.comm_dtype import parse_comm_dtype

MAX_DEVICES = 1024  # more processes than that on one machine are a slip of the finger
MOST_CHARACTERS = 20_000  # of an option's value: more than the names of MAX_DEVICES devices need
MOST_PATH_BYTES = 4000
MOST_SHOWN = 4  # addresses

AUTO_DEVICE = "auto"
"""As `--devices`: every GPU of this machine, or its CPU if there is none. As one device's name: the best for its rank."""

ALL = "all"
"""As `--devices`: every GPU of this machine, and its CPU."""


def numbers(value: Any) -> tuple[float, ...]:
    """Read numbers from a text with commas between them, or from a list."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if isinstance(parts, list | tuple) and not any(isinstance(part, bool) for part in parts):
            return tuple(float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError("give numbers with commas between them, e.g. 1,1,2,4")


def seconds(value: Any) -> Any:
    """Read seconds from a text: 450 ms, 2 min, 30. Return anything else as it is."""
    return quantity(value, "s") if isinstance(value, str) else value


def sizes(value: Any) -> Any:
    """Read bytes from a text, with commas between several: 6 GB,8 GB."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int | float) else value
    found = tuple(quantity(part, "bytes") for part in parts) if isinstance(parts, list | tuple) else (0.0,)
    if not found or min(found) < 1:
        raise InputError("give a memory above zero, or one for each device: 6 GB or 6 GB,8 GB")
    return found


def device_names(text: str) -> tuple[str, ...]:
    """Read `--devices`: a number, names, `auto` or `all`. Under torchrun, its number of processes counts."""
    named = tuple(part.strip() for part in text.split(","))
    if (count := _count(os.environ.get("WORLD_SIZE", ""))) is not None:
        return named if len(named) == count and not text.isdecimal() and text != ALL else (AUTO_DEVICE,) * count
    if text in (AUTO_DEVICE, ALL):
        return _devices_here(every=text == ALL)
    if (count := _count(text)) is not None:
        if not 1 <= count <= MAX_DEVICES:
            raise InputError(
                f"--devices {shortened(text)}: give a number from 1 to {MAX_DEVICES}, or their names: cuda:0,cpu"
            )
        return ("cpu",) * count if count > 1 else (AUTO_DEVICE,)
    if not all(named) or any(name[0] in "-+." for name in named):
        raise InputError(f"--devices {shown(text)}: give a number, or names with commas between them: cuda:0,cpu")
    return named


def _count(text: str) -> int | None:
    """Read a whole number, or `MAX_DEVICES + 1` for any larger one; None if the text is none."""
    digits = text.strip().lstrip("0") or "0"
    if not (text.strip().isascii() and text.strip().isdecimal()):
        return None
    return min(int(digits), MAX_DEVICES + 1) if len(digits) <= 10 else MAX_DEVICES + 1


def _devices_here(every: bool) -> tuple[str, ...]:
    if os.environ.get("CONVOY_DEVICE") and not every:
        return (AUTO_DEVICE,)
    # Imported here, because it may import torch.
    devices: tuple[str, ...] = importlib.import_module("convoy.machine.accelerator").local_devices()
    chosen = devices if every else devices[:-1]
    return chosen if len(chosen) > 1 else (AUTO_DEVICE,)


def devices_text(value: Any) -> Any:
    """Turn a number or a list of a run file into the text of `--devices`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return ",".join(map(str, value)) if isinstance(value, list) else value


def wire_text(value: Any) -> Any:
    return parse_comm_dtype(value) if isinstance(value, str) else value


def checked_data(text: str) -> str:
    importlib.import_module("convoy.data").check(text)  # imported here: --help needs no torch
    return text


def checked_augment(text: str) -> str:
    importlib.import_module("convoy.data.augment").augment_steps(text)
    return text


def checked_tensorboard(folder: Path) -> Path:
    _check_installed("tensorboard")
    if why := unwritable(folder):
        raise InputError(f"give a folder that you may write: {why}")
    return folder


def checked_wandb(project: str) -> str:
    _check_installed("wandb")
    if not project.strip() or len(project) > 128 or any(sign in project for sign in "/\\#?%:"):
        raise InputError("give the name of a project: 1 to 128 characters, none of / \\ # ? % :")
    return project


def checked_mlflow(uri: str) -> str:
    _check_installed("mlflow")
    kind, _, rest = uri.partition(":")
    if uri != "databricks" and not (kind.isascii() and kind.replace("+", "").isalnum() and rest.strip("/")):
        raise InputError("give the address of a tracking store, such as http://host:5000 or sqlite:///mlflow.db")
    return uri


def _check_installed(name: str) -> None:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # W&B keeps its files in a folder "wandb", which is no package
        raise InputError(f"{name} is not installed: pip install 'convoy-train[{name}]', or leave it out")


def one_of(home: str) -> AfterValidator:
    """Check a name against `module:NAMES`. The module is imported only then, because --help needs no torch."""

    def check(name: str) -> str:
        module, _, names = home.partition(":")
        choices: Iterable[str] = getattr(importlib.import_module(module), names)
        if name not in choices:
            raise InputError(f"choose one of {', '.join(sorted(choices))}")
        return name

    return AfterValidator(check)


def check_text(text: str) -> None:
    """Refuse a text that no file, and no file's name, could hold."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"give a text of at most {MOST_CHARACTERS:,} characters")
    if "\0" in text or (not text.isascii() and text.encode("utf-8", "replace").decode() != text):
        raise InputError("give a text in UTF-8, without zero bytes")


def a_path(value: Any) -> Any:
    """Refuse an empty path, which would mean the current folder, and one that is too long."""
    if isinstance(value, str):
        if not value.strip():
            raise InputError("give a path: this is empty; the current folder is .")
        check_text(value)
        if len(value.encode()) > MOST_PATH_BYTES or any(len(part.encode()) > 255 for part in Path(value).parts):
            raise InputError(f"give a path of at most {MOST_PATH_BYTES} bytes, with names of at most 255")
    return value


Seconds = Annotated[float, BeforeValidator(seconds)]
Sizes = Annotated[tuple[float, ...], BeforeValidator(sizes)]
File = Annotated[Path, BeforeValidator(a_path), Field(strict=False)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(numbers)]


def read_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT, as a job prints it."""
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
    """Read HOST:PORT or HOST; without a port: 0, a free one."""
    return read_address(text) if ":" in text else (read_address(f"{text}:1")[0], 0)


def checked_listen(text: str) -> str:
    listen_address(text)
    return text


def shown_addresses(addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the addresses that a person is shown: of each host the first, then others; at most `MOST_SHOWN`."""
    first = {host: (host, port) for host, port in reversed(addresses)}
    return sorted(addresses, key=lambda address: first[address[0]] != address)[:MOST_SHOWN]


def addresses_text(addresses: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{port}" if ":" not in host else f"[{host}]:{port}" for host, port in addresses)
