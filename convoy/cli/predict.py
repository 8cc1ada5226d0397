"""`convoy predict`: predicts whether a fleet would pay, before anything is installed or measured."""

import re
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from convoy.cli.question import PlanQuestion
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.fleet.catalogue import device_class, device_classes
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.payoff import forecast
from convoy.report.forecast import show_classes, show_forecast
from convoy.report.screen import Screen, Wait

MOST_DEVICES = 64  # more in `--on` are a slip of the finger


def run_predict(
    question: PlanQuestion,
    *,
    on: str | None = None,
    fleet: Path | None = None,
    link_bytes_per_s: float = 125e6,
    latency_s: float = 1e-4,
) -> None:
    """Print whether a fleet would pay, by which plan, from which batch or link on, and what one device more or less changes.

    Args:
        on: classes of devices with commas between them, each on a machine of its own; `+` puts several into one machine.
        fleet: a fleet file instead, described or measured.
        link_bytes_per_s, latency_s: of every machine's NIC, with `on`.

    Raises:
        InputError: an unknown class; see also `PlanQuestion.request`.
        PlanError: no plan fits the devices' memory.
    """
    begin_s = time.perf_counter()
    question.check()
    if (on is None) == (fleet is None):
        raise InputError(
            "say on what: --on laptop-cpu,rtx3060 (`convoy predict --list` has the names), or --fleet FILE"
        )
    screen = Screen(visible=True)
    if on is not None:
        known = FleetKnowledge(fleet_on(on, link_bytes_per_s, latency_s))
    else:
        assert fleet is not None
        known = FleetKnowledge.from_file(fleet)
    with Wait(Console(stderr=True), f"predicting {question.net}", first_s=1.0) as tell:
        tell("reading the net")
        found = forecast(question.request(known), tell)
    assert known.fleet is not None
    show_forecast(screen.console, found, known.fleet, question.net, question.image, time.perf_counter() - begin_s)


def list_classes() -> None:
    """Print the catalogue."""
    show_classes(Screen(visible=True).console, list(device_classes().values()))


def fleet_on(text: str, link_bytes_per_s: float, latency_s: float) -> Fleet:
    """Return a fleet of device classes: `laptop-cpu,2xrtx3060,rtx3090+rtx3090`.

    Raises:
        InputError: a name left out, an unknown class, too many devices.
    """
    machines: list[list[str]] = []
    for part in text.split(","):
        times, names = _times(part.strip(), text)
        machines += [names] * times
    if sum(map(len, machines)) > MOST_DEVICES:
        raise InputError(f"--on {text!r}: {sum(map(len, machines))} devices; at most {MOST_DEVICES} can be named here")
    count = Counter(device_class(name).name for names in machines for name in names)
    seen: Counter[str] = Counter()
    hosts, devices = [], []
    for index, names in enumerate(machines):
        hosts.append(Host(f"machine-{index + 1}"))
        for name in names:
            known = device_class(name)
            seen[known.name] += 1
            own = f"{known.name}-{seen[known.name]}" if count[known.name] > 1 else known.name
            devices.append(Device.of_class(known, own, hosts[-1].name))
    return Fleet(tuple(hosts), tuple(devices), Nic(link_bytes_per_s, link_bytes_per_s, latency_s))


def _times(part: str, text: str) -> tuple[int, list[str]]:
    found = re.fullmatch(r"(?:(\d{1,3})\s*[x*]\s*)?(\S.*)", part)
    names = [] if found is None else [name.strip() for name in found[2].split("+")]
    if found is None or not all(names) or found[1] == "0":
        raise InputError(
            f"--on {text!r}: give classes of devices with commas between them, e.g. laptop-cpu,2xrtx3060,rtx3090+rtx3090"
        )
    return int(found[1] or 1), names
