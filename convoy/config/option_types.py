"""Values as people write them: numbers with commas between them, devices, names out of a list."""

import importlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from convoy.errors import InputError
from convoy.sharding.comm_dtype import parse_comm_dtype

MAX_DEVICES = 1024
"""More processes than that on one machine are a slip of the finger."""


AUTO_DEVICE = "auto"
"""As `--devices`: every GPU of this machine, or its CPU where there is none. As one device's name: the best for its place."""

ALL = "all"
"""As `--devices`: every GPU of this machine, and its CPU."""


def numbers(value: Any) -> tuple[float, ...]:
    """Numbers as a person gives them: a text with commas between them, or a list.

    Raises:
        InputError: says what to give.
    """
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if isinstance(parts, list | tuple) and not any(isinstance(part, bool) for part in parts):
            return tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        pass
    raise InputError("give numbers with commas between them, e.g. 1,1,2,4")


def device_names(text: str) -> tuple[str, ...]:
    """The devices of `--devices`: a number, their names, `auto` or `all`. Under torchrun, its number counts.

    Raises:
        InputError: no device, too many, or a name left out.
    """
    named = tuple(part.strip() for part in text.split(","))
    if os.environ.get("WORLD_SIZE", "").isdigit():
        count = int(os.environ["WORLD_SIZE"])
        return named if len(named) == count and not text.isdigit() and text != ALL else (AUTO_DEVICE,) * count
    if text in (AUTO_DEVICE, ALL):
        return _devices_here(every=text == ALL)
    if text.strip().isdigit():
        count = int(text)
        if not 1 <= count <= MAX_DEVICES:
            raise InputError(f"--devices {count}: give a number from 1 to {MAX_DEVICES}, or their names: cuda:0,cpu")
        return ("cpu",) * count if count > 1 else (AUTO_DEVICE,)
    if not all(named):
        raise InputError(f"--devices {text!r}: give a number, or names with commas between them: cuda:0,cpu")
    return named


def _devices_here(every: bool) -> tuple[str, ...]:
    """This machine's GPUs, or the CPU where there is none; or every device, its GPUs and its CPU."""
    if os.environ.get("CONVOY_DEVICE") and not every:
        return (AUTO_DEVICE,)
    devices: tuple[str, ...] = importlib.import_module("convoy.comm.environment").local_devices()
    chosen = devices if every else devices[:-1]
    return chosen if len(chosen) > 1 else (AUTO_DEVICE,)


def devices_text(value: Any) -> Any:
    """A run file may give a number or a list, too."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return ",".join(map(str, value)) if isinstance(value, list) else value


def checked_data(text: str) -> str:
    """Checked without reading anything. convoy.data is imported when there is something to check: --help needs no torch."""
    importlib.import_module("convoy.data").check(text)
    return text


def checked_augment(text: str) -> str:
    importlib.import_module("convoy.data.augment").augment_steps(text)
    return text


def checked_tensorboard(folder: Path) -> Path:
    """A folder for TensorBoard's events, checked before anything starts.

    Raises:
        InputError: tensorboard is not installed, or the path is no folder.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("tensorboard is not installed: pip install 'convoy-train[tensorboard]', or leave it out")
    if folder.exists() and not folder.is_dir():
        raise InputError("give a folder: this is a file")
    return folder


def wire_text(value: Any) -> Any:
    return parse_comm_dtype(value) if isinstance(value, str) else value


def one_of(home: str) -> AfterValidator:
    """A name out of those in `module:NAMES`, which is imported when a name is to be checked: --help needs no torch."""

    def check(name: str) -> str:
        module, _, names = home.partition(":")
        choices: Iterable[str] = getattr(importlib.import_module(module), names)
        if name not in choices:
            raise InputError(f"choose one of {', '.join(sorted(choices))}")
        return name

    return AfterValidator(check)


File = Annotated[Path, Field(strict=False)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(numbers)]
