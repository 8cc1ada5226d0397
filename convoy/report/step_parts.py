"""What a predicted step is made of on the device that ends last, beside the same parts of the lower bound."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from convoy.cost.network import Network
from convoy.planner.bound import LowerBound
from convoy.planner.predict import PlanningContext, PlanPrediction
from convoy.report.intervals import kind_of
from convoy.report.numbers import percent, seconds
from convoy.report.screen import new_table
from convoy.simulator.events import Event, Timeline
from convoy.simulator.price import LOSS

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one device, of which each counts once, for the first of these that is true of it.

    Attributes:
        layers_s: it computes a layer.
        optimizer_s: it updates weights.
        loss_s: it computes the loss.
        handling_s: it copies, adds or begins messages, or fetches a batch.
        wire_s: it does nothing, and a message that it sends or receives is on the wire.
        latency_s: it does nothing, and such a message has set out; nothing of it has come.
        others_s: it does nothing, and waits for others to compute, or to come to their part of an exchange.
    """

    device: int
    layers_s: float
    optimizer_s: float
    loss_s: float
    handling_s: float
    wire_s: float
    latency_s: float
    others_s: float

    @property
    def step_s(self) -> float:
        return self.layers_s + self.optimizer_s + self.loss_s + self.handling_s + self.waits_s

    @property
    def waits_s(self) -> float:
        return self.wire_s + self.latency_s + self.others_s


def step_parts(timeline: Timeline, network: Network) -> StepParts:
    """Of the device that ends last; where several do, of the one that computes longest."""
    ends_s = [0.0] * len(timeline.compute_s)
    for event in timeline.events:
        ends_s[event.device] = max(ends_s[event.device], event.end_s)
    last = max(range(len(ends_s)), key=lambda d: (ends_s[d], timeline.compute_s[d]))
    mine = [event for event in timeline.events if event.device == last]
    spans: dict[str, list[Span]] = {}
    for event in mine:
        if event.activity != "wait":
            kind = LOSS if event.label == LOSS else kind_of(event.activity, event.label)
            spans.setdefault(kind, []).append((event.start_s, event.end_s))
    wire = [*spans.get("send", ()), *spans.get("receive", ())]
    found, covered, before_s = [], list[Span](), 0.0
    rows = (
        [*spans.get("forward", ()), *spans.get("backward", ())], spans.get("optimizer", ()), spans.get(LOSS, ()),
        spans.get("handling", ()), wire, [_setting_out(event, network) for event in mine if event.peer >= 0],
    )  # fmt: skip
    for row in rows:
        covered = _merged([*covered, *row])
        total_s = sum(end - start for start, end in covered)
        found.append(total_s - before_s)
        before_s = total_s
    found.append(max(0.0, timeline.step_s - before_s))
    return StepParts(last, *found)


def _setting_out(event: Event, network: Network) -> Span:
    ends = (event.device, event.peer) if event.activity == "send" else (event.peer, event.device)
    return max(0.0, event.start_s - network.latency_s[ends[0]][ends[1]]), event.start_s


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def show_step_parts(console: Console, row: PlanPrediction, least: LowerBound, context: PlanningContext) -> None:
    """A row for each part of the step, with the same part of the bound, and what is beyond it."""
    parts = step_parts(row.timeline, context.costs.network)
    step = "A step" if context.passes == 1 else "The last pass of a step"
    title = f"{step} of {row.plan.name} on {context.names[parts.device]}, which ends last"
    table = new_table(title, ("part",), ("takes", "of the step", "at least", "beyond"))
    waits = least.step_s - least.compute_s
    rows: Sequence[tuple[str, float, float | None]] = (
        ("layers", parts.layers_s, least.layers_s),
        ("optimizer", parts.optimizer_s, least.updates_s),
        ("loss", parts.loss_s, least.loss_s),
        ("copies, calls and the batch", parts.handling_s, least.apart_s),
        ("waiting", parts.waits_s, waits),
        ("  messages on the wire", parts.wire_s, None),
        ("  their latency", parts.latency_s, None),
        ("  for what others do", parts.others_s, None),
        ("all", parts.step_s, least.step_s),
    )
    for words, taken_s, least_s in rows:
        beyond = "" if least_s is None else _signed(taken_s - least_s)
        at_least = "" if least_s is None else seconds(least_s)
        table.add_row(words, seconds(taken_s), percent(taken_s / parts.step_s), at_least, beyond)
    console.print(table)


def _signed(value_s: float) -> str:
    return ("-" if value_s < 0 else "+") + seconds(abs(value_s))
