"""The lines of a run log: one model per kind of line, which the writer fills and the reader validates.

A log is a file of JSON objects, one per line. The first four kinds stand at its beginning, "device" and "end" at its end.
A run that is resumed appends to its log, from another "run" line on. A reader skips kinds and fields that it does not know.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
"""None where it is not known or not finite, such as the loss of a training that diverged: JSON has no NaN."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class RunLine(_Model):
    """What runs, where, with which versions; `from_step` is above 0 where the run was resumed."""

    what: Literal["run"] = "run"
    date: str
    convoy: str
    torch: str
    python: str
    machine: str
    system: str
    from_step: int = 0
    options: dict[str, Any]
    sources: dict[str, str] = {}
    images: int | None = None
    epoch_steps: int | None = None


class DeviceEntry(_Model):
    """A device of the fleet; `samples_per_s` alone with the whole batch, None where that was not measured."""

    name: str
    host: str
    slowdown: float
    samples_per_s: Number


class FleetLine(_Model):
    """The devices, in order."""

    what: Literal["fleet"] = "fleet"
    devices: tuple[DeviceEntry, ...]


class MoveEntry(_Model):
    """A value that changes its layout: bytes of it and, on the way back, of its gradient, in one pass."""

    value: str
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    bytes: int


class LayerEntry(_Model):
    """Who computes what of a layer; `parts` and `strategy` as in `convoy.plan.explain.LayerRow`.

    Attributes:
        moves: of the values that this layer is the first to read.
        sum_bytes: of gradient sums and batch norm statistics, in one pass.
    """

    layer: str
    kind: str
    strategy: str
    parts: tuple[str, ...]
    note: str
    flop: int
    moves: tuple[MoveEntry, ...]
    sum_bytes: int


class PlanEntry(_Model):
    """What a page tells of a plan; the log holds all of the plan file."""

    model_config = ConfigDict(extra="allow")
    name: str
    devices: int
    batch: int
    reduce: str
    wire: str


class PlanLine(_Model):
    """The plan at the beginning.

    Attributes:
        outputs: moves of the model's outputs, for the loss.
        work: the part of the forward FLOP that each device computes.
        inexact: why the plan does not follow the training of one device; empty where it does.
    """

    what: Literal["plan"] = "plan"
    plan: PlanEntry
    inexact: str = ""
    layers: tuple[LayerEntry, ...]
    outputs: tuple[MoveEntry, ...]
    work: tuple[float, ...]


class PassEntry(_Model):
    """One pass of the batch as the simulator predicts it; seconds of each device."""

    s: float = Field(gt=0)
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]


Event = tuple[int, str, str, float, float, int, int]
"""Device, activity, label, start and end in seconds, peer (-1: none), bytes; of `convoy.simulator.events.Event`."""


class PredictionLine(_Model):
    """What the plan that now runs is predicted to reach, with the times that were measured before the training.

    Attributes:
        shares_only: of other shares that rebalancing chose; else of a plan that the planner chose.
    """

    what: Literal["prediction"] = "prediction"
    step_s: float
    samples_per_s: float
    limit_samples_per_s: float
    bound: str
    names: tuple[str, ...]
    one_pass: PassEntry = Field(alias="pass")
    events: tuple[Event, ...]
    shares_only: bool = False


class StepLine(_Model):
    """One step: its loss over the whole batch, the seconds since the log was opened, its learning rate."""

    what: Literal["step"] = "step"
    step: int
    epoch: int
    loss: Number
    samples: int
    s: float
    lr: Number = None


class EvaluationLine(_Model):
    """A test after so many steps; accuracy from 0 to 1."""

    what: Literal["evaluation"] = "evaluation"
    step: int
    epoch: int
    accuracy: Number
    best: bool


class EpochLine(_Model):
    """An epoch, as `convoy.train.loop.EpochResult`."""

    what: Literal["epoch"] = "epoch"
    epoch: int
    loss: Number
    accuracy: Number
    train_s: float
    samples_per_s: float
    lr: float


class UtilizationLine(_Model):
    """Seconds of each device in so many steps of an epoch. Logs call it "busy"."""

    what: Literal["busy"] = "busy"
    epoch: int
    steps: int
    wall_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]


class ReshareLine(_Model):
    """Other shares, or another plan, from the step after this one on."""

    what: Literal["reshare"] = "reshare"
    step: int
    reason: str
    plan: dict[str, Any] = {}
    layers: tuple[LayerEntry, ...] = ()
    outputs: tuple[MoveEntry, ...] = ()
    work: tuple[float, ...] = ()


class DeviceLine(_Model):
    """What one device did in the whole training: its part of the fleet's speed and of the arithmetic, its seconds, the
    bytes that it sent."""

    what: Literal["device"] = "device"
    device: int
    slowdown: float
    speed_share: float
    work_share: float
    compute_s: float
    exchange_s: float
    sent_bytes: int


class EndLine(_Model):
    """The training is over; `step_s` is the median of a step."""

    what: Literal["end"] = "end"
    step_s: Number


Line = (
    RunLine
    | FleetLine
    | PlanLine
    | PredictionLine
    | StepLine
    | EvaluationLine
    | EpochLine
    | UtilizationLine
    | ReshareLine
    | DeviceLine
    | EndLine
)
KINDS = {line.model_fields["what"].default for line in Line.__args__}
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="what")])
