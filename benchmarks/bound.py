"""How far `auto` is above the lower bound, on roofline costs: four unequal devices, two speeds of Ethernet, three nets.

    python -m benchmarks.bound

Prints the table of docs/decisions/040. Nothing is measured: the same every time, on any machine.
"""

import typer
from rich.console import Console
from rich.table import Table

from convoy.fleet import Card, Device, Fleet, Host
from convoy.model.nets import graph_of
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from lab.tight_bound import tight_bound
from studies.roofline import roofline_costs

NETS = ("two-conv:150:800", "alexnet:1024", "resnet:8:16")
RATES = {"a": 88e9, "b": 55e9, "c": 33e9, "d": 22e9}
BATCH = 64


def fleet_of(megabits_per_s: int) -> Fleet:
    """Four hosts, each with a processor of so many FLOP/s and an eighth of that in bytes/s."""
    devices = (
        Device(f"{name}-cpu", name, "cpu", peak_flop_per_s=rate, memory_bytes_per_s=rate / 8)
        for name, rate in RATES.items()
    )
    bytes_per_s = megabits_per_s * 125e3
    return Fleet(tuple(Host(name) for name in RATES), tuple(devices), Card(bytes_per_s, bytes_per_s, 1e-4))


def main() -> None:
    """Plan each net by each network, and print what the bound says."""
    table = Table(title=f"auto above the lower bound, batch {BATCH}", title_justify="left")
    for name in ("net", "Mbit/s", "auto", "computing alone", "bound", "above it"):
        table.add_column(name)
    for net in NETS:
        graph = graph_of(net)
        for megabits_per_s in (100, 1000):
            costs = roofline_costs(fleet_of(megabits_per_s))
            step_s = candidates(PlanRequest(graph, BATCH, FleetKnowledge(given=costs)))[0].step_s
            least = tight_bound(PlanRequest(graph, BATCH, FleetKnowledge(given=costs)))
            seconds = (f"{each:.4g} s" for each in (step_s, least.compute_s, least.step_s))
            table.add_row(net, f"{megabits_per_s:,}", *seconds, f"{step_s / least.step_s - 1:.1%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
