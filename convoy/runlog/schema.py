"""Lines of a run log, one model per kind: the writer fills them, the reader validates them.

A log has one JSON object per line. A resumed run appends another "run" line and continues. Readers skip kinds and fields
that they do not know. docs/reference/files.md lists the fields.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

Number = Annotated[float | None, BeforeValidator(lambda v: v if not isinstance(v, float) or math.isfinite(v) else None)]
"""None if unknown or not finite, such as the loss of a diverged training: JSON has no NaN."""

Seconds = float
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
    """The devices in order. A device keeps its id for the whole job. Old logs have no ids, here and below."""

    what: Literal["fleet"] = "fleet"
    devices: tuple[DeviceEntry, ...]
    ids: tuple[Count, ...] = ()


class MoveEntry(_Model):
    """A tensor that changes its layout, and the bytes that this sends per micro-batch, forward and backward."""

    value: str
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    bytes: Count


class LayerEntry(_Model):
    """The split of a layer, as in `convoy.plan.explain.LayerRow`, and the moves of the tensors that it reads first.

    `sum_bytes` are sent per micro-batch for gradient sums and batch norm statistics.
    """

    layer: str
    kind: str
    strategy: str
    parts: tuple[str, ...]
    note: str
    flop: Count
    moves: tuple[MoveEntry, ...]
    sum_bytes: Count


class PlanEntry(_Model):
    """The main fields of a plan; the log keeps every field of the plan file."""

    model_config = ConfigDict(extra="allow")
    name: str
    devices: Count
    batch: Count
    reduce: str
    wire: str


class PlanLine(_Model):
    """The plan of a run from its start or resume.

    Attributes:
        inexact: why the loss curve differs from that of one device; empty if it does not.
        outputs: moves of the model's outputs, for the loss function.
        work: each device's share of the forward FLOP.
    """

    what: Literal["plan"] = "plan"
    plan: PlanEntry
    inexact: str = ""
    layers: tuple[LayerEntry, ...]
    outputs: tuple[MoveEntry, ...]
    work: tuple[Rate, ...]


class MicroBatchEntry(_Model):
    """Predicted seconds of one micro-batch, and each device's part of them."""

    s: Annotated[float, Field(gt=0)]
    compute_s: tuple[Seconds, ...]
    exchange_s: tuple[Seconds, ...]


EventRow = tuple[Count, str, str, Seconds, Seconds, int, Count]
"""Device, activity, label, start and end in seconds, peer (-1: none), bytes; see `convoy.simulate.events.Event`."""


class PredictionLine(_Model):
    """The predicted step of the current plan.

    Attributes:
        spread: nine of ten measured steps lie between step_s / spread and step_s * spread; 1 if the log does not say.
        shares_only: rebalancing changed the shares; otherwise the planner chose the plan.
        joules_per_image: None if the fleet has no watts.
    """

    what: Literal["prediction"] = "prediction"
    step_s: Seconds
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
    s: Seconds
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
    train_s: Seconds
    samples_per_s: Rate
    lr: Number


class UtilizationLine(_Model):
    """Each device's seconds in the timed steps of an epoch."""

    what: Literal["busy"] = "busy"
    epoch: Count
    steps: Count
    wall_s: tuple[Seconds, ...]
    compute_s: tuple[Seconds, ...]
    exchange_s: tuple[Seconds, ...]
    ids: tuple[Count, ...] = ()


class SystemLine(_Model):
    """Resources that each device's process used since the previous line, after `step` steps.

    Attributes:
        power_w, joules: measured, evaluation included; None if `joules_by` says that nothing measures them.
        rejected: connections without the job's key that the device has rejected so far; "strangers" in old logs.
    """

    what: Literal["system"] = "system"
    step: Count
    s: Seconds
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
    rejected: tuple[Count, ...] = Field((), validation_alias=AliasChoices("rejected", "strangers"))
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
    outputs: tuple[MoveEntry, ...] = ()
    work: tuple[Rate, ...] = ()


class MembersLine(_Model):
    """Devices left or joined: these train after `step` steps. Later steps in the log are repeated."""

    what: Literal["members"] = "members"
    step: Count
    devices: tuple[Count, ...]
    reason: str


class DeviceLine(_Model):
    """Totals of one device; `wall_s`, evaluation included, is None in old logs."""

    what: Literal["device"] = "device"
    device: Count
    slowdown: Rate
    speed_share: Rate
    work_share: Rate
    compute_s: Seconds
    exchange_s: Seconds
    sent_bytes: Count
    wall_s: Seconds | None = None


class EndLine(_Model):
    """The training is over; `step_s` is the median step."""

    what: Literal["end"] = "end"
    step_s: Number


Line = (
    RunLine | FleetLine | PlanLine | PredictionLine | StepLine | EvaluationLine | EpochLine | UtilizationLine | SystemLine
    | ReshardLine | MembersLine | DeviceLine | EndLine
)  # fmt: skip
KINDS = {line.model_fields["what"].default for line in Line.__args__}
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="what")])
