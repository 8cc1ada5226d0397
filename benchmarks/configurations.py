"""Benchmark cases as values: fleets x nets x batches x plans.

A case is one net on one fleet at one batch: its plans are measured in turn, round after round, so that whatever happens to
the machine happens to all of them. A series is one net on one fleet: its layers are measured once for all its cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from convoy.errors import InputError, unknown_name
from convoy.fleet import Device, Fleet, Host, Nic, read_fleet
from convoy.plan.presets import PLANS

FLEETS = Path(__file__).parent / "fleets"

AUTO = "auto"
ALONE, IN_TURN = "each-alone", "one-device"
"""Plain PyTorch on every device, each for itself: all at the same time, or one after the other while the others rest."""

FSDP = "fsdp"
PEERS = (ALONE, IN_TURN, "ddp-even", "ddp-tuned", FSDP)
"""What Convoy is compared with: devices alone, DistributedDataParallel with even shares and with shares found by search, and
FSDP2, whose shards of weights are even."""

PLAN_NAMES = (*PLANS, AUTO)
EVERYTHING = (IN_TURN, "ddp-even", "ddp-tuned", *PLAN_NAMES)

EQUAL = "equal"
EQUAL_CORES = 0.2
MOST_EQUAL = 8
"""`equal1` to `equal8`: so many hosts of the same quota at 1 Gbit/s, for how cost grows with the number of devices."""


@dataclass(frozen=True, slots=True)
class Case:
    """One net on one fleet at one batch, with the plans that alternate there."""

    fleet: str
    net: str
    batch: int
    plans: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.fleet}.{self.net.replace(':', '-')}.{self.batch}"


@dataclass(frozen=True, slots=True)
class Series:
    """One net on one fleet.

    Attributes:
        fleet: name of a file in `FLEETS`, without its ending, or `equal1` to `equal8`.
        net: as `convoy.model.nets.build_net` takes it.
        batches: global batches, in samples.
        plans: of `PLAN_NAMES` and `PEERS`; every plan is measured at every batch.
    """

    fleet: str
    net: str
    batches: tuple[int, ...]
    plans: tuple[str, ...] = PLAN_NAMES

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise InputError(f"batches {self.batches} of {self.net} on {self.fleet}: give at least one, each 1 or more")
        for plan in self.plans:
            if plan not in (*PEERS, *PLAN_NAMES):
                raise unknown_name("plan", plan, (*PEERS, *PLAN_NAMES))

    def cases(self) -> tuple[Case, ...]:
        """Return one case per batch."""
        return tuple(Case(self.fleet, self.net, batch, self.plans) for batch in self.batches)


def fleet_named(name: str) -> Fleet:
    """Return the description of a fleet.

    Raises:
        InputError: no fleet of that name; the choices are listed.
    """
    equal = {f"{EQUAL}{count}": count for count in range(1, MOST_EQUAL + 1)}
    if name in equal:
        hosts = tuple(Host(f"h{number}") for number in range(equal[name]))
        devices = tuple(Device(f"{host.name}-cpu", host.name, "cpu", cores=EQUAL_CORES) for host in hosts)
        return Fleet(hosts, devices, Nic(send_bytes_per_s=125e6, receive_bytes_per_s=125e6, latency_s=5e-5))
    files = {path.stem: path for path in sorted(FLEETS.glob("*.toml"))}
    if name not in files:
        raise unknown_name("fleet", name, [*files, *equal])
    return read_fleet(files[name])


_VALIDATION = (
    Series("mixed4", "two-conv:50:500", (16, 64)),
    Series("mixed4", "two-conv:150:800", (16,)),
    Series("mixed4", "two-conv:300:1000", (8,)),
    Series("mixed4", "two-conv:500:1500", (4,)),
    Series("mixed4", "alexnet:4096", (64,)),
    Series("mixed4", "resnet:8:16", (64,)),
    Series("even4", "two-conv:150:800", (16,)),
    Series("straggler2", "two-conv:50:500", (16, 64)),
    Series("straggler2", "two-conv:300:1000", (4,)),
    Series("many8", "two-conv:150:800", (16,)),
    Series("desktop4", "two-conv:150:800", (16,)),
)

_COMPARED = (IN_TURN, "ddp-tuned", AUTO)
_SMALL = (IN_TURN, "ddp-even", "ddp-tuned", "data-by-speed", "hybrid", AUTO)

_SMALL_BENCH = (
    Series("mixed4", "two-conv:150:800", (16, 64), _SMALL),
    Series("mixed4", "alexnet:4096", (64,), _SMALL),
)

_TARGETS = (
    Series("mixed4", "two-conv:150:800", (16, 64), _COMPARED),
    Series("mixed4", "alexnet:4096", (64, 256), _COMPARED),
    Series("mixed4", "two-conv:50:500", (64, 256), _COMPARED),
    Series("even4", "two-conv:500:1500", (16,), (ALONE, IN_TURN, "master")),
    *(
        series
        for fleet in ("even4", "straggler2")
        for series in (
            Series(fleet, "two-conv:150:800", (16, 64), _COMPARED),
            Series(fleet, "alexnet:4096", (64, 256), _COMPARED),
            Series(fleet, "two-conv:50:500", (256,), _COMPARED),
        )
    ),
    Series("many8", "two-conv:150:800", (64,), _COMPARED),
    Series("many8", "alexnet:4096", (64,), _COMPARED),
    Series("desktop4", "two-conv:150:800", (64,), (*_COMPARED, "data-by-speed")),
)
"""Every line of the table of targets, once: of the two two-conv nets the larger at 16 and 64, the smaller at 256, where the
larger takes a slow device alone more than a minute a step."""

_REST_OF_TARGETS = tuple(
    series
    for fleet in ("mixed4", "even4", "straggler2")
    for series in (
        Series(fleet, "two-conv:50:500", (16, 64) if fleet != "mixed4" else (16,), _COMPARED),
        Series(fleet, "two-conv:150:800", (256,), _COMPARED),
    )
)

_WITH_EFFICIENCY = ("mixed4", "even4", "straggler2")
_NAMED = ("ddp-tuned", FSDP, "data", "master", "model", "hybrid", AUTO)
_NAMED_EVERYWHERE = tuple(
    Series(fleet, "two-conv:150:800", (16,), (IN_TURN, *_NAMED) if fleet in _WITH_EFFICIENCY else _NAMED)
    for fleet in ("desktop4", "mixed4", "lab8", "many8", "even4", "straggler2")
)
"""The plans by name beside `auto`, once on every fleet; where an efficiency is asked for, with devices alone."""

_SCALED = ("data", "master", AUTO)
_SCALING = (
    Series("equal1", "two-conv:50:500", (16, 64), (AUTO,)),
    Series("equal4", "two-conv:50:500", (16, 32, 64, 128, 256), _SCALED),
    *(Series(f"{EQUAL}{count}", "two-conv:50:500", (64, 16 * count), _SCALED) for count in (2, 8, 6, 3)),
)
"""Batch 64 on 1 to 8 devices, 16 samples a device on 1 to 8, and 16 to 256 samples on 4."""

_DEEP = (
    Series("mixed4", "vgg:11:4096", (64,), _COMPARED),
    # DDP keeps the statistics of batch norm for each rank: it computes something else.
    Series("mixed4", "resnet18:64", (64,), (IN_TURN, "data-by-speed", AUTO)),
    # So small that several devices lose more by waiting than they gain.
    Series("mixed4", "resnet:8:16", (64,), (IN_TURN, "data-by-speed", AUTO)),
)

_TWO = ("ddp-tuned", AUTO)
_LAB = (
    Series("desktop4", "alexnet:4096", (64, 128), _TWO),
    Series("desktop4", "two-conv:500:1500", (16,), _TWO),
    Series("mixed4", "unet:8", (16,), _TWO),
    Series("desktop4", "vgg:11:4096", (64,), _TWO),
    Series("desktop4", "resnet18:64", (64,), ("data-by-speed", AUTO)),
    Series("desktop4", "two-conv:150:800", (64,), _TWO),
    Series("lab8", "two-conv:500:1500", (16,), _TWO),
    Series("lab8", "alexnet:4096", (64,), _TWO),
    Series("lab8", "vgg:11:4096", (64,), _TWO),
    Series("lab8", "resnet18:64", (64,), ("data-by-speed", AUTO)),
    Series("lab8", "two-conv:150:800", (64,), _TWO),
    Series("desktop4", "unet:8", (16,), _TWO),
    Series("lab8", "unet:8", (16,), _TWO),
)
"""Steps of seconds, with the wire per FLOP of real fleets; the most telling first. A slow host alone takes minutes."""

_FULL_BENCH = (
    *(
        Series(fleet, net, batches, EVERYTHING)
        for fleet in ("even4", "mixed4", "straggler2")
        for net, batches in (
            ("two-conv:50:500", (16, 64, 256)),
            ("two-conv:150:800", (16, 64, 256)),
            ("alexnet:4096", (64, 256)),
        )
    ),
    Series("even4", "two-conv:500:1500", (16,), (IN_TURN, "master", AUTO)),
    Series("many8", "two-conv:150:800", (64,), EVERYTHING),
    Series("many8", "alexnet:4096", (64,), EVERYTHING),
    Series("desktop4", "two-conv:50:500", (64,), EVERYTHING),
    Series("desktop4", "two-conv:150:800", (64,), EVERYTHING),
    Series("mixed4", "vgg:11:4096", (64,), EVERYTHING),
    Series("mixed4", "resnet18:64", (64,), (IN_TURN, *PLAN_NAMES)),
    *_SCALING,
)

SETS: Mapping[str, tuple[Series, ...]] = {
    "validation": _VALIDATION,
    "smoke": (
        Series("mixed4", "two-conv:4:8", (8,), ("data", AUTO)),
        Series("straggler2", "two-conv:4:8", (8,), ("data", AUTO)),
    ),
    "smoke-peers": (Series("straggler2", "two-conv:4:8", (8,), (*PEERS[:-1], "data", AUTO)),),
    "bench": _SMALL_BENCH,
    "targets": _TARGETS,
    "targets-rest": _REST_OF_TARGETS,
    "scaling": _SCALING,
    "deep": _DEEP,
    "lab": _LAB,
    "named": _NAMED_EVERYWHERE,
    "bench-full": _FULL_BENCH,
}
"""`validation` is the set of docs/validation.md, the others of docs/benchmarks.md; the smoke sets take seconds and say nothing
about speed."""


def series_of(name: str) -> tuple[Series, ...]:
    """Return the series of a set.

    Raises:
        InputError: no set of that name; the choices are listed.
    """
    if name not in SETS:
        raise unknown_name("set", name, SETS)
    return SETS[name]


@dataclass(frozen=True, slots=True)
class Choice:
    """The requested subset of the benchmarks; empty fields mean all.

    Attributes:
        set: a set of `SETS`; None: exactly the cases of the fields below, in any set or not.
    """

    set: str | None
    fleets: tuple[str, ...] = ()
    nets: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    plans: tuple[str, ...] = ()

    def series(self) -> tuple[Series, ...]:
        """Return the selected series with the selected batches and plans.

        Raises:
            InputError: an unknown name, a case without fleet, net or batch, or nothing is left.
        """
        if self.set is not None:
            return self._of_set(series_of(self.set))
        if not (self.fleets and self.nets and self.batches):
            raise InputError(
                "a case of your own needs all of --fleet, --net and --batch: add what is missing, or name a --set"
            )
        for fleet in self.fleets:
            fleet_named(fleet)
        return tuple(
            Series(fleet, net, self.batches, self.plans or _COMPARED) for fleet, net in product(self.fleets, self.nets)
        )

    def _of_set(self, every: Sequence[Series]) -> tuple[Series, ...]:
        for word, asked, known in (
            ("fleet", self.fleets, [each.fleet for each in every]),
            ("net", self.nets, [each.net for each in every]),
            ("batch", self.batches, [batch for each in every for batch in each.batches]),
            ("plan", self.plans, [plan for each in every for plan in each.plans]),
        ):
            for name in asked:
                if name not in known:
                    raise unknown_name(f"{word} in set {self.set}:", str(name), list(dict.fromkeys(map(str, known))))
        found = [
            replace(each, batches=_kept(each.batches, self.batches), plans=_kept(each.plans, self.plans))
            for each in every
            if (not self.fleets or each.fleet in self.fleets)
            and (not self.nets or each.net in self.nets)
            and _kept(each.batches, self.batches)
            and _kept(each.plans, self.plans)
        ]
        if not found:
            raise InputError(
                f"set {self.set} has no case with all of these: ask for fewer, or for --fleet, --net and --batch without --set"
            )
        return tuple(found)


def _kept(values: tuple[Any, ...], asked: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in values if not asked or value in asked)
