"""The folder of a run, with its log, settings, plan and fleet.

Every training writes a log: with `--checkpoint` into that folder, so that a resumed run appends to its log; otherwise
into a new folder in `runs`, or in the folder that CONVOY_RUNS names.
"""

import datetime
import itertools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from convoy.checkpoint.run_folder import run_folder
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.settings import NO_LOG, Settings
from convoy.errors import InputError
from convoy.files import unwritable, write_whole
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.runlog.reader import LOG_NAME
from convoy.runlog.writer import RunLog
from convoy.simulate.table import Measurement


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run is logged. `folder` is None if the user named a log file: then nothing else is written."""

    log: Path
    folder: Path | None = None

    @property
    def run(self) -> Path:
        """The argument for `convoy report`."""
        return self.folder or self.log


def check_directory(settings: Settings) -> None:
    """Raise InputError if :func:`make_directory` would fail."""
    if settings.log is None:
        folder = runs_folder() if settings.checkpoint is None else run_folder(settings.checkpoint)
        if why := unwritable(folder):
            raise _unwritable(folder, why)


def make_directory(settings: Settings) -> RunDirectory | None:
    """Create the folder of a new run; return None if its settings want no log.

    Raises:
        InputError: the folder cannot be created.
    """
    if settings.log is not None:
        return None if settings.log == NO_LOG else RunDirectory(settings.log)
    try:
        if settings.checkpoint is None:
            folder = new_folder(settings.net)
        else:
            folder = run_folder(settings.checkpoint)
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(Path(error.filename), str(error.strerror)) from None
    return RunDirectory(folder / LOG_NAME, folder)


def _unwritable(folder: Path, why: str) -> InputError:
    return InputError(f"cannot make the folder {folder} for the log: {why}; give --log FILE, or --log none")


def runs_folder() -> Path:
    return Path(os.environ.get("CONVOY_RUNS") or "runs")


def new_folder(net: str) -> Path:
    """Create a folder named for the time and the net, with a number if that name is taken. Raises OSError."""
    time = datetime.datetime.now().strftime("%Y-%m-%d-%H.%M.%S")
    name = f"{time}-{re.sub('[^A-Za-z0-9]+', '-', net).strip('-')}"
    for number in itertools.count(1):
        folder = runs_folder() / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What is known of a run before its first step.

    Attributes:
        devices: kind, host and slowdown of each.
        measured: the times that the planner used; None if it did not measure.
        images, steps: per epoch.
        done: steps done before, if the run is resumed.
    """

    run: RunSettings
    devices: Sequence[tuple[str, str, float]]
    speeds: Speeds
    plan: Plan
    graph: Graph
    measured: Measurement | None
    images: int
    steps: int
    done: int = 0

    def open_log(self, directory: RunDirectory, tell: Callable[[str], None], stack: ExitStack) -> RunLog:
        """Open the log and write its first lines; if the run has a folder, also run.toml, plan.json and fleet.toml.

        Raises:
            InputError: a file cannot be written.
        """
        log = stack.enter_context(RunLog(directory.log, self.done, tell))
        self.write_run(log)
        log.fleet(self.devices, self.speeds)
        log.plan(self.plan, self.graph)
        self.predict(self.plan, log)
        if directory.folder is not None:
            write_whole(directory.folder / "run.toml", to_toml(self.run.settings))
            write_whole(directory.folder / "plan.json", self.plan.to_json())
            if self.measured is not None:
                write_whole(directory.folder / "fleet.toml", self.measured.to_toml())
        return log

    def write_run(self, log: RunLog) -> None:
        settings = self.run.settings
        options = settings.model_dump(mode="json") | {"rebalance": settings.rebalances}
        log.run(options, sources=dict(self.run.sources), images=self.images, epoch_steps=self.steps)

    def predict(self, plan: Plan, log: RunLog, shares_only: bool = False) -> None:
        """Log the prediction for a plan if the devices were measured; `shares_only` as in `PredictionLine`."""
        if self.measured is not None:
            settings = self.run.settings
            request = PlanRequest(
                self.graph, plan.batch, FleetKnowledge(measured=self.measured),
                optimizer=settings.optimizer_state, wire=plan.wire, micro_batches=settings.passes,
            )  # fmt: skip
            log.prediction(predict_plan(plan, request), request, shares_only)
