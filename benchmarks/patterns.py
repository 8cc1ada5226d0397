"""Bytes alone over a rehearsed network, without any computing: as predicted and as measured, in ten patterns of messages.

    python -m benchmarks.patterns --fleet slowcard4 [--congestion bbr]

The last host of the fleet is "the last"; in `slowcard4` it has the slow card. Devices may use whole cores. All messages of a
pattern have the same size and begin together; what is told is when the last one has arrived, the median over the rounds. The
prediction is the planner's: shared cards, max-min fair (`convoy.simulate.network.rates`), at the rates of the fleet file
less the headers of TCP, IP and Ethernet.
"""

import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.configurations import fleet_named
from benchmarks.hardware import stamp
from convoy.comm.group import Message
from convoy.comm.processes import join
from convoy.emulate.run import rehearse
from convoy.report.screen import new_table
from convoy.simulate.network import Network, network_of, rates

Flows = tuple[tuple[int, int], ...]
"""(Sender, receiver) of each message."""

HEADERS = 1448 / 1514
"""Of what a card sends, the part that is data: TCP with time stamps, in frames of Ethernet as the kernel counts them."""

LIMIT_S = 300.0


def patterns(devices: int) -> dict[str, Flows]:
    """The messages of each pattern, by its name."""
    last, others = devices - 1, range(devices - 1)
    into, out = tuple((d, last) for d in others), tuple((last, d) for d in others)
    return {
        "one to the last": into[:1],
        "the last to one": out[:1],
        "the last and one, both ways": (into[0], out[0]),
        "all to the last": into,
        "the last to all": out,
        "the last and all, both ways": (*into, *out),
        "a ring of all": tuple((d, (d + 1) % devices) for d in range(devices)),
        "each to all": tuple((a, b) for a in range(devices) for b in range(devices) if a != b),
        "a ring without the last": tuple((d, (d + 1) % last) for d in others),
        "two others, both ways": ((0, 1), (1, 0)),
    }


def predicted_s(network: Network, flows: Flows, size_bytes: int) -> float:
    """When the last of these messages has arrived, if all begin at once."""
    left, at_s = {flow: float(size_bytes) for flow in flows}, 0.0
    while left:
        under_way = list(left)
        rate = dict(zip(under_way, rates(network, under_way) * HEADERS, strict=True))
        until_s = min(left[flow] / rate[flow] for flow in under_way)
        at_s += until_s
        left = {flow: rest for flow in under_way if (rest := left[flow] - rate[flow] * until_s) > 1.0}
    return at_s


def work(size_bytes: int, rounds: int, results: Path) -> None:
    """One device of the rehearsal; the first writes down what all measured."""
    with join(timeout_s=60.0) as group:
        found: dict[str, list[float]] = {name: [] for name in patterns(group.devices)}
        for _ in range(rounds):
            for name, flows in patterns(group.devices).items():
                sends = [Message(b, torch.ones(size_bytes // 4)) for a, b in flows if a == group.device]
                receives = [Message(a, torch.zeros(size_bytes // 4)) for a, b in flows if b == group.device]
                group.agree(f"begin {name}", "")
                start_s = time.perf_counter()
                group.exchange(sends, receives)
                found[name].append(max(map(float, group.agree(name, repr(time.perf_counter() - start_s)))))
        if group.device == 0:
            results.write_text(json.dumps(found))


def main(
    fleet: Annotated[str, typer.Option(help="Of `benchmarks/fleets`.")] = "slowcard4",
    megabytes: Annotated[float, typer.Option(help="Of each message.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    congestion: Annotated[str, typer.Option(help="TCP's congestion control; empty: the rehearsal's.")] = "",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Rehearse the fleet and print the table."""
    size_bytes = round(megabytes * 1e6)
    if worker is not None:
        work(size_bytes, rounds, worker)
        return
    described = fleet_named(fleet)
    described = replace(described, devices=tuple(replace(device, cores=None) for device in described.devices))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if congestion:
            stack.enter_context(mock.patch("convoy.emulate.namespaces._CONGESTION_CONTROL", congestion))
        results = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.patterns", "--megabytes", str(megabytes), "--rounds", str(rounds)]
        if status := rehearse(described, [*command, "--worker", str(results)], timeout_s=LIMIT_S):
            sys.exit(status)
        found = json.loads(results.read_text())
    Console().print(json.dumps(stamp(" ".join(("python -m benchmarks.patterns", *sys.argv[1:])))))
    Console().print(table(network_of(described), found, size_bytes))


def table(network: Network, found: dict[str, list[float]], size_bytes: int) -> Table:
    """Predicted beside measured."""
    rows = new_table(f"{size_bytes / 1e6:g} MB a message", ("pattern",), ("predicted", "measured", "of measured"))
    for name, flows in patterns(network.devices).items():
        expected_s, measured_s = predicted_s(network, flows, size_bytes), statistics.median(found[name])
        rows.add_row(name, f"{expected_s:.3f} s", f"{measured_s:.3f} s", f"{expected_s / measured_s:.2f}")
    return rows


if __name__ == "__main__":
    typer.run(main)
