"""The lines of a run log: one model per kind of line, which the writer fills and the reader validates.

A log is a file of JSON objects, one per line. The first four kinds stand at its beginning, "device" and "end" at its end.
A run that is resumed appends to its log, from another "run" line on. A reader skips kinds and fields that it does not know.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

MOST_NUMBER = 1e150
"""Of what is drawn: differences and squares of larger numbers are no numbers."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, int | float) and not abs(value) <= MOST_NUMBER else value


Number = Annotated[float | None, BeforeValidator(_finite), AfterValidator(_finite)]
"""None where it is not known or not finite, such as the loss of a training that diverged: JSON has no NaN."""

Seconds = Annotated[float, Field(ge=-1e12, le=1e12)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Rate = Annotated[float, Field(ge=0, le=MOST_NUMBER)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class RunLine(_Model):
    """What runs, where, with which versions; `from_step` is above 0 where the run was resumed.

    Attributes:
        modes: how torch computes, by the name of each setting; the same on every device.
    """

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
    """A device of the fleet; `samples_per_s` alone with the whole batch, None where that was not measured."""

    name: str
    host: str
    slowdown: Rate
    samples_per_s: Number


class FleetLine(_Model):
    """The devices, in order.

    Attributes:
        ids: their numbers for as long as the job lasts; empty in old logs.
    """

    what: Literal["fleet"] = "fleet"
    devices: tuple[DeviceEntry, ...]
    ids: tuple[Count, ...] = ()


class MoveEntry(_Model):
    """A value that changes its layout: bytes of it and, on the way back, of its gradient, in one pass."""

    value: str
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    bytes: Count


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
    flop: Count
    moves: tuple[MoveEntry, ...]
    sum_bytes: Count


class PlanEntry(_Model):
    """What a page tells of a plan; the log holds all of the plan file."""

    model_config = ConfigDict(extra="allow")
    name: str
    devices: Count
    batch: Count
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
    work: tuple[Rate, ...]


class PassEntry(_Model):
    """One pass of the batch as the simulator predicts it; seconds of each device."""

    s: Annotated[float, Field(gt=1e-12, le=1e12)]
    compute_s: tuple[Seconds, ...]
    exchange_s: tuple[Seconds, ...]


Event = tuple[Count, str, str, Seconds, Seconds, Annotated[int, Field(ge=-1, le=2**53)], Count]
"""Device, activity, label, start and end in seconds, peer (-1: none), bytes; of `convoy.simulator.events.Event`."""


class PredictionLine(_Model):
    """What the plan that now runs is predicted to reach, with the times that were measured before the training.

    Attributes:
        spread: nine of ten measured steps lie between step_s / spread and step_s * spread; 1 in logs that do not say.
        shares_only: of other shares that rebalancing chose; else of a plan that the planner chose.
        joules_per_image: None where the fleet gives no watts.
    """

    what: Literal["prediction"] = "prediction"
    step_s: Seconds
    samples_per_s: Rate
    limit_samples_per_s: Rate
    bound: str
    names: tuple[str, ...]
    one_pass: PassEntry = Field(alias="pass")
    events: tuple[Event, ...]
    spread: Annotated[float, Field(ge=1, le=1e12)] = 1.0
    shares_only: bool = False
    joules_per_image: Number = None


class StepLine(_Model):
    """One step: its loss over the whole batch, the seconds since the log was opened, its learning rate."""

    what: Literal["step"] = "step"
    step: Count
    epoch: Count
    loss: Number
    samples: Count
    s: Seconds
    lr: Number = None


class EvaluationLine(_Model):
    """A test after so many steps; accuracy from 0 to 1."""

    what: Literal["evaluation"] = "evaluation"
    step: Count
    epoch: Count
    accuracy: Number
    best: bool


class EpochLine(_Model):
    """An epoch, as `convoy.train.observer.EpochResult`."""

    what: Literal["epoch"] = "epoch"
    epoch: Count
    loss: Number
    accuracy: Number
    train_s: Seconds
    samples_per_s: Rate
    lr: Number


class UtilizationLine(_Model):
    """Seconds of each device in so many steps of an epoch. Logs call it "busy".

    Attributes:
        ids: of the devices; empty in old logs.
    """

    what: Literal["busy"] = "busy"
    epoch: Count
    steps: Count
    wall_s: tuple[Seconds, ...]
    compute_s: tuple[Seconds, ...]
    exchange_s: tuple[Seconds, ...]
    ids: tuple[Count, ...] = ()


class SystemLine(_Model):
    """What each device's process used since the line before this one, after so many steps.

    Attributes:
        s: seconds since the training began.
        cores: of the processor, on average.
        host_processor: how busy the whole host was, from 0 to 1.
        memory_bytes: of the process, now; `accelerator_bytes`: of its tensors on an accelerator.
        sent_bytes_per_s, received_bytes_per_s: messages of the training.
        power_w: measured, on average; `joules`: the same as energy. None where `joules_by` says why: what measures, or why
            nothing does. Empty in old logs. Of tests, too, where there were any.
        samples: of the steps since the line before.
        strangers: connections without the job's key that each device has turned away since it joined; empty in old logs.
        ids: of the devices, in the order of all values; empty in old logs.
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
    strangers: tuple[Count, ...] = ()
    ids: tuple[Count, ...] = ()

    @property
    def per_device(self) -> dict[str, tuple[float | None, ...]]:
        """What is known of the devices, by its name."""
        found = self.model_dump(exclude={"what", "step", "s", "joules", "joules_by", "samples", "strangers", "ids"})
        return {name: values for name, values in found.items() if values}


class ReshareLine(_Model):
    """Other shares, or another plan, from the step after this one on."""

    what: Literal["reshare"] = "reshare"
    step: Count
    reason: str
    plan: dict[str, Any] = {}
    layers: tuple[LayerEntry, ...] = ()
    outputs: tuple[MoveEntry, ...] = ()
    work: tuple[Rate, ...] = ()


class MembersLine(_Model):
    """Devices were lost or came: these train from the step after this one on, by the numbers that they had or got when they
    came. What is told by device begins anew; the steps after this one are repeated."""

    what: Literal["members"] = "members"
    step: Count
    devices: tuple[Count, ...]
    reason: str


class DeviceLine(_Model):
    """What one device did in the whole training: its part of the fleet's speed and of the arithmetic, its seconds, the
    bytes that it sent. `wall_s`: from the first step to the end, tests and all; None in old logs."""

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
    | SystemLine
    | ReshareLine
    | MembersLine
    | DeviceLine
    | EndLine
)
KINDS = {line.model_fields["what"].default for line in Line.__args__}
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="what")])
