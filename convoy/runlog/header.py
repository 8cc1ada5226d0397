"""What is written down of a run before its first step: in its log, and as files beside it that a person can run again."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from convoy.app.auto import Chosen
from convoy.config.files import write_whole
from convoy.config.run_file import Run, to_toml
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.predict import Outlook, prospect
from convoy.runlog.directory import Place
from convoy.runlog.values import fleet_fields, prediction_fields
from convoy.runlog.writer import RunLog


@dataclass(frozen=True, slots=True)
class Beginning:
    """A run as it begins.

    Attributes:
        devices: of each, what it is, its host, its slow-down.
        chosen: where the planner chose the plan.
        images, steps: of an epoch.
        done: steps that were done before, where the run goes on.
    """

    run: Run
    devices: Sequence[tuple[str, str, float]]
    speeds: Speeds
    plan: Plan
    graph: Graph
    chosen: Chosen | None
    images: int
    steps: int
    done: int = 0

    def predict(self, plan: Plan, log: RunLog) -> None:
        """Write down what is predicted for a plan, where the times for that are known."""
        settings, measured = self.run.settings, self.chosen.measured if self.chosen is not None else None
        if measured is None:
            return
        outlook = Outlook.of(
            self.graph, plan.batch, measured.costs(self.graph), measured.fleet, settings.optimizer_state, plan.wire
        )
        log.write("prediction", **prediction_fields(prospect(plan, outlook), outlook, settings.accumulate))


def open_log(place: Place, beginning: Beginning, lr: Callable[[], float], stack: ExitStack) -> RunLog:
    """The log with its first lines, and run.toml, plan.json, fleet.toml where the run has a folder.

    Raises:
        InputError: something cannot be written.
    """
    settings, chosen, plan = beginning.run.settings, beginning.chosen, beginning.plan
    log = stack.enter_context(RunLog(place.log, beginning.done, lr))
    rebalances = settings.rebalances(device for device, _, _ in beginning.devices)
    log.run(
        settings.model_dump(mode="json") | {"rebalance": rebalances}, sources=dict(beginning.run.sources),
        images=beginning.images, epoch_steps=beginning.steps,
    )  # fmt: skip
    log.write("fleet", **fleet_fields(beginning.devices, beginning.speeds, measured=settings.speeds is None))
    log.plan(plan, beginning.graph)
    beginning.predict(plan, log)
    measured = chosen.measured if chosen is not None else None
    if place.folder is not None:
        write_whole(place.folder / "run.toml", to_toml(settings))
        write_whole(place.folder / "plan.json", plan.to_json())
        if measured is not None:
            write_whole(place.folder / "fleet.toml", measured.to_toml())
    return log
