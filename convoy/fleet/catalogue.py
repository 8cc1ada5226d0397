"""What devices of a kind can do, by name (`rtx3060`, `laptop-cpu`); every figure with its source, in `catalogue.toml`."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from convoy.errors import InputError, shown

IDLE = 0.1
"""Part of `busy_w` that a class without a figure of its own draws when it has nothing to do: an estimate."""

CORES_FOR_MEMORY = 4
"""So many cores of a processor fill its memory bandwidth; of one with more than sixteen, a quarter of them."""


_USUAL = ("rtx3060", "a100", "laptop-cpu", "desktop-cpu", "apple-m2", "raspberry-pi-5")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with where it is from; `estimate` marks what the source does not say."""

    value: float
    source: str
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One kind of device, in SI units.

    Attributes:
        kind: cpu, cuda (ROCm too, as torch calls it), mps or xpu.
        architecture: the generation: devices of one reach about the same part of what they can do at most.
        cores: of a processor.
        peak_flop_per_s: float32 arithmetic without tensor cores.
        tf32_flop_per_s: of tensor cores, where it differs; torch computes convolutions in it.
        memory_bytes_per_s, memory_bytes: of the memory that tensors lie in.
        idle_w, busy_w: of the device alone.
    """

    name: str
    kind: str
    architecture: str
    about: str
    peak_flop_per_s: Figure
    memory_bytes_per_s: Figure
    memory_bytes: Figure
    idle_w: Figure
    busy_w: Figure
    aliases: tuple[str, ...] = ()
    cores: int | None = None
    tf32_flop_per_s: Figure | None = None

    @property
    def figures(self) -> Mapping[str, Figure]:
        """All figures, by the name of their field."""
        named = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in named if isinstance(value, Figure)}

    def with_cores(self, cores: float) -> "DeviceClass":
        """A part of a processor: arithmetic and watts in proportion, memory bandwidth until a few cores fill it."""
        if self.cores is None or cores >= self.cores:
            return self
        part = cores / self.cores
        of_memory = min(1.0, cores / min(self.cores, max(CORES_FOR_MEMORY, self.cores / 4)))

        def scaled(figure: Figure, factor: float) -> Figure:
            return replace(figure, value=figure.value * factor)

        return replace(
            self,
            peak_flop_per_s=scaled(self.peak_flop_per_s, part),
            memory_bytes_per_s=scaled(self.memory_bytes_per_s, of_memory),
            idle_w=scaled(self.idle_w, part),
            busy_w=scaled(self.busy_w, part),
        )


@cache
def device_classes() -> Mapping[str, DeviceClass]:
    """All classes by name, in the order of the file."""
    return {row["name"]: _class(**row) for row in _file()["class"]}


def device_class(name: str) -> DeviceClass:
    """A class by its name or another name of it; `RTX 3060` is `rtx3060`.

    Raises:
        InputError: there is none; near names are told.
    """
    known = _names()
    plain = _plain(name)
    if plain not in known:
        near = difflib.get_close_matches(plain[:80], known, n=5, cutoff=0.5) or [_plain(each) for each in _USUAL]
        raise InputError(
            f"unknown device class {shown(name)}: did you mean {', '.join(dict.fromkeys(known[each][1] for each in near))}? "
            "`convoy predict --list` shows all"
        )
    return device_classes()[known[plain][0]]


def sources() -> Mapping[str, str]:
    """What the sources of the figures begin with, in full."""
    found: Mapping[str, str] = _file()["source"]
    return found


@cache
def _names() -> Mapping[str, tuple[str, str]]:
    """The class, and the name as it is written, by all that a class may be called, without case, blanks and dashes."""
    every = ((each.name, text) for each in device_classes().values() for text in (each.name, *each.aliases))
    return {_plain(text): (name, text) for name, text in every}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _class(name: str, **fields: Any) -> DeviceClass:
    figures = {key: Figure(**value) if isinstance(value, dict) else value for key, value in fields.items()}
    busy = figures["busy_w"]
    idle = Figure(busy.value * IDLE, "a tenth of busy_w", estimate=True)
    return DeviceClass(name, **({"idle_w": idle} | figures | {"aliases": tuple(fields.get("aliases", ()))}))


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("convoy.fleet").joinpath("catalogue.toml").read_text(encoding="utf-8"))
