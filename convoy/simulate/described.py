"""Costs of devices that are only described: what they can do at most, times the part of it that nets reach on such devices.

The parts and how far they err are read from measurements: a hundred trainings of one device, ours and published ones
(`python -m lab.calibrate`, benchmarks/published.toml). They are properties of a kind of device, never of a case.
"""

from dataclasses import dataclass, replace

from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Nic
from convoy.fleet.catalogue import device_class
from convoy.model.graph import Graph
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.interval import Errors, together
from convoy.simulate.memory import update_s_per_entry
from convoy.simulate.network import network_of
from convoy.simulate.overhead import Overheads
from convoy.simulate.table import Measurement


@dataclass(frozen=True, slots=True)
class Reached:
    """The parts of their peaks that devices of a family reach, layer by layer.

    Attributes:
        arithmetic: of convolutions and linear layers. It may be above 1: Winograd's convolutions take fewer multiplications
            than they are counted with.
        memory: of what every layer reads and writes; backward, it does more of both than is counted.
        call_s: of each call of a layer.
        spread: nine of ten measured trainings of one device took between predicted / spread and predicted * spread.
        architectures: of the devices that were measured.
    """

    arithmetic: float
    memory: float
    call_s: float
    spread: float
    architectures: frozenset[str]


CPU = Reached(0.52, 0.11, 8e-6, 1.37, frozenset({"zen5"}))
PLAIN_GPU = Reached(1.1, 0.45, 1.5e-5, 1.4, frozenset({"maxwell", "pascal", "volta", "turing"}))
TF32_GPU = Reached(0.9, 0.6, 1e-5, 1.26, frozenset({"ampere", "ada", "hopper"}))

TF32 = frozenset({"ampere", "ada", "hopper", "blackwell"})
"""NVIDIA's generations with tensor cores for TF32, in which torch computes convolutions unless it is told not to."""

UNKNOWN = 2.0
"""Of an architecture that was never measured the spread is the square: twice as wide, in logarithms."""

OTHER_NET = 1.59
"""The same, of devices that were measured with another net."""

WIRE = 0.95
"""Of a card's rate, what messages reach (measured over gloo, from 4 MB up)."""


def reached_by(device: Device) -> Reached:
    """The parts of its peaks that a device reaches, with the spread for its architecture."""
    architecture = "" if device.class_name is None else device_class(device.class_name).architecture
    family = CPU if device.kind == "cpu" else TF32_GPU if architecture in TF32 else PLAIN_GPU
    if architecture in family.architectures:
        return family
    return replace(family, spread=family.spread**UNKNOWN)


def described_costs(fleet: Fleet, *, optimizer: str = "sgd-momentum", itemsize: int = 4) -> Costs:
    """The costs of a fleet of which nothing was measured.

    Raises:
        InputError: a device without peaks, an unknown optimizer.
    """
    rates = tuple(_rate(device) for device in fleet.devices)
    update = tuple(update_s_per_entry(optimizer, rate.bytes_per_s, itemsize) for rate in rates)
    overheads = tuple(_overheads(device, rate) for device, rate in zip(fleet.devices, rates, strict=True))
    handling_s_per_byte = HANDLING_S_PER_BYTE + (ENCRYPTION_S_PER_BYTE if len(fleet.hosts) > 1 else 0.0)
    traffic = [
        handling_s_per_byte * _slower(device) + (0.0 if device.kind == "cpu" else STAGING_S_PER_BYTE)
        for device in fleet.devices
    ]
    kinds = tuple(device.class_name or device.name for device in fleet.devices)
    errors = Errors("described", tuple(reached_by(device).spread for device in fleet.devices), kinds=kinds)
    return Costs(
        Roofline(rates, itemsize), network_of(_on_the_wire(fleet), traffic), itemsize, update, overheads, errors
    )


def fleet_costs(fleet: Fleet, measured: Measurement | None, graph: Graph, optimizer: str = "sgd-momentum") -> Costs:
    """The best that is known of a fleet and a net: measured with this net, else with another one, else described.

    Raises:
        InputError: a device of which nothing is known.
        MismatchError: measured with another net, by a version that did not yet keep what its devices reached.
    """
    if measured is None:
        return described_costs(fleet, optimizer=optimizer)
    if graph.fingerprint == measured.fingerprint or not all(
        each.flop_per_s and each.memory_bytes_per_s for each in measured.device
    ):
        return measured.costs(graph)
    return rated_costs(measured)


def rated_costs(measured: Measurement, itemsize: int = 4) -> Costs:
    """The costs of any net on a fleet that was measured with another: a roofline of what its devices reached there, and the
    wire, the optimizer and the rest of a step as they were measured."""
    rates = tuple(Rate(each.flop_per_s, each.memory_bytes_per_s) for each in measured.device)
    costs = measured.costs_with(Roofline(rates, itemsize), itemsize)
    devices = tuple(together([OTHER_NET, each]) for each in costs.errors.devices)
    return replace(costs, errors=replace(costs.errors, basis="rates", devices=devices))


def _rate(device: Device) -> Rate:
    if device.peak_flop_per_s is None or device.memory_bytes_per_s is None:
        raise InputError(
            f"device {device.name!r} says nothing of its speed: name its class (class = 'rtx3060'; `convoy predict --list` "
            "has them), give peak_flop_per_s and memory_bytes_per_s, or measure the fleet (convoy measure)"
        )
    reached, slowed = reached_by(device), device.slowdown
    peak = device.peak_flop_per_s * reached.arithmetic / slowed
    return Rate(
        flop_per_s=peak,
        bytes_per_s=device.memory_bytes_per_s * reached.memory / slowed,
        conv_flop_per_s=peak * _tensor_cores(device),
        call_s=reached.call_s * _slower(device),
    )


def _tensor_cores(device: Device) -> float:
    """How many times as fast convolutions are as other arithmetic."""
    known = None if device.class_name is None else device_class(device.class_name)
    if known is None or known.tf32_flop_per_s is None:
        return 1.0
    return known.tf32_flop_per_s.value / known.peak_flop_per_s.value


def _slower(device: Device) -> float:
    """How many times slower than one whole core a device's processor runs."""
    share = min(1.0, device.cores or 1.0) if device.kind == "cpu" else 1.0
    return device.slowdown / share


HANDLING_S_PER_BYTE = 5.5e-10
"""Of a core, for each byte sent or received, rounded from what gloo took; unencrypted connections take as much."""

ENCRYPTION_S_PER_BYTE = 4e-10
"""The same, of TLS where messages leave the machine (`python -m benchmarks.connections`, docs/decisions/043)."""

STAGING_S_PER_BYTE = 1e-10
"""Of the way between a GPU's memory and the host's, which messages take: 10 GB/s, a round figure."""

_OF_A_CORE = Overheads(
    step_s=1e-3, layer_s=5e-5, round_s=4e-4, message_s=1e-4, copy_s_per_byte=5e-11, add_s_per_byte=5e-11,
    fresh_s_per_byte=1e-11, update_s_per_tensor=1e-5, loss_s_per_byte=1e-9,
)  # fmt: skip
"""What a whole core takes beside the arithmetic: rounded from `convoy measure` on our machine, which was not idle."""


def _overheads(device: Device, rate: Rate) -> Overheads:
    slower = _slower(device)
    of_a_core = Overheads(*(getattr(_OF_A_CORE, name) * slower for name in Overheads.__slots__))
    if device.kind == "cpu":
        return of_a_core
    # A GPU copies in its own memory, a read and a write, and what it frees it keeps. A cross-entropy reads the outputs, writes
    # and reads logarithms, writes and reads their gradient, and writes that of the outputs.
    copy_s, add_s, loss_s = 2 / rate.bytes_per_s, 3 / rate.bytes_per_s, 6 / rate.bytes_per_s
    return replace(
        of_a_core, copy_s_per_byte=copy_s, add_s_per_byte=add_s, fresh_s_per_byte=0.0, loss_s_per_byte=loss_s
    )


def _on_the_wire(fleet: Fleet) -> Fleet:
    """With cards and uplinks as fast as messages are over them; links that a file gives were measured."""

    def carries(card: Nic) -> Nic:
        sends, receives = card.send_bytes_per_s * WIRE, card.receive_bytes_per_s * WIRE
        return replace(card, send_bytes_per_s=sends, receive_bytes_per_s=receives)

    segments = tuple(replace(segment, uplink=carries(segment.uplink)) for segment in fleet.segments)
    return replace(fleet, network=fleet.network and carries(fleet.network), segments=segments)
