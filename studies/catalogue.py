"""Device classes for studies of machines that are not there; their figures, each with its source, are in catalogue.toml."""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from convoy.cost.compute import Rate
from convoy.errors import InputError, unknown_name
from convoy.fleet import Card, Device, Fleet, Host
from convoy.simulator.energy import Power


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Figure(_Closed):
    """A number with where it is from; `estimate` marks what no vendor publishes."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: Annotated[str, Field(min_length=1)]
    estimate: bool = False


class DeviceClass(_Closed):
    """One kind of device.

    Attributes:
        peak_flop_per_s: fp32, without tensor cores.
        idle_w, busy_w: of the device alone.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    kind: Literal["cpu", "cuda", "mps", "xpu"]
    about: str
    peak_flop_per_s: Figure
    memory_bytes_per_s: Figure
    memory_bytes: Figure
    idle_w: Figure
    busy_w: Figure

    def rate(self, efficiency: float = 1.0) -> Rate:
        """For the roofline; `efficiency` is the part of the peak that dense kernels reach."""
        return Rate(self.peak_flop_per_s.value, self.memory_bytes_per_s.value, efficiency)

    @property
    def power(self) -> Power:
        return Power(self.idle_w.value, self.busy_w.value)

    @property
    def estimates(self) -> tuple[str, ...]:
        """The figures that are estimates."""
        return tuple(key for key, value in self if isinstance(value, Figure) and value.estimate)


class _File(_Closed):
    classes: Annotated[list[DeviceClass], Field(alias="class", min_length=1)]


def read_catalogue(path: Path | None = None) -> Mapping[str, DeviceClass]:
    """The device classes of a file (default: Convoy's own), by name, in its order.

    Raises:
        InputError: not readable, not TOML, an unknown or missing key, a figure that is not above 0, a name twice; the field
            is named.
    """
    if path is None:
        return _own()
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a catalogue ({error}): give the path of a TOML file") from None


def fleet_of(classes: Sequence[str], card: Card, catalogue: Mapping[str, DeviceClass] | None = None) -> Fleet:
    """A fleet of one device per host, of the given classes, all with the same network card.

    Raises:
        InputError: no class, or a class that the catalogue does not have; its names are listed.
    """
    known = read_catalogue() if catalogue is None else catalogue
    devices = []
    for index, name in enumerate(classes):
        if name not in known:
            raise unknown_name("device class", name, known)
        found = known[name]
        devices.append(
            Device(
                name=f"{name}-{index}",
                host=f"host-{index}",
                kind=found.kind,
                memory_bytes=int(found.memory_bytes.value),
                peak_flop_per_s=found.peak_flop_per_s.value,
                memory_bandwidth_bytes_per_s=found.memory_bytes_per_s.value,
                idle_w=found.idle_w.value,
                busy_w=found.busy_w.value,
            )
        )
    hosts = tuple(Host(f"host-{index}") for index in range(len(devices)))
    return Fleet(hosts=hosts, devices=tuple(devices), network=card)


@cache
def _own() -> Mapping[str, DeviceClass]:
    text = resources.files("studies").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return _parse(text, "catalogue.toml")


def _parse(text: str, source: str) -> Mapping[str, DeviceClass]:
    try:
        classes = _File.model_validate(tomllib.loads(text)).classes
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}; correct that line") from None
    except ValidationError as error:
        raise InputError(f"{source}: {_first_fault(error)}") from None
    for name, count in Counter(each.name for each in classes).items():
        if count > 1:
            raise InputError(f"{source}: the class {name!r} is there {count} times: rename all but one")
    for each in classes:
        try:
            _ = each.power
        except InputError as error:
            raise InputError(f"{source}: class {each.name!r}: {error}") from None
    return {each.name: each for each in classes}


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    if fault["type"] == "extra_forbidden":
        return f"{where} = {fault['input']!r}: unknown key; remove it"
    if fault["type"] == "missing":
        return f"{where} is missing: add it"
    return f"{where} = {fault['input']!r}: {fault['msg']}; correct it"
