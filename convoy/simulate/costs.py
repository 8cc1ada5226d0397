"""Holds the costs of a step: layer times, network, optimizer, and the executor's overheads.

Costs come from measurements (`table.py`). For devices that are only described, they are fractions of the peak rates. The
fractions and their errors were fitted to a hundred trainings on one device, ours and published ones
(`python -m lab.calibrate`, benchmarks/published.toml). They depend on the kind of device only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Nic
from convoy.fleet.catalogue import device_class
from convoy.plan import device_program as ops
from convoy.plan.device_program import Operation
from convoy.simulate.compute import ComputeTimes, Rate, Roofline
from convoy.simulate.interval import Errors
from convoy.simulate.memory import optimizer_named
from convoy.simulate.network import Network, network_of

FRESH_BYTES = 32 << 20
"""Above this size glibc's malloc maps new memory each time, and unmaps it when freed (its largest mmap threshold)."""

LOSS_TENSORS = 3
"""Tensors of the outputs' size that cross-entropy allocates: log probabilities, their gradient, the outputs' gradient."""


@dataclass(frozen=True, slots=True)
class Handling:
    """The tensor entries that a device copies and adds around messages, and the entries of each tensor that it allocates."""

    copied: int = 0
    added: int = 0
    made: tuple[int, ...] = ()

    def __add__(self, other: "Handling") -> "Handling":
        return Handling(self.copied + other.copied, self.added + other.added, self.made + other.made)


NOTHING = Handling()


def handling_of(operation: Operation) -> Handling | None:
    """Return the entries that an operation copies, adds and allocates; None for computations, messages, waits and signals.

    A conversion to or from the narrow dtype counts as a copy.
    """
    match operation:
        case ops.Make(slot=int()) | ops.View() | ops.Unpack() | ops.Pack(alone=True) | ops.FreeWeights():
            return NOTHING  # memory that every step reuses costs nothing
        case ops.Make(shape=shape, zeros=zeros):
            size = math.prod(shape)
            return Handling(copied=size if zeros else 0, made=(size,))
        case ops.Copy(size=size):
            return Handling(copied=size)
        case ops.Add(size=size, narrow=narrow):
            return Handling(copied=size, added=size, made=(size,)) if narrow else Handling(added=size)
        case ops.Merge(parts=parts, size=size):
            return Handling(added=size * (len(parts) - 1), made=(size,) * (len(parts) - 1))
        case ops.Pack(size=size):
            return Handling(copied=size, made=(size,))
        case ops.PackWeights(size=size, made=made, fresh=fresh, shares=shares):
            return Handling(copied=size, made=(made, *(map(sum, shares) if fresh else ())))
        case ops.UnpackWeights(size=size, alone=alone):
            return NOTHING if alone else Handling(copied=size)
    return None


@dataclass(frozen=True, slots=True)
class Overheads:
    """The seconds that one device spends outside its layers' arithmetic; all zero in the pure roofline model.

    Attributes:
        step_s: per step: fetching a batch, calling the loss, clearing gradients, calling the optimizer.
        layer_s: per layer, forward and backward together: finding its inputs, saving its outputs.
        round_s: per round with one message, in addition to `Network.latency_s`: slicing, buffers, bookkeeping.
        message_s: per further message of a round.
        copy_s_per_byte, add_s_per_byte: for copying a tensor, and for adding one to another.
        fresh_s_per_byte: for new memory, which the kernel maps page by page: tensors larger than `FRESH_BYTES`.
        update_s_per_tensor: the optimizer's seconds per parameter tensor, in addition to those per entry.
        loss_s_per_byte: for the loss and its gradient, per byte of the outputs.
        queue_s: for an accelerator's host to queue one layer's forward or backward; it replaces `layer_s`. 0 on a CPU. See
            `joined_s`.
        live_s_per_sample: of a model that runs live, its forward outside of the split submodules; it replaces the loss.
        live_bytes: bytes of the gradients of its parameters in no layer, which device 0 sends to all others.
    """

    step_s: float = 0.0
    layer_s: float = 0.0
    round_s: float = 0.0
    message_s: float = 0.0
    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    fresh_s_per_byte: float = 0.0
    update_s_per_tensor: float = 0.0
    loss_s_per_byte: float = 0.0
    queue_s: float = 0.0
    live_s_per_sample: float = 0.0
    live_bytes: int = 0

    def joined_s(self, device_s: float, host_s: float) -> float:
        """Return the seconds of work that takes a device and its host these seconds.

        Calls to Python and torch (`step_s`, `layer_s`, `queue_s`, calls of rounds, `update_s_per_tensor`) are the host's. The
        host of an accelerator runs ahead, so both work at once. A CPU does one after the other.
        """
        return max(device_s, host_s) if self.queue_s else device_s + host_s

    def calls_s(self, messages: int) -> float:
        """Return the seconds of calls in a round with this number of messages, sent and received."""
        return self.round_s + (messages - 1) * self.message_s if messages else 0.0

    def handling_s(self, handling: Handling, itemsize: int) -> float:
        """Return the seconds of copies, additions and new memory."""
        fresh = sum(n for n in handling.made if n * itemsize > FRESH_BYTES)
        return itemsize * (
            handling.copied * self.copy_s_per_byte
            + handling.added * self.add_s_per_byte
            + fresh * self.fresh_s_per_byte
        )

    def loss_s(self, outputs: Sequence[int], itemsize: int, batch: int = 0) -> float:
        """Return the seconds of the loss, forward and backward, for outputs with these numbers of entries."""
        if self.live_s_per_sample or not self.loss_s_per_byte:
            return self.live_s_per_sample * batch
        made = Handling(made=tuple(n for n in outputs for _ in range(LOSS_TENSORS)))
        return sum(outputs) * itemsize * self.loss_s_per_byte + self.handling_s(made, itemsize)


_NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Costs:
    """All inputs of the simulator and the analytic cost model except the steps.

    Attributes:
        itemsize: bytes of one number.
        update_s_per_entry: by device, the optimizer's seconds per parameter entry.
        overheads: by device; empty if not measured.
        process_bytes: by device, memory of its process before training; empty if not measured.
    """

    times: ComputeTimes
    network: Network
    itemsize: int = 4
    update_s_per_entry: tuple[float, ...] = ()
    overheads: tuple[Overheads, ...] = ()
    errors: Errors = field(default_factory=Errors)
    process_bytes: tuple[int, ...] = ()

    def update_s(self, device: int) -> float:
        return self.update_s_per_entry[device] if self.update_s_per_entry else 0.0

    def overhead(self, device: int) -> Overheads:
        return self.overheads[device] if self.overheads else _NO_OVERHEADS


# --- devices that are only described ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReachedFractions:
    """The fractions of their peak rates that devices of a family reach in a layer.

    Attributes:
        arithmetic: of the peak FLOP/s, in convolutions and linear layers. It may be above 1: Winograd's convolutions need
            fewer multiplications than are counted.
        memory: of the memory bandwidth, for all bytes that a layer reads and writes.
        call_s: seconds of each call of a layer.
        spread: nine of ten measured trainings of one device took between predicted / spread and predicted * spread.
        architectures: architectures of the measured devices.
    """

    arithmetic: float
    memory: float
    call_s: float
    spread: float
    architectures: frozenset[str]


CPU = ReachedFractions(0.52, 0.11, 8e-6, 1.37, frozenset({"zen5"}))
PLAIN_GPU = ReachedFractions(1.1, 0.45, 1.5e-5, 1.4, frozenset({"maxwell", "pascal", "volta", "turing"}))
TF32_GPU = ReachedFractions(0.9, 0.6, 1e-5, 1.26, frozenset({"ampere", "ada", "hopper"}))

TF32 = frozenset({"ampere", "ada", "hopper", "blackwell"})
"""NVIDIA's architectures with tensor cores for TF32, which torch uses for convolutions by default."""

UNKNOWN = 2.0
"""Exponent applied to the spread of architectures that were never measured."""

NIC_FRACTION = 0.95
"""The fraction of a NIC's rate that messages reach (measured over gloo, from 4 MB up)."""

HANDLING_S_PER_BYTE = 5.5e-10
"""Processor seconds per byte sent or received, as measured for gloo and for Convoy's unencrypted connections."""

ENCRYPTION_S_PER_BYTE = 4e-10
"""Additional processor seconds per byte for TLS, for messages that leave the machine (docs/decisions/043)."""

STAGING_S_PER_BYTE = 1e-10
"""Seconds per byte copied between a GPU's memory and the host's: about 10 GB/s."""

_OF_A_CORE = Overheads(
    step_s=1e-3, layer_s=5e-5, round_s=4e-4, message_s=1e-4, copy_s_per_byte=5e-11, add_s_per_byte=5e-11,
    fresh_s_per_byte=1e-11, update_s_per_tensor=1e-5, loss_s_per_byte=1e-9,
)  # fmt: skip
"""Overheads on one whole core, rounded from `convoy measure` on a machine that was not idle."""


def reached_by(device: Device) -> ReachedFractions:
    """Return the fractions of its peak rates that a device reaches, with the spread of its architecture."""
    architecture = "" if device.class_name is None else device_class(device.class_name).architecture
    family = CPU if device.kind == "cpu" else TF32_GPU if architecture in TF32 else PLAIN_GPU
    if architecture in family.architectures:
        return family
    return replace(family, spread=family.spread**UNKNOWN)


def described_costs(fleet: Fleet, *, optimizer: str = "sgd-momentum", itemsize: int = 4) -> Costs:
    """Return the costs of a fleet without measurements.

    Raises:
        InputError: a device has no peak rates; the optimizer is unknown.
    """
    moved = optimizer_named(optimizer).moved * itemsize
    handling_s = HANDLING_S_PER_BYTE + (ENCRYPTION_S_PER_BYTE if len(fleet.hosts) > 1 else 0.0)
    rates, overheads, traffic_s = [], [], []
    for device in fleet.devices:
        is_cpu = device.kind == "cpu"
        slower = device.slowdown / (min(1.0, device.cores or 1.0) if is_cpu else 1.0)  # relative to one whole core
        rate = _rate(device, slower)
        own = Overheads(*(getattr(_OF_A_CORE, name) * slower for name in Overheads.__slots__))
        if not is_cpu:
            # A GPU copies within its memory, and caches freed memory. Cross-entropy moves six tensors of the outputs' size.
            byte_s = 1 / rate.bytes_per_s
            own = replace(
                own,
                copy_s_per_byte=2 * byte_s,
                add_s_per_byte=3 * byte_s,
                fresh_s_per_byte=0.0,
                loss_s_per_byte=6 * byte_s,
            )
        rates.append(rate)
        overheads.append(own)
        traffic_s.append(handling_s * slower + (0.0 if is_cpu else STAGING_S_PER_BYTE))
    # Reduce NIC rates to those that messages reach. Links in a file were measured, so they stay.
    segments = tuple(replace(each, uplink=_reached_rates(each.uplink)) for each in fleet.segments)
    wire = replace(fleet, network=fleet.network and _reached_rates(fleet.network), segments=segments)
    spreads = tuple(reached_by(device).spread for device in fleet.devices)
    kinds = tuple(device.class_name or device.name for device in fleet.devices)
    return Costs(
        Roofline(tuple(rates), itemsize), network_of(wire, traffic_s), itemsize,
        tuple(moved / rate.bytes_per_s for rate in rates), tuple(overheads), Errors("described", spreads, kinds=kinds),
    )  # fmt: skip


def _rate(device: Device, slower: float) -> Rate:
    if device.peak_flop_per_s is None or device.memory_bytes_per_s is None:
        raise InputError(
            f"device {device.name!r} has no speed: set its class (class = 'rtx3060'; see `convoy predict --list`), "
            "give peak_flop_per_s and memory_bytes_per_s, or measure the fleet (convoy measure)"
        )
    reached = reached_by(device)
    known = None if device.class_name is None else device_class(device.class_name)
    tensor_cores = 1.0
    if known is not None and known.tf32_flop_per_s is not None:
        tensor_cores = known.tf32_flop_per_s.value / known.peak_flop_per_s.value
    peak = device.peak_flop_per_s * reached.arithmetic / device.slowdown
    return Rate(
        flop_per_s=peak,
        bytes_per_s=device.memory_bytes_per_s * reached.memory / device.slowdown,
        conv_flop_per_s=peak * tensor_cores,
        call_s=reached.call_s * slower,
    )


def _reached_rates(nic: Nic) -> Nic:
    sends, receives = nic.send_bytes_per_s * NIC_FRACTION, nic.receive_bytes_per_s * NIC_FRACTION
    return replace(nic, send_bytes_per_s=sends, receive_bytes_per_s=receives)
