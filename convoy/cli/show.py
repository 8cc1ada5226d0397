"""Prints the plan of a training and its changes."""

from collections.abc import Callable
from typing import Any

from convoy.config.settings import Settings
from convoy.plan.compile import compile_all
from convoy.plan.device_program import program_lines
from convoy.plan.explain import layer_rows, step_lines, work_shares
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO
from convoy.plan.steps import micro_batches
from convoy.planner.prediction import working
from convoy.report.screen import Screen
from convoy.runlog.observers import StepTimer
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.autotune import is_end
from convoy.train.rebalance import Decision, Reshard


def show_plan(settings: Settings, part: Distributed, screen: Screen) -> None:
    """Print who computes each layer; with `--explain`, also every step and device program."""
    plan, graph, steps = part.plan, part.traced[True].graph, part.steps(settings.pass_batch)
    idle = [str(d) for d in range(plan.devices) if d not in working(plan, graph)]
    if settings.plan == AUTO and idle:
        screen.line(f"auto leaves device{'s' * (len(idle) > 1)} {', '.join(idle)} idle: a step takes less time so.")
    screen.plan(plan, layer_rows(plan, graph), work_shares(steps, graph))
    if settings.explain:
        steps = lower(plan, graph, micro_batch=[*micro_batches(settings.passes)][-1])
        screen.lines(step_lines(steps))
        for program in compile_all(steps, graph):
            screen.lines(program_lines(program))
    if settings.passes > 1:
        first, middle, last = (
            sum(lower(plan, graph, micro_batch=kind).traffic().values()) for kind in ("first", "middle", "last")
        )
        before = f"each before it {first:,}" if first == middle else f"the first {first:,}, which gathers weights"
        if first != middle and settings.passes > 2:
            before += f", each between {middle:,}"
        screen.line(
            f"A step of {settings.batch} samples has {settings.passes} micro-batches of {settings.pass_batch}; gradients "
            f"are all-reduced in the last, which sends {last:,} bytes, {before}."
        )


def show_new_plan(part: Distributed, shown: Plan, screen: Screen) -> None:
    """Print the chosen plan if it is another than the one shown before."""
    plan, graph = part.plan, part.traced[True].graph
    if plan != shown:
        screen.plan(plan, layer_rows(plan, graph), work_shares(lower(plan, graph), graph), part.group.ids)


def decision_reporter(
    screen: Screen,
    timer: StepTimer,
    log_of: Callable[[], RunLog | None],
    predict: Callable[[Plan, RunLog, bool], Any],
    on_chosen: Callable[[], None] = lambda: None,
) -> Callable[[int, Decision], None]:
    """Return a function that prints and logs a change of the plan and its reason.

    Args:
        on_chosen: called when one of several plans has been chosen.
    """

    def report(step: int, decision: Decision) -> None:
        screen.lines([f"  step {step}: {decision.reason}"])
        if is_end(decision):
            on_chosen()
        if (log := log_of()) is not None and isinstance(decision, Reshard):
            log.reshard(step, decision)
            predict(decision.plan, log, bool(decision.changes))
        timer.restart()

    return report
