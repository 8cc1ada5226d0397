"""What was measured of the devices that a job has now: some of those that it began with are lost, others have come."""

from collections.abc import Sequence
from dataclasses import replace

from convoy.errors import MismatchError
from convoy.fleet import Nic
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize, local_size
from convoy.plan.steps import ComputeStep, Part, Phase, StepList
from convoy.simulate.compute import ComputeTimes
from convoy.simulate.table import Measurement

GIGABIT = Nic(send_bytes_per_s=118e6, receive_bytes_per_s=118e6, latency_s=1e-4)
"""Of hosts whose way to the others was never measured: what messages reach on the Ethernet that most have."""


def of_devices(measured: Measurement, indices: Sequence[int]) -> Measurement:
    """The rows of some devices, in this order."""
    devices = tuple(measured.fleet.devices[i] for i in indices)
    names, hosts = {device.name for device in devices}, {device.host for device in devices}
    return replace(
        measured,
        fleet=replace(measured.fleet.with_only(set(indices)), devices=devices),
        device=tuple(measured.device[i] for i in indices),
        layer=tuple(point for point in measured.layer if point.device in names),
        link=tuple(link for link in measured.link if {link.source, link.target} <= hosts),
    )


def with_device(measured: Measurement, newcomer: Measurement, card: Nic = GIGABIT) -> Measurement:
    """With one more device, the last one, that was measured by itself.

    Args:
        newcomer: of one device. One of a host that is there already joins it; a name that is taken gets a number.
        card: of its host, and of hosts so far, where none was measured.

    Raises:
        MismatchError: it was measured with another model, or in another precision.
    """
    for what in ("fingerprint", "precision"):
        mine, other = getattr(measured, what), getattr(newcomer, what)
        if mine != other:
            raise MismatchError(
                f"the device that joins was measured with {what} {other}, the others with {mine}: measure it with the model "
                "that they train"
            )
    fleet, old = measured.fleet, newcomer.fleet.devices[0]
    taken = {device.name for device in fleet.devices}
    name = next(n for i in range(len(taken) + 1) if (n := f"{old.name[:56]}-{i + 1}" if i else old.name) not in taken)
    hosts = fleet.hosts
    if old.host not in {host.name for host in hosts}:
        came = newcomer.fleet.hosts[0]
        hosts = (*hosts, replace(came, card=came.card or newcomer.fleet.network or card))
    if len(hosts) > 1 and fleet.network is None:
        hosts = tuple(replace(host, card=host.card or card) for host in hosts)
    known = {(link.source, link.target) for link in fleet.links}
    names = {host.name for host in hosts}
    links = tuple(
        e for e in newcomer.fleet.links if (e.source, e.target) not in known and {e.source, e.target} <= names
    )
    return replace(
        measured,
        fleet=replace(
            fleet, hosts=hosts, devices=(*fleet.devices, replace(old, name=name)), links=(*fleet.links, *links)
        ),
        device=(*measured.device, replace(newcomer.device[0], device=name)),
        layer=(*measured.layer, *(replace(p, device=name) for p in newcomer.layer if p.device == old.name)),
    )


class CorrectedTimes:
    """Times of devices that turned out to take so many times as long as they were measured to."""

    def __init__(self, times: ComputeTimes, factors: Sequence[float]) -> None:
        self.times, self.factors = times, tuple(factors)

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        return self.factors[device] * self.times.seconds(device, layer, phase, size, part)

    def alike(self, device: int) -> int:
        kinds = [(self.times.alike(d), factor) for d, factor in enumerate(self.factors)]
        return kinds.index(kinds[device])

    def least_s(self, device: int, layer: Layer, phase: Phase, batch: int, shared: bool = False) -> float:
        return self.factors[device] * self.times.least_s(device, layer, phase, batch, shared)


def seconds_of_layers(steps: StepList, graph: Graph, times: ComputeTimes, devices: int) -> list[dict[str, float]]:
    """What each device takes in a step for its part of each layer, by "forward conv1"."""
    rows: list[dict[str, float]] = [{} for _ in range(devices)]
    for step in steps.steps:
        if isinstance(step, ComputeStep):
            key = f"{step.phase} {step.layer}"
            for device, row in enumerate(rows):
                size = local_size(step, graph[step.layer], device)
                if size is not None:
                    seconds = times.seconds(device, graph[step.layer], step.phase, size, step.part)
                    row[key] = row.get(key, 0.0) + seconds
    return rows
