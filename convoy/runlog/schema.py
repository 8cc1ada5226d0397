"""Lines of a run log, one model per kind: the writer fills them, the reader validates them.

A log has one JSON object per line. A resumed run appends another "run" line and continues. Readers skip kinds and fields
that they do not know. docs/reference/files.md lists the fields.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

Number = Annotated[float | None, BeforeValidator(lambda v: v if not isinstance(v, float) or math.isfinite(v) else None)]
"""A number; None if it is unknown or not finite, because JSON has no NaN."""

Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False)


class RunLine(_Model):
    """Settings and versions of a run; `from_step` is above 0 if it was resumed, `modes` are torch's global settings."""

    what: Literal["run"] = "run"
    date: str
    convoy: str
    torch: str
    python: str
    machine: str
    system: str
    from_step: Count = 0
    options: dict[str, Any]
    sources: dict[str, str] = {}
    modes: dict[str, str] = {}
    images: Count | None = None
    epoch_steps: Count | None = None


class DeviceEntry(_Model):
    """A device; `samples_per_s` is its measured solo throughput."""

    name: str
    host: str
    slowdown: Rate
    samples_per_s: Number


class FleetLine(_Model):
    """The devices in order. A device keeps its id for the whole job; old logs have no ids."""

    what: Literal["fleet"] = "fleet"
    devices: tuple[DeviceEntry, ...]
    ids: tuple[Count, ...] = ()


class LayerEntry(_Model):
    """The split of a layer, as in `convoy.plan.text.LayerRow`. `bytes` are sent for it per micro-batch."""

    layer: str
    kind: str
    strategy: str
    parts: tuple[str, ...]
    note: str
    flop: Count
    bytes: Count = 0

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, fields: Any) -> Any:
        """Add up the bytes of old logs, which listed gradient sums and moves separately."""
        if isinstance(fields, dict) and "sum_bytes" in fields:
            return {"bytes": fields["sum_bytes"] + sum(move["bytes"] for move in fields.get("moves", ()))} | fields
        return fields


class PlanEntry(_Model):
    """The main fields of a plan; the log keeps every field of the plan file."""

    model_config = ConfigDict(extra="allow")
    name: str
    devices: Count
    batch: Count
    reduce: str
    wire: str


class PlanLine(_Model):
    """The plan of a run from its start or resume; `work` is each device's fraction of the forward FLOP.

    `inexact`: why the loss curve differs from that of one device; empty if it does not.
    """

    what: Literal["plan"] = "plan"
    plan: PlanEntry
    inexact: str = ""
    layers: tuple[LayerEntry, ...]
    work: tuple[Rate, ...]


class MicroBatchEntry(_Model):
    """Predicted seconds of one micro-batch, and of each device's computing and exchanging in it."""

    s: Annotated[float, Field(gt=0)]
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]


EventRow = tuple[Count, str, str, float, float, int, Count]
"""Device, activity, label, start and end in seconds, peer (-1: none), bytes; see `convoy.simulate.events.Event`."""


class PredictionLine(_Model):
    """The predicted step of the current plan.

    Nine of ten measured steps lie between step_s / spread and step_s * spread. `shares_only`: rebalancing changed the shares;
    otherwise the planner chose the plan.
    """

    what: Literal["prediction"] = "prediction"
    step_s: float
    samples_per_s: Rate
    limit_samples_per_s: Rate
    bound: str
    names: tuple[str, ...]
    one_pass: MicroBatchEntry = Field(alias="pass")
    events: tuple[EventRow, ...]
    spread: Annotated[float, Field(ge=1)] = 1.0
    shares_only: bool = False
    joules_per_image: Number = None


class StepLine(_Model):
    """One step: training loss of the global batch, seconds since the log was opened, learning rate."""

    what: Literal["step"] = "step"
    step: Count
    epoch: Count
    loss: Number
    samples: Count
    s: float
    lr: Number = None


class EvaluationLine(_Model):
    what: Literal["evaluation"] = "evaluation"
    step: Count
    epoch: Count
    accuracy: Number
    best: bool


class EpochLine(_Model):
    what: Literal["epoch"] = "epoch"
    epoch: Count
    loss: Number
    accuracy: Number
    train_s: float
    samples_per_s: Rate
    lr: Number


class UtilizationLine(_Model):
    """Each device's seconds by activity, summed over the timed steps of an epoch."""

    what: Literal["busy"] = "busy"
    epoch: Count
    steps: Count
    wall_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    ids: tuple[Count, ...] = ()


class SystemLine(_Model):
    """Resources that each device's process used since the previous line, after `step` steps.

    Watts and joules include evaluation, and are None if they are not measured; `joules_by` names the source or the reason.
    `rejected` counts all connections without the job's key so far.
    """

    what: Literal["system"] = "system"
    step: Count
    s: float
    cores: tuple[Number, ...]
    host_processor: tuple[Number, ...]
    memory_bytes: tuple[Count, ...]
    accelerator_bytes: tuple[Count | None, ...]
    sent_bytes_per_s: tuple[Rate, ...]
    received_bytes_per_s: tuple[Rate, ...]
    power_w: tuple[Number, ...] = ()
    joules: tuple[Number, ...] = ()
    joules_by: tuple[str, ...] = ()
    samples: Count = 0
    rejected: tuple[Count, ...] = Field((), validation_alias=AliasChoices("rejected", "strangers"))  # old logs
    ids: tuple[Count, ...] = ()

    @property
    def by_id(self) -> dict[str, dict[int, float]]:
        """Return the known values of each resource by field name and device id."""
        fields = self.model_dump(exclude={"what", "step", "s", "joules", "joules_by", "samples", "rejected", "ids"})
        return {
            name: {d: v for d, v in zip(self.ids or range(len(values)), values, strict=True) if v is not None}
            for name, values in fields.items()
            if values
        }


class ReshardLine(_Model):
    """New shares or another plan, from the step after `step`."""

    what: Literal["reshare"] = "reshare"
    step: Count
    reason: str
    plan: dict[str, Any] = {}
    layers: tuple[LayerEntry, ...] = ()
    work: tuple[Rate, ...] = ()


class MembersLine(_Model):
    """The devices that train after `step` steps, after some left or joined. Earlier lines of later steps are invalid."""

    what: Literal["members"] = "members"
    step: Count
    devices: tuple[Count, ...]
    reason: str


class DeviceLine(_Model):
    """Totals of one device; `wall_s` includes evaluation, and is None in old logs."""

    what: Literal["device"] = "device"
    device: Count
    slowdown: Rate
    speed_share: Rate
    work_share: Rate
    compute_s: float
    exchange_s: float
    sent_bytes: Count
    wall_s: float | None = None


class EndLine(_Model):
    """The end of a finished training, with its median step."""

    what: Literal["end"] = "end"
    step_s: Number


Line = (
    RunLine | FleetLine | PlanLine | PredictionLine | StepLine | EvaluationLine | EpochLine | UtilizationLine | SystemLine
    | ReshardLine | MembersLine | DeviceLine | EndLine
)  # fmt: skip
KINDS = {line.model_fields["what"].default for line in Line.__args__}
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="what")])
