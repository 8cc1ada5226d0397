"""Figures of device classes, by name (`rtx3060`, `laptop-cpu`). `catalogue.toml` gives the source of every figure."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from convoy.errors import InputError, shown

IDLE = 0.1  # estimated `idle_w` / `busy_w`, for classes without a figure
CORES_FOR_MEMORY = 4  # cores that use the whole memory bandwidth; a quarter of the cores if there are more than 16

_USUAL = ("rtx3060", "a100", "laptop-cpu", "desktop-cpu", "apple-m2", "raspberry-pi-5")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its source. `estimate`: it is estimated, not given by the source."""

    value: float
    source: str
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One class of devices, in SI units.

    Attributes:
        kind: its device type in torch: cpu, cuda (also ROCm), mps or xpu.
        architecture: its generation; devices of one generation reach about the same fraction of their peak.
        peak_flop_per_s: float32 peak without tensor cores.
        tf32_flop_per_s: TF32 peak of tensor cores, which torch uses for convolutions; None: not available.
        memory_bytes_per_s, memory_bytes: of the memory that holds tensors.
        idle_w, busy_w: power of the device without its host.
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

    def with_cores(self, cores: float) -> "DeviceClass":
        """Return the class for fewer cores. Peak and watts shrink in proportion, memory bandwidth only for few cores."""
        if self.cores is None or cores >= self.cores:
            return self
        factors = dict.fromkeys(("peak_flop_per_s", "idle_w", "busy_w"), cores / self.cores)
        factors["memory_bytes_per_s"] = min(1.0, cores / min(self.cores, max(CORES_FOR_MEMORY, self.cores / 4)))
        figures: dict[str, Figure] = {name: getattr(self, name) for name in factors}
        scaled: dict[str, Any] = {n: replace(each, value=each.value * factors[n]) for n, each in figures.items()}
        return replace(self, **scaled)


@cache
def device_classes() -> Mapping[str, DeviceClass]:
    """Return all classes by name, in the order of the file."""
    text = resources.files("convoy.fleet").joinpath("catalogue.toml").read_text(encoding="utf-8")
    classes = {}
    for row in tomllib.loads(text)["class"]:
        fields = {key: Figure(**value) if isinstance(value, dict) else value for key, value in row.items()}
        fields.setdefault("idle_w", Figure(fields["busy_w"].value * IDLE, "a tenth of busy_w", estimate=True))
        classes[row["name"]] = DeviceClass(**fields | {"aliases": tuple(row.get("aliases", ()))})
    return classes


def device_class(name: str) -> DeviceClass:
    """Return a class by name or alias; `RTX 3060` is the same as `rtx3060`."""
    known, plain = names(), plain_name(name)
    if plain not in known:
        near = difflib.get_close_matches(plain[:80], known, n=5, cutoff=0.5) or [plain_name(each) for each in _USUAL]
        raise InputError(
            f"unknown device class {shown(name)}: did you mean {', '.join(dict.fromkeys(known[each][1] for each in near))}? "
            "`convoy predict --list` shows all"
        )
    return known[plain][0]


@cache
def names() -> Mapping[str, tuple[DeviceClass, str]]:
    """Return (class, name as written in the catalogue) by the plain form of every name and alias."""
    every = ((each, text) for each in device_classes().values() for text in (each.name, *each.aliases))
    return {plain_name(text): (known, text) for known, text in every}


def plain_name(name: str) -> str:
    """Return a name in lower case, with letters and digits only."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
