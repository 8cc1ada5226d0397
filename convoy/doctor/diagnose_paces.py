"""Findings about who computes how fast."""

import statistics
from collections.abc import Iterator

from convoy.doctor.facts import Checkup, Examination, Finding
from convoy.doctor.names import Names

ALIKE = 0.7
"""Below that part of its equals' speed, a device is hindered by something."""

PAST = 0.5
"""Below that part of what its share was when it was measured; another model, so only a rough comparison."""

UNEQUAL = 1.5
"""Slower than the fastest by that factor, a device is worth a word: equal shares would make all run at its pace."""


def pace_findings(examination: Examination, names: Names) -> Iterator[Finding]:
    """Who is slow: against its equals, against its own past, against the fastest."""
    speeds = {device: pace.samples_per_s for device, pace in examination.paces.items() if pace.samples_per_s > 0}
    if len(speeds) < 2:
        return
    hindered = list(_alike(speeds, examination, names))
    yield from hindered
    told = {name for finding in hindered for name in finding.about}
    yield from (each for each in _past(speeds, examination, names) if not told.issuperset(each.about))
    fastest, slowest = max(speeds, key=lambda d: speeds[d]), min(speeds, key=lambda d: speeds[d])
    factor = speeds[fastest] / speeds[slowest]
    if factor > UNEQUAL:
        share = speeds[slowest] / sum(speeds.values())
        what = f"{names.device(slowest)} is the slowest: {factor:.1f} times slower than {names.device(fastest)}"
        cure = (
            f"Nothing to do: --plan auto or data-by-speed give it about {share:.0%} of the work. Even shares (data, model, or "
            f"PyTorch DDP) would run all {len(speeds)} devices at its pace"
        )
        yield Finding("note", what, cure, (names.device(slowest),))


def _alike(speeds: dict[int, float], examination: Examination, names: Names) -> Iterator[Finding]:
    """Devices of the same hardware, with the same cores and threads, should run alike."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for checkup in examination.checkups:
        if checkup.device in speeds:
            groups.setdefault(_kind(checkup, names), []).append(checkup.device)
    for devices in groups.values():
        usual = statistics.median_high(speeds[device] for device in devices)
        for device in devices:
            if speeds[device] < ALIKE * usual:
                name = names.device(device)
                what = f"{name} computes at {speeds[device] / usual:.0%} of the speed of devices just like it"
                cure = (
                    "Something holds it back: other programs (top, nvidia-smi), heat or a power limit (cpupower "
                    "frequency-info, nvidia-smi -q -d PERFORMANCE), missing memory modules"
                )
                yield Finding("warning", what, cure, (name,))


def _kind(checkup: Checkup, names: Names) -> tuple[object, ...]:
    imposed = (
        (names.fleet.devices[checkup.device].cores, names.fleet.devices[checkup.device].slowdown) if names.fleet else ()
    )
    if checkup.on.startswith("cpu"):
        return checkup.hardware, checkup.usable_cores, checkup.threads, imposed
    return checkup.hardware, imposed


def _past(speeds: dict[int, float], examination: Examination, names: Names) -> Iterator[Finding]:
    """Against the share of the fleet's speed that each device had when it was measured."""
    past = examination.past_samples_per_s
    if names.fleet is None or len(past) != examination.devices:
        return
    ratios = {device: speed / past[device] for device, speed in speeds.items()}
    usual = statistics.median_high(ratios.values())
    for device, ratio in ratios.items():
        if ratio < PAST * usual:
            name = names.device(device)
            what = (
                f"{name} computes at {ratio / usual:.0%} of what it did, beside the others, when the fleet was measured"
            )
            cure = (
                "Something holds it back (other programs, heat, fewer cores); if it is to stay so: convoy measure again"
            )
            yield Finding("warning", what, cure, (name,))
