"""Define the plan, a strategy with shares for every layer, and its JSON file, which users can read and edit."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from convoy.errors import PlanError, shown, unknown_name
from convoy.files import parse_json, read_text
from convoy.layout import shares as share_rules
from convoy.layout.collectives import SUMS, Reduce
from convoy.layout.comm_dtype import COMM_DTYPES, CommDtype
from convoy.model.graph import Graph
from convoy.plan import strategy as strategies
from convoy.plan.strategy import Batch, Channel, Filter, Form, One, Sharding, Spatial, Strategy

FORMAT = 1

OutputPlace = Literal["everywhere", "where-computed"]
"""Location of the model's outputs after forward: all on every device, or each sample's on the device that computed it."""


def parse_outputs(text: str) -> OutputPlace:
    """Return the location of outputs of this name. InputError: unknown name."""
    if text not in get_args(OutputPlace):
        raise unknown_name("place of outputs", text, get_args(OutputPlace))
    return text  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy with shares for every layer.

    Attributes:
        name: a name for users; it has no effect.
        model: fingerprint of the plan's graph.
        devices: number of devices.
        batch: size of the global batch, the sum of `Batch` shares. Other batches are split in the same proportions.
        layers: strategies by layer name. Other layers follow their first input if possible.
        otherwise: strategy of layers that neither have their own strategy nor follow an input.
        reduce: the algorithm that sums gradients and `Partial` outputs.
        chunks: number of chunks of the batch in which a convolution receives the outputs of a split layer; it starts to
            compute with the first chunk. Files call it "pieces".
        wire: number format in which activations and gradients are sent.
        sharded: by layer name, how parameters are sharded; they are gathered for use. Files call it "in_shares".
        outputs: location of the model's outputs. With "where-computed", `convoy.loss` computes the loss.
    """

    name: str
    model: str
    devices: int
    batch: int
    layers: Mapping[str, Strategy]
    otherwise: Batch | One
    reduce: Reduce = "ring"
    chunks: int = 1
    wire: CommDtype = "exact"
    sharded: Mapping[str, Sharding] = field(default_factory=dict)
    outputs: OutputPlace = "everywhere"

    @property
    def inexact(self) -> str:
        """The reason why training differs from that on one device; empty if it does not."""
        if self.wire != "exact":
            return f"wire {self.wire} rounds messages to 8 bits, and follows the trajectory of one device only nearly"
        return ""

    def named(self, name: str) -> "Plan":
        return replace(self, name=name)

    def check(self, graph: Graph, devices: int | None = None) -> None:
        """Raise PlanError if the plan does not fit the model or the number of devices."""
        plan = f"plan {self.name!r}"
        if self.model != graph.fingerprint:
            raise PlanError(
                f"{plan} was made for another model (fingerprint {self.model}; "
                f"{graph.model} has {graph.fingerprint}): make a plan for this model"
            )
        if devices is not None and devices != self.devices:
            raise PlanError(
                f"{plan} is for {self.devices} devices, this job has {devices}: "
                "start as many devices as the plan names, or make a new plan"
            )
        if self.batch < 1:
            raise PlanError(f"{plan} has a batch of {self.batch}: a batch has at least one sample; set 1 or more")
        if not 1 <= self.chunks <= self.batch:
            raise PlanError(
                f"{plan} has {self.chunks} pieces: set 1 or more, at most one for each of {self.batch} samples"
            )
        choices = (("reduce", self.reduce, SUMS), ("wire format", self.wire, COMM_DTYPES))
        for what, value, known in (*choices, ("outputs", self.outputs, get_args(OutputPlace))):
            if value not in known:
                raise PlanError(f"{plan}: unknown {what} {value!r}: choose one of {', '.join(known)}")
        if isinstance(self.otherwise, Batch):
            share_rules.check(self.otherwise.shares, self.batch, self.devices, "strategy of all other layers")
        elif not 0 <= self.otherwise.device < self.devices:
            raise PlanError(
                f"strategy of all other layers: there is no device {self.otherwise.device}: "
                f"name one of 0 to {self.devices - 1}"
            )
        if unknown := [name for name in (*self.layers, *self.sharded) if name not in graph.layers]:
            raise PlanError(
                f"{plan} names a layer {unknown[0]!r} that {graph.model} does not have: "
                f"its layers are {', '.join(graph.layers)}"
            )
        for name, strategy in self.layers.items():
            strategies.check(graph[name], strategy, self.batch, self.devices)
        for name, kept in self.sharded.items():
            strategies.check_sharding(graph[name], self.layers.get(name), kept.shares, self.devices)

    def to_json(self) -> str:
        """Return the plan as JSON text for `from_json`."""
        rows = {"format": FORMAT, "name": self.name, "model": self.model, "devices": self.devices, "batch": self.batch}
        rows |= {"reduce": self.reduce, "wire": self.wire, "pieces": self.chunks}
        rows |= {"otherwise": _as_row(self.otherwise)}
        rows |= {"outputs": self.outputs} if self.outputs != "everywhere" else {}  # omit the default, as in older files
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()]
        tables = {"layers": {name: _as_row(each) for name, each in self.layers.items()}}
        if self.sharded:  # omit it if empty, as in older files
            tables["in_shares"] = {name: asdict(each) for name, each in self.sharded.items()}
        for key, table in tables.items():
            body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
            lines.append(f'  "{key}": ' + "{" + (f"\n{body}\n  " if body else "") + "}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str, source: str = "plan") -> "Plan":
        """Read a plan from JSON text.

        Raises:
            PlanError: not JSON, another format version, an unknown, missing or repeated key, or a wrong type.
        """
        try:
            raw = parse_json(text, _unique)
        except ValueError as error:
            raise PlanError(f"{source} is not JSON ({error}): correct it there, or save the plan again") from None
        version = raw.get("format") if isinstance(raw, dict) else None
        if version != FORMAT:
            raise PlanError(f"{source} has format {shown(version)}, this version reads {FORMAT}: make the plan again")
        try:
            row = _PlanFile.model_validate(raw)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"]) or "the file"
            if fault["type"] == "extra_forbidden":
                text = f"unknown key {shown(where)}: remove it, or use the version of Convoy that wrote it"
            elif fault["type"] == "missing":
                text = f"the key {where!r} is missing: add it or make the plan again"
            else:
                text = f"{where}: {fault['msg']} (found {shown(fault['input'])}): correct it or make the plan again"
            raise PlanError(f"{source}: {text}") from None
        otherwise = _strategy_of(row.otherwise)
        assert isinstance(otherwise, Batch | One)
        return Plan(
            row.name, row.model, row.devices, row.batch, {n: _strategy_of(each) for n, each in row.layers.items()},
            otherwise, row.reduce, row.pieces, row.wire,
            {n: Sharding(tuple(each.shares), each.form) for n, each in row.in_shares.items()}, row.outputs,
        )  # fmt: skip

    @staticmethod
    def load(path: Path) -> "Plan":
        """Read a plan file. PlanError: it is missing or not a plan."""
        return Plan.from_json(read_text(path, "the plan", "give the path of a plan file", kind=PlanError), str(path))


# --- the file --------------------------------------------------------------------------------------------------------


_BY_NAME: Mapping[str, type[Batch | Filter | Channel]] = {"batch": Batch, "filter": Filter, "channel": Channel}


class _FileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _BatchRow(_FileModel):
    strategy: Literal["batch"]
    shares: list[int]


class _SharesRow(_BatchRow):
    strategy: Literal["batch", "filter", "channel"]  # type: ignore[assignment]


class _OneRow(_FileModel):
    strategy: Literal["one"]
    device: int


class _SpatialRow(_FileModel):
    strategy: Literal["spatial"]
    shares: list[int]
    axes: list[int] = [2]
    grid: list[int] = []


class _ShardingRow(_FileModel):
    shares: list[int]
    form: Form = "keep"


class _PlanFile(_FileModel):
    format: Literal[1]
    name: str
    model: str
    devices: int = Field(ge=1, le=2**200)
    batch: int = Field(ge=1, le=2**200)
    reduce: Reduce
    wire: CommDtype = "exact"
    pieces: int = 1
    otherwise: Annotated[_BatchRow | _OneRow, Field(discriminator="strategy")]
    layers: dict[str, Annotated[_SharesRow | _SpatialRow | _OneRow, Field(discriminator="strategy")]] = Field(
        default_factory=dict
    )
    in_shares: dict[str, _ShardingRow] = Field(default_factory=dict)
    outputs: OutputPlace = "everywhere"


def _strategy_of(row: _BatchRow | _SpatialRow | _OneRow) -> Strategy:
    if isinstance(row, _OneRow):
        return One(row.device)
    shares = tuple(row.shares)
    if isinstance(row, _SpatialRow):
        return Spatial(shares, tuple(row.axes), tuple(row.grid))
    return _BY_NAME[row.strategy](shares)


def _as_row(strategy: Strategy) -> dict[str, Any]:
    if isinstance(strategy, One):
        return {"strategy": "one", "device": strategy.device}
    row: dict[str, Any] = {"strategy": strategy.name, "shares": list(strategy.shares)}
    if isinstance(strategy, Spatial):
        row |= {"axes": list(strategy.axes)} | ({"grid": list(strategy.grid)} if strategy.grid else {})
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the pairs. ValueError: a key is repeated. (json.loads would silently keep the last value.)"""
    counts = Counter(key for key, _ in pairs)
    if repeated := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"the key {shown(repeated[0])} occurs twice")
    return dict(pairs)
