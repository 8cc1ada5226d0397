"""What a person is told of `convoy train`, and the files that were asked for: plan, changes, the page of the run."""

from collections.abc import Callable
from pathlib import Path

from convoy.config.run_file import to_toml
from convoy.config.settings import Settings
from convoy.files import write_whole
from convoy.plan.compile import compile_all
from convoy.plan.device_program import program_lines
from convoy.plan.explain import layer_rows, step_lines, work_shares
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO
from convoy.plan.steps import passes_of
from convoy.planner.predict import working
from convoy.report.screen import Screen
from convoy.runlog.observers import StepTimer
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.autotune import is_end
from convoy.train.rebalance import Decision, Reshare


def write_page(folder: Path) -> str:
    from convoy.report.page import write_report  # with what fills in pages, after the training

    return str(write_report(folder))


def planning_title(settings: Settings) -> str:
    if settings.plan != AUTO:
        return "every device times the model's layers"
    return "the devices are measured and planned for" if settings.fleet is None else "the planner reads the fleet"


def show_plan(settings: Settings, part: Distributed, screen: Screen) -> None:
    plan, graph, steps = part.plan, part.traced[True].graph, part.steps(settings.pass_batch)
    idle = [str(d) for d in range(plan.devices) if d not in working(plan, graph)]
    if settings.plan == AUTO and idle:
        screen.lines(
            [f"auto gives device{'s' * (len(idle) > 1)} {', '.join(idle)} nothing to compute: it is faster so."]
        )
    screen.plan(plan, layer_rows(plan, graph), work_shares(steps, graph))
    if settings.explain:
        steps = lower(plan, graph, pass_=[*passes_of(settings.passes)][-1])
        screen.lines(step_lines(steps))
        for program in compile_all(steps, graph):
            screen.lines(program_lines(program))
    if settings.passes > 1:
        sent = [sum(lower(plan, graph, pass_=kind).traffic().values()) for kind in ("first", "middle", "last")]
        before = (
            f"each pass before it {sent[0]:,}"
            if sent[0] == sent[1]
            else f"the first {sent[0]:,}, which gathers weights"
        )
        before += f", each between {sent[1]:,}" * (sent[0] != sent[1] and settings.passes > 2)
        screen.lines(
            [
                f"A step of {settings.batch} samples is {settings.passes} passes of {settings.pass_batch}; gradients are "
                f"summed in the last, which sends {sent[2]:,} bytes, {before}."
            ]
        )


def show_new_plan(part: Distributed, shown: Plan, screen: Screen) -> None:
    """The table of the plan that goes on, where it is not the one that was shown: shares change from its own."""
    plan, graph = part.plan, part.traced[True].graph
    if plan != shown:
        screen.plan(plan, layer_rows(plan, graph), work_shares(lower(plan, graph), graph), part.group.ids)


def save_files(settings: Settings, plan: Plan) -> None:
    """What was asked for as files, before the training that they are for."""
    if settings.save_run is not None:
        write_whole(settings.save_run, to_toml(settings))
    if settings.save_plan is not None:
        write_whole(settings.save_plan, plan.to_json())


def teller(
    screen: Screen,
    timer: StepTimer,
    log_of: Callable[[], RunLog | None],
    predict: Callable[[Plan, RunLog, bool], None],
    on_chosen: Callable[[], None] = lambda: None,
) -> Callable[[int, Decision], None]:
    """Says what was changed and why, on the screen and in the log; `on_chosen` when one of several plans goes on."""

    def tell(step: int, decision: Decision) -> None:
        screen.lines([f"  step {step}: {decision.reason}"])
        if is_end(decision):
            on_chosen()
        if (log := log_of()) is not None and isinstance(decision, Reshare):
            log.reshare(step, decision)
            predict(decision.plan, log, bool(decision.changes))
        timer.restart()

    return tell
