"""What the benchmarks run: fleets x nets x batches x plans, as values.

A series is one net on one fleet: its configurations are measured in turn, round after round, so that whatever happens to
the machine happens to all of them. Batches are chosen so that most steps take between a tenth of a second and three
seconds on two cores of about 50 GFLOP/s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import InputError, unknown_name
from convoy.named import PLANS

FLEETS = Path(__file__).parent / "fleets"

AUTO = "auto"
PEERS = ("one-device", "ddp-even", "ddp-tuned")
"""Plain PyTorch: each device alone in turn, and DistributedDataParallel with even shares and with shares found by search."""

PLAN_NAMES = (*PLANS, AUTO)
EVERYTHING = (*PEERS, *PLAN_NAMES)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One thing to predict and to measure."""

    fleet: str
    net: str
    batch: int
    plan: str


@dataclass(frozen=True, slots=True)
class Series:
    """One net on one fleet.

    Attributes:
        fleet: name of a file in `FLEETS`, without its ending.
        net: as `convoy.nets.build_net` takes it.
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
            if plan not in EVERYTHING:
                raise unknown_name("plan", plan, EVERYTHING)

    @property
    def path(self) -> Path:
        """The fleet's file."""
        return FLEETS / f"{self.fleet}.toml"

    def configurations(self) -> tuple[Configuration, ...]:
        """Every batch with every plan."""
        return tuple(Configuration(self.fleet, self.net, b, p) for b in self.batches for p in self.plans)


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
    Series("mixed4-slow", "two-conv:150:800", (16,)),
)

_SMALL_BENCH = (
    Series("mixed4", "two-conv:150:800", (16, 64), (*PEERS, "data-by-speed", "hybrid", AUTO)),
    Series("mixed4", "alexnet:4096", (64,), (*PEERS, "data-by-speed", "hybrid", AUTO)),
)

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
    Series("even4", "two-conv:500:1500", (16,), ("one-device", "master")),
    Series("many8", "two-conv:150:800", (64,), EVERYTHING),
    Series("many8", "alexnet:4096", (64,), EVERYTHING),
    Series("mixed4-slow", "two-conv:50:500", (64,), EVERYTHING),
    Series("mixed4-slow", "two-conv:150:800", (64,), EVERYTHING),
)

SETS: Mapping[str, tuple[Series, ...]] = {
    "validation": _VALIDATION,
    "smoke": (
        Series("mixed4", "two-conv:4:8", (8,), ("data", AUTO)),
        Series("straggler2", "two-conv:4:8", (8,), ("data", AUTO)),
    ),
    "smoke-peers": (Series("straggler2", "two-conv:4:8", (8,), (*PEERS, "data", AUTO)),),
    "bench": _SMALL_BENCH,
    "bench-full": _FULL_BENCH,
}
"""`validation` is the set of docs/validation.md; the smoke sets take seconds and say nothing about speed."""


def series_of(name: str, fleet: str | None = None) -> tuple[Series, ...]:
    """The series of a set, all or those of one fleet.

    Raises:
        InputError: no set or no fleet of that name in it; the choices are listed.
    """
    if name not in SETS:
        raise unknown_name("set", name, SETS)
    if fleet is not None and fleet not in fleets_of(name):
        raise unknown_name(f"fleet in set {name}:", fleet, fleets_of(name))
    return tuple(each for each in SETS[name] if fleet in (None, each.fleet))


def fleets_of(name: str) -> tuple[str, ...]:
    """The fleets of a set, in the order in which they are run."""
    return tuple(dict.fromkeys(each.fleet for each in series_of(name)))
