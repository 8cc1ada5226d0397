"""A model as a graph of layers: inputs, shapes per sample, parameters and FLOP of each, without tensors or modules.

`tracing/` makes it from an `nn.Module`.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

from convoy.errors import InputError
from convoy.sharding.layout import Shape

Kind = Literal[
    "input",  # the images
    "conv",  # Conv1d/2d/3d; groups > 1 splits only in step with its input
    "linear",
    "batch_norm",
    "elementwise",  # one input, entry by entry: activations, dropout, scaling by a number
    "pool",  # each channel for itself, whatever it does to the axes after the channels
    "flatten",  # channels and everything behind them become one axis of features
    "join",  # several inputs, entry by entry: residual sums, gates
    "cat",
    "parameter",  # a bare parameter or buffer of a module, without a batch axis
    "pick",  # one item of a layer that gives several tensors
    "opaque",  # anything else: whole samples in, whole samples out
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
class Layer:
    """One operation of the model.

    Attributes:
        name: the module's path where it is a module ("layer1.0.conv1"), else a name from the trace ("add_1").
        kind: the row of the table in `strategy.py` that says how it may be split.
        inputs: names of the layers whose outputs it reads, in the order of its arguments.
        shape: of the output *per sample*, the batch axis left out; the whole shape where not `batched`.
        batched: whether the output has a batch axis; a bare parameter has none and lies everywhere.
        parameters: what it owns, keyed relative to the layer ("weight", "bias", "running_mean").
        groups: groups of a convolution.
        axis: the axis `cat` joins along, counted with the batch axis.
        per_sample: False where samples depend on each other or no batch axis is seen: then it runs on one device.
        several: it gives a tuple or list of tensors; only `pick` reads those.
        flop: forward FLOP per sample, as torch.utils.flop_counter counts (a multiply-add is two).
        dtype: of the output, as torch names it.
        differentiable: False where no gradient passes: integers, `x.detach()`, what ran under `torch.no_grad()`.
        reason: why a layer is opaque, or runs whole; shown by `explain`.
        shared: another layer uses the same parameters, so they are never split.
        random: it draws random numbers in this mode (dropout), so copies of it on several devices would differ.
        statistics: a batch norm that normalises by the statistics of the batch (not by its running ones).
        input_entries: of all batched inputs together, per sample. A `Graph` fills it in.
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
    input_entries: int = 0

    def batch_shape(self, batch: int) -> Shape:
        """Shape of the output for a global batch."""
        return (batch, *self.shape) if self.batched else self.shape

    @property
    def channels_out(self) -> int:
        """Extent of the axis that `filter` splits: output channels, or the features of a Linear."""
        return self.parameters["weight"].shape[0]

    @property
    def channels_in(self) -> int:
        """Input channels of all groups together."""
        weight = self.parameters["weight"].shape
        return weight[1] * self.groups

    @property
    def trainable(self) -> tuple[Parameter, ...]:
        """The parameters that get a gradient from this layer."""
        return tuple(p for p in self.parameters.values() if p.trainable) if self.differentiable else ()

    @property
    def weighted(self) -> bool:
        """Whether it is a convolution or a Linear: the layers that plans list."""
        return self.kind in ("conv", "linear")


@dataclass(frozen=True)
class Graph:
    """The layers of one model in the order of its forward pass.

    Attributes:
        model: name of the model's class, for people.
        layers: by name, in order.
        outputs: names of the layers whose outputs the model returns.
    """

    model: str
    layers: Mapping[str, Layer]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        # Computed here, so that no caller can get it wrong.
        object.__setattr__(self, "layers", {name: self._with_inputs(layer) for name, layer in self.layers.items()})

    def _with_inputs(self, layer: Layer) -> Layer:
        read = [self.layers[name] for name in layer.inputs if name in self.layers]
        return replace(layer, input_entries=sum(math.prod(source.shape) for source in read if source.batched))

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
        """The layers that read each layer's output."""
        result: dict[str, tuple[Layer, ...]] = dict.fromkeys(self.layers, ())
        for layer in self.layers.values():
            for name in dict.fromkeys(layer.inputs):
                result[name] += (layer,)
        return result

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of everything a plan relies on: the layers, their inputs, shapes and parameters."""
        rows = [asdict(layer) for layer in self.layers.values()]
        for row in rows:
            # A plan holds in any precision; input_entries follow from the inputs.
            row.pop("reason"), row.pop("dtype"), row.pop("input_entries")
            if row["kind"] == "opaque":
                # Python that branches on values may take another path with the weights of another device.
                row["flop"] = 0
        text = json.dumps([rows, self.outputs], sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
