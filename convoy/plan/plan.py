"""Plan: a strategy with shares for every layer; a value, and a file that a person can read, edit and run."""

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
from convoy.layout.comm_dtype import COMM_DTYPES, CommDtype
from convoy.layout.redistribute import SUMS, Reduce, Sum
from convoy.model.graph import Graph
from convoy.plan import strategy as strategies
from convoy.plan.strategy import Batch, Channel, Filter, Form, One, Sharding, Strategy

FORMAT = 1

OutputPlace = Literal["everywhere", "where-computed"]


def parse_outputs(text: str) -> OutputPlace:
    """Where a plan's outputs are, as the command line and Python say it.

    Raises:
        InputError: unknown; the choices are listed.
    """
    if text not in get_args(OutputPlace):
        raise unknown_name("place of outputs", text, get_args(OutputPlace))
    return text  # type: ignore[return-value]


"""Where the model's outputs are after forward: the whole batch on every device, or each sample's where it was computed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes what.

    Attributes:
        name: e.g. "master"; only for people.
        model: fingerprint of the graph it was made for.
        devices: how many devices it shares the work among.
        batch: the global batch that `Batch` shares sum to; other batches are shared out in the same proportions.
        layers: a strategy per layer, by the layer's name. Layers that are not named follow their first input.
        otherwise: what a layer does that can neither follow nor has a strategy of its own: `Batch` or `One`.
        reduce: how pending sums become copies.
        pieces: outputs that a convolution reads whole come to it in so many pieces of the batch, and it begins with the
            first.
        wire: in which numbers activations and gradients travel.
        in_shares: layers whose parameters are kept in shares and gathered for use, by the layer's name.
        outputs: where the model's outputs are; where they stay with their samples, `convoy.loss` makes the loss of them.
    """

    name: str
    model: str
    devices: int
    batch: int
    layers: Mapping[str, Strategy]
    otherwise: Batch | One
    reduce: Sum = "ring"
    chunks: int = 1
    wire: CommDtype = "exact"
    sharded: Mapping[str, Sharding] = field(default_factory=dict)
    outputs: OutputPlace = "everywhere"

    @property
    def exact(self) -> bool:
        """Whether training follows the trajectory of one device."""
        return not self.inexact

    @property
    def inexact(self) -> str:
        """Why training does not follow the trajectory of one device, in words; empty where it does."""
        if self.mixes:
            return "butterfly mixing does not follow the trajectory of one device"
        if self.wire != "exact":
            return (
                f"wire {self.wire} rounds what travels to 8 bits, and follows the trajectory of one device only nearly"
            )
        return ""

    @property
    def mixes(self) -> bool:
        """Whether the copies of a weight differ from device to device."""
        return self.reduce == "inexact-butterfly-mixing"

    @property
    def collective(self) -> Reduce:
        """The collective for everything but gradients that are mixed."""
        return "butterfly" if self.reduce == "inexact-butterfly-mixing" else self.reduce

    def named(self, name: str) -> "Plan":
        """The same plan under another name."""
        return replace(self, name=name)

    def check(self, graph: Graph, devices: int | None = None) -> None:
        """Refuse a plan that does not fit a model or a number of devices.

        Raises:
            PlanError: with the value, the rule and the remedy.
        """
        if self.model != graph.fingerprint:
            raise PlanError(
                f"plan {self.name!r} was made for another model (fingerprint {self.model}; "
                f"{graph.model} has {graph.fingerprint}): make a plan for this model"
            )
        if devices is not None and devices != self.devices:
            raise PlanError(
                f"plan {self.name!r} is for {self.devices} devices, this job has {devices}: "
                "start as many devices as the plan names, or make a new plan"
            )
        if self.batch < 1:
            raise PlanError(
                f"plan {self.name!r} has a batch of {self.batch}: a batch holds one sample at least; set 1 or more"
            )
        if not 1 <= self.chunks <= self.batch:
            raise PlanError(
                f"plan {self.name!r}: {self.chunks} pieces: a move goes in one piece or more, at most one for each of the "
                f"{self.batch} samples"
            )
        places = get_args(OutputPlace)
        named = (
            ("reduce", self.reduce, SUMS),
            ("wire format", self.wire, COMM_DTYPES),
            ("outputs", self.outputs, places),
        )
        for what, value, choices in named:
            if value not in choices:
                raise PlanError(f"plan {self.name!r}: unknown {what} {value!r}: choose one of {', '.join(choices)}")
        if self.mixes and self.wire != "exact":
            raise PlanError(
                f"plan {self.name!r}: wire {self.wire} with reduce {self.reduce}, which sends weights, and those are never "
                "rounded: use the wire exact, or sum by ring, butterfly, direct or star"
            )
        if self.mixes and self.sharded:
            raise PlanError(
                f"plan {self.name!r}: weights in shares with reduce {self.reduce}, which leaves each device its own weights: "
                "sum by ring, butterfly, direct or star, or take in_shares out"
            )
        self._check_layers(graph)

    def _check_layers(self, graph: Graph) -> None:
        if isinstance(self.otherwise, Batch):
            share_rules.check(self.otherwise.shares, self.batch, self.devices, "strategy of all other layers")
        elif not 0 <= self.otherwise.device < self.devices:
            raise PlanError(
                f"strategy of all other layers: there is no device {self.otherwise.device}: "
                f"name one of 0 to {self.devices - 1}"
            )
        for name, strategy in self.layers.items():
            if name not in graph.layers:
                raise PlanError(
                    f"plan {self.name!r} names a layer {name!r} that {graph.model} does not have: "
                    f"its layers are {', '.join(graph.layers)}"
                )
            strategies.check(graph[name], strategy, self.batch, self.devices)
        for name, kept in self.sharded.items():
            if name not in graph.layers:
                raise PlanError(
                    f"plan {self.name!r} keeps a layer {name!r} in shares that {graph.model} does not have: "
                    f"its layers are {', '.join(graph.layers)}"
                )
            strategies.check_sharding(graph[name], self.layers.get(name), kept.shares, self.devices)

    def to_json(self) -> str:
        """Text that `from_json` reads back to an equal plan."""
        rows = {"format": FORMAT, "name": self.name, "model": self.model, "devices": self.devices, "batch": self.batch}
        rows |= {"reduce": self.reduce, "wire": self.wire, "pieces": self.chunks}
        rows |= {"otherwise": _as_row(self.otherwise)}
        rows |= {"outputs": self.outputs} if self.outputs != "everywhere" else {}  # as it was before there was a choice
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()]
        layers = [f"    {json.dumps(name)}: {json.dumps(_as_row(s))}" for name, s in self.layers.items()]
        lines.append(_table("layers", layers))
        if self.sharded:  # as it was before there were any
            kept = [f"    {json.dumps(name)}: {json.dumps(asdict(each))}" for name, each in self.sharded.items()]
            lines.append(_table("in_shares", kept))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str, source: str = "plan") -> "Plan":
        """Read a plan.

        Raises:
            PlanError: not JSON, another format version, a key that is unknown, missing or there twice, a wrong type;
                the field is named.
        """
        try:
            raw = parse_json(text, _without_doubles)
        except ValueError as error:
            raise PlanError(
                f"{source} cannot be read as JSON ({error}): correct it there or make the plan anew"
            ) from None
        version = raw.get("format") if isinstance(raw, dict) else None
        if version != FORMAT:
            raise PlanError(f"{source} has format {shown(version)}, this version reads {FORMAT}: make the plan anew")
        try:
            row = _PlanFile.model_validate(raw)
        except ValidationError as error:
            raise PlanError(f"{source}: {_first_fault(error)}") from None
        layers = {name: _from_row(entry) for name, entry in row.layers.items()}
        otherwise = _from_row(row.otherwise)
        assert isinstance(otherwise, Batch | One)
        in_shares = {name: Sharding(tuple(entry.shares), entry.form) for name, entry in row.in_shares.items()}
        return Plan(
            row.name, row.model, row.devices, row.batch, layers, otherwise, row.reduce, row.pieces, row.wire, in_shares,
            row.outputs,
        )  # fmt: skip

    @staticmethod
    def load(path: Path) -> "Plan":
        """Read a plan file.

        Raises:
            PlanError: the file is missing or not a plan.
        """
        return Plan.from_json(read_text(path, "the plan", "give the path of a plan file", kind=PlanError), str(path))


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SharesRow(_Row):
    strategy: Literal["batch", "filter", "channel"]
    shares: list[int]


class _BatchRow(_Row):
    strategy: Literal["batch"]
    shares: list[int]


class _OneRow(_Row):
    strategy: Literal["one"]
    device: int


class _InSharesRow(_Row):
    shares: list[int]
    form: Form = "keep"


_AnyRow = Annotated[_SharesRow | _OneRow, Field(discriminator="strategy")]


class _PlanFile(_Row):
    format: Literal[1]
    name: str
    model: str
    devices: int = Field(ge=1, le=2**200)
    batch: int = Field(ge=1, le=2**200)
    reduce: Sum
    wire: CommDtype = "exact"
    pieces: int = 1
    otherwise: Annotated[_BatchRow | _OneRow, Field(discriminator="strategy")]
    layers: dict[str, _AnyRow] = Field(default_factory=dict)
    in_shares: dict[str, _InSharesRow] = Field(default_factory=dict)
    outputs: OutputPlace = "everywhere"


_BY_NAME: Mapping[str, type[Batch] | type[Filter] | type[Channel]] = {
    "batch": Batch,
    "filter": Filter,
    "channel": Channel,
}


def _table(key: str, lines: list[str]) -> str:
    body = ",\n".join(lines)
    return f'  "{key}": ' + "{" + (f"\n{body}\n  " if lines else "") + "}"


def _as_row(strategy: Strategy) -> dict[str, Any]:
    if isinstance(strategy, One):
        return {"strategy": "one", "device": strategy.device}
    return {"strategy": strategy.name, "shares": list(strategy.shares)}


def _from_row(row: _SharesRow | _BatchRow | _OneRow) -> Strategy:
    if isinstance(row, _OneRow):
        return One(row.device)
    return _BY_NAME[row.strategy](tuple(row.shares))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; JSON itself would silently keep the last of two layers of one name."""
    counts = Counter(key for key, _ in pairs)
    if doubled := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"the key {shown(doubled[0])} stands there twice")
    return dict(pairs)


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"]) or "the file"
    if fault["type"] == "extra_forbidden":
        return f"unknown key {shown(where)}: remove it, or use the version of Convoy that wrote it"
    if fault["type"] == "missing":
        return f"the key {where!r} is missing: add it or make the plan anew"
    return f"{where}: {fault['msg']} (found {shown(fault['input'])}): correct it or make the plan anew"
