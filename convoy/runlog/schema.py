"""The lines of a log, as values that were checked."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RunLine(_Line):
    """What runs, where, with which versions; `from_step` is above 0 where the run goes on."""

    what: Literal["run"]
    date: str
    convoy: str
    torch: str
    python: str
    machine: str
    system: str
    from_step: int = 0
    images: int | None = None
    epoch_steps: int | None = None
    options: dict[str, Any]
    sources: dict[str, str] = {}


class DeviceRow(_Line):
    name: str
    host: str
    slowdown: float
    samples_per_s: float | None


class FleetLine(_Line):
    what: Literal["fleet"]
    devices: list[DeviceRow]


class MoveRow(_Line):
    """A value that comes into another layout: bytes there and, of its gradient, back, in one pass."""

    model_config = ConfigDict(populate_by_name=True)
    value: str
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    bytes: int


class LayerLine(_Line):
    layer: str
    kind: str
    strategy: str
    parts: list[str]
    note: str
    flop: int
    moves: list[MoveRow]
    sum_bytes: int


class PlanRow(_Line):
    name: str
    devices: int
    batch: int
    reduce: str
    wire: str


class PlanLine(_Line):
    what: Literal["plan"]
    plan: PlanRow
    layers: list[LayerLine]
    outputs: list[MoveRow]
    work: list[float]
    inexact: str = ""


class Pass(_Line):
    """One pass of the batch as the simulator predicts it; seconds of each device."""

    s: float = Field(gt=0)
    compute_s: list[float]
    exchange_s: list[float]


class PredictionLine(_Line):
    what: Literal["prediction"]
    step_s: float
    samples_per_s: float
    limit_samples_per_s: float
    bound: str
    names: list[str]
    one_pass: Pass = Field(alias="pass")
    events: list[tuple[int, str, str, float, float, int, int]]


class StepLine(_Line):
    what: Literal["step"]
    step: int
    epoch: int
    loss: float | None
    samples: int
    s: float
    lr: float | None = None


class EvaluationLine(_Line):
    what: Literal["evaluation"]
    step: int
    epoch: int
    accuracy: float | None
    best: bool


class EpochLine(_Line):
    what: Literal["epoch"]
    epoch: int
    loss: float | None
    accuracy: float | None
    train_s: float
    samples_per_s: float
    lr: float


class BusyLine(_Line):
    """Seconds of each device in so many steps."""

    what: Literal["busy"]
    epoch: int
    steps: int
    wall_s: list[float]
    compute_s: list[float]
    exchange_s: list[float]


class ReshareLine(_Line):
    what: Literal["reshare"]
    step: int
    reason: str
    layers: list[LayerLine] = []
    outputs: list[MoveRow] = []
    work: list[float] = []


class EndLine(_Line):
    what: Literal["end"]
    step_s: float | None


Line = (
    RunLine
    | FleetLine
    | PlanLine
    | PredictionLine
    | StepLine
    | EvaluationLine
    | EpochLine
    | BusyLine
    | ReshareLine
    | EndLine
)
KNOWN = {line.model_fields["what"].annotation.__args__[0] for line in Line.__args__}
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="what")])
