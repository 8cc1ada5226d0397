"""Describes a model as a graph of layers with inputs, shapes, parameters and FLOP, without tensors or modules.

`tracing/` builds the graph from an `nn.Module`.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

from convoy.errors import InputError
from convoy.layout.layout import Layout, OnOne, Shape
from convoy.model.windows import Window

Kind = Literal[
    "input",  # the images
    "conv",  # Conv1d/2d/3d; groups > 1 splits only in step with its input
    "conv_transpose",  # ConvTranspose1d/2d/3d; its filters are the second axis of the weight
    "linear",
    "filters",  # computes each filter separately, like a convolution: `Layer.cuts` has the axes
    "batch_norm",
    "elementwise",  # one input, entry by entry: activations, dropout, scaling by a number
    "pool",  # each channel separately, with any operation on the later axes
    "flatten",  # channels and all axes after them become one axis of features
    "parts",  # computes shards of some axes separately, like group norm or attention: `Layer.cuts` has the axes
    "join",  # several inputs, entry by entry: residual sums, gates
    "cat",
    "parameter",  # a bare parameter or buffer of a module, without a batch axis
    "pick",  # one item of a layer with several output tensors
    "opaque",  # any other layer: whole samples in, whole samples out
]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer under its `state_dict` key."""

    key: str
    shape: Shape
    trainable: bool
    buffer: bool = False

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis of a layer's output along which devices can compute shards independently.

    Attributes:
        axis: the output's axis; the batch is axis 0.
        parts: number of equal, indivisible parts: groups of channels, heads, or single entries.
        inputs: per input, the axis that is cut into the same parts; None: the whole input is read.
        parameters: key -> axis of each parameter or buffer that is cut into the same parts; the others are copied.
    """

    axis: int
    parts: int
    inputs: tuple[int | None, ...]
    parameters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """One operation of the model.

    Attributes:
        name: the module's path ("layer1.0.conv1"); without a module, a name from the trace ("add_1").
        kind: determines the possible splits; see the table in `plan/strategy.py`.
        inputs: names of the input layers, in the order of the arguments.
        shape: shape of the output *per sample*, without the batch axis; the whole shape if not `batched`.
        batched: whether the output has a batch axis; a bare parameter has none and is on every device.
        parameters: parameters and buffers, by key relative to the layer ("weight", "bias", "running_mean").
        cuts: the possible cuts, for kinds that do not determine them ("parts", "filters").
        normalised: groups of entries that a group or instance norm normalises in each sample; 0: it is none.
        windows: for convolutions, pooling and resizing, what each axis after the channels reads of the input's axis.
        axis: the axis of `cat`; the batch is axis 0. 2: a batch norm whose rows have an axis of their own, before channels.
        per_sample: whether samples are independent. If not, or without a batch axis, the layer runs on one device.
        several: whether the output is several tensors; then only `pick` reads it.
        flop: forward FLOP per sample, as torch.utils.flop_counter counts (a multiply-add is two).
        dtype: torch's name of the output's dtype.
        differentiable: False for integers, `x.detach()`, and calls under `torch.no_grad()`.
        reason: why the layer is opaque or not split; shown by `explain`.
        shared: whether other layers use the same parameters, or these have hooks. Then they are on every device, never split.
        random: whether it draws random numbers in this mode (dropout), so that copies on several devices would differ.
        statistics: whether this is a batch norm that normalises by batch statistics (not by running statistics).
        called_everywhere: whether every device must call it in every step, because a call changes its buffers. If a device has
            no samples for it, all devices compute it for the global batch.
        recomputed: whether `torch.utils.checkpoint` calls it again in backward, on one device.
        saved: what autograd saves for backward: indices of inputs, and -1 for the output; None: unknown.
        saved_bytes: bytes per sample that autograd saves besides these, such as the indices of max pooling.
        input_entries: entries of all batched inputs per sample. A `Graph` sets it.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    shape: Shape
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    groups: int = 1
    axis: int = 0
    batched: bool = True
    per_sample: bool = True
    several: bool = False
    flop: int = 0
    reason: str = ""
    shared: bool = False
    statistics: bool = False
    random: bool = False
    dtype: str = "float32"
    differentiable: bool = True
    called_everywhere: bool = False
    recomputed: bool = False
    saved: tuple[int, ...] | None = None
    saved_bytes: int = 0
    input_entries: int = 0
    cuts: tuple[Cut, ...] = ()
    normalised: int = 0
    windows: tuple[Window, ...] = ()

    def batch_shape(self, batch: int) -> Shape:
        """Return the shape of the output for a global batch."""
        return (batch, *self.shape) if self.batched else self.shape

    @property
    def feature_axis(self) -> int:
        """The axis that `filter` splits: 1 for convolutions, the last one for a Linear. The batch is axis 0."""
        if self.kind == "filters":
            return self.cuts[0].axis
        return len(self.shape) if self.kind == "linear" else 1

    @property
    def channels_out(self) -> int:
        """Length of the axis that `filter` splits: output channels, or the features of a Linear."""
        return self.shape[self.feature_axis - 1]

    @property
    def channels_in(self) -> int:
        """Number of input channels of all groups together; 1 if they are never split."""
        if self.kind == "filters":
            return 1
        weight = self.parameters["weight"].shape
        return weight[0] if self.kind == "conv_transpose" else weight[1] * self.groups

    @property
    def sums_channels(self) -> bool:
        """Whether its output is a sum over input channels, so that devices may compute partial sums."""
        return self.multiplies and self.groups == 1

    @cached_property
    def extents(self) -> tuple[int, int]:
        """Numbers of outputs (filters, features) and inputs of the whole layer; without weights, both are its channels."""
        if self.weighted:
            return self.channels_out, self.channels_in
        channels = self.shape[0] if self.shape else 1
        return channels, channels

    @cached_property
    def entries(self) -> int:
        """Number of entries of all parameters and buffers."""
        return sum(parameter.entries for parameter in self.parameters.values())

    @cached_property
    def trainable(self) -> tuple[Parameter, ...]:
        """The parameters that get a gradient from this layer."""
        return tuple(p for p in self.parameters.values() if p.trainable) if self.differentiable else ()

    @cached_property
    def multiplies(self) -> bool:
        """Whether the gradients of input and weight are two separate products."""
        return self.kind in ("conv", "conv_transpose", "linear")

    @cached_property
    def weighted(self) -> bool:
        """Whether it consists of filters, like convolutions and Linears. Plans list these layers."""
        return self.multiplies or self.kind == "filters"


@dataclass(frozen=True)
class Graph:
    """The layers of one model in the order of its forward pass.

    Attributes:
        model: name of the model's class.
        layers: by name, in order.
        outputs: names of the layers whose outputs the model returns.
    """

    model: str
    layers: Mapping[str, Layer]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        layers = {}
        for name, layer in self.layers.items():
            read = [self.layers[source] for source in layer.inputs if source in self.layers]
            entries = sum(math.prod(source.shape) for source in read if source.batched)
            layers[name] = replace(layer, input_entries=entries)
        object.__setattr__(self, "layers", layers)

    def __getitem__(self, name: str) -> Layer:
        try:
            return self.layers[name]
        except KeyError:
            raise InputError(f"{self.model} has no layer {name!r}: its layers are {', '.join(self.layers)}") from None

    @property
    def inputs(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers.values() if layer.kind == "input")

    @property
    def weighted(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers.values() if layer.weighted)

    @cached_property
    def readers(self) -> dict[str, tuple[Layer, ...]]:
        """Layer name -> the layers that read its output."""
        result: dict[str, tuple[Layer, ...]] = dict.fromkeys(self.layers, ())
        for layer in self.layers.values():
            for name in dict.fromkeys(layer.inputs):
                result[name] += (layer,)
        return result

    @cached_property
    def before(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """For each layer, the layers that must run before it: its inputs and, if it has state, the last layer with state."""
        rows = []
        last: frozenset[str] = frozenset()
        for layer in self.layers.values():
            # A call may depend on an earlier call: by random numbers, Python state, shared buffers.
            has_state = layer.random or layer.called_everywhere or layer.shared
            in_order = has_state or layer.kind in ("opaque", "parameter")
            rows.append((layer.name, last.union(layer.inputs) if in_order else frozenset(layer.inputs)))
            last = frozenset((layer.name,)) if in_order else last
        return tuple(rows)

    def unsplit(self, layouts: Mapping[str, Layout]) -> str:
        """Return a line that says how much arithmetic is not split, and why; "" if under 1 %."""
        rows = [layer for layer in self.layers.values() if layer.kind == "opaque" and not layer.per_sample]
        if not rows:
            return ""
        most = max(rows, key=lambda layer: layer.flop)
        layout = layouts[most.name]
        kept = sum(layer.flop for layer in rows if layouts[layer.name] == layout)
        part = kept / max(1, sum(layer.flop for layer in self.layers.values()))
        where = f"stays on device {layout.device}" if isinstance(layout, OnOne) else "is computed by every device"
        text = f"{part:.0%} of the arithmetic {where}, because of layer {most.name!r}: {most.reason}"
        return text if part >= 0.01 else ""

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that a plan depends on: layers, inputs, shapes and parameters."""
        rows = [asdict(layer) for layer in self.layers.values()]
        uses = Counter(key for layer in self.layers.values() for key in {p.key for p in layer.parameters.values()})
        for row, layer in zip(rows, self.layers.values(), strict=True):
            row["shared"] = any(uses[p.key] > 1 for p in layer.parameters.values())  # hooks may be added after planning
            # A plan is valid in any precision; the other fields are derived, or irrelevant to a plan.
            for name in (
                "reason", "dtype", "input_entries", "recomputed", "windows", "normalised", "saved", "saved_bytes"
            ):  # fmt: skip
                del row[name]
            # Existing plan files have fingerprints with an older field and name, and without empty fields.
            row["everywhere"], row["each"] = False, row.pop("called_everywhere")
            for name in ("each", "cuts"):
                if not row[name]:
                    del row[name]
            if row["kind"] == "opaque":
                # Data-dependent branches may run other operations with another device's weights.
                row["flop"] = 0
        text = json.dumps([rows, self.outputs], sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
