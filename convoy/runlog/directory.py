"""The folder of a run: its log, its settings, its plan, its fleet and its page.

Every training writes a log. Without `--log` it lies in the folder of the run's checkpoints, so that a resumed run
appends to its log; or else in a folder of its own, made in `runs`, or in the folder that CONVOY_RUNS names.
"""

import datetime
import itertools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from convoy.checkpoint.folder import run_folder
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.settings import NO_LOG, Settings
from convoy.cost.table import Measurement
from convoy.errors import InputError
from convoy.files import unwritable, write_whole
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.predict import PlanningContext, predict_plan
from convoy.runlog.reader import LOG_NAME
from convoy.runlog.rows import fleet_line, prediction_line
from convoy.runlog.writer import RunLog

RUNS = "runs"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run is logged.

    Attributes:
        folder: None where a person named a file for the log: then nothing else is written.
    """

    log: Path
    folder: Path | None = None

    @property
    def run(self) -> Path:
        """What `convoy report` is to be given."""
        return self.folder or self.log


def check_directory(settings: Settings) -> None:
    """Refuse a folder that could not be made, before the training that it is for.

    Raises:
        InputError: the folder cannot be written.
    """
    if settings.log is not None:
        return
    folder = runs_folder() if settings.checkpoint is None else run_folder(settings.checkpoint)
    if why := unwritable(folder):
        raise _unwritable(folder, why)


def make_directory(settings: Settings) -> RunDirectory | None:
    """Make the folder of a run that begins now; None where its settings want no log.

    Raises:
        InputError: the folder cannot be made.
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


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What is known of a run before its first step.

    Attributes:
        devices: of each, what it is, its host, its slow-down.
        measured: the times that the planner planned with, where it did.
        images, steps: of an epoch.
        done: steps that were done before, where the run is resumed.
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
        """The log with its first lines; run.toml, plan.json, fleet.toml where the run has a folder.

        Raises:
            InputError: something cannot be written.
        """
        settings = self.run.settings
        log = stack.enter_context(RunLog(directory.log, self.done, tell))
        log.run(
            settings.model_dump(mode="json") | {"rebalance": settings.rebalances}, sources=dict(self.run.sources),
            images=self.images, epoch_steps=self.steps,
        )  # fmt: skip
        log.write(fleet_line(self.devices, self.speeds))
        log.plan(self.plan, self.graph)
        self.predict(self.plan, log)
        if directory.folder is not None:
            write_whole(directory.folder / "run.toml", to_toml(settings))
            write_whole(directory.folder / "plan.json", self.plan.to_json())
            if self.measured is not None:
                write_whole(directory.folder / "fleet.toml", self.measured.to_toml())
        return log

    def predict(self, plan: Plan, log: RunLog, shares_only: bool = False) -> None:
        """Log what is predicted for a plan, where the times for that are known; `shares_only` as in the line."""
        if self.measured is not None:
            settings = self.run.settings
            context = PlanningContext.of(
                self.graph, plan.batch, self.measured.costs(self.graph), self.measured.fleet,
                settings.optimizer_state, plan.wire, passes=settings.passes,
            )  # fmt: skip
            log.write(prediction_line(predict_plan(plan, context), context, settings.passes, shares_only))


def runs_folder() -> Path:
    """Where runs make their folders."""
    return Path(os.environ.get("CONVOY_RUNS") or RUNS)


def new_folder(net: str) -> Path:
    """A new folder for a run, named for the moment and the net; of several at one moment each gets a number. OSError."""
    runs = runs_folder()
    moment = datetime.datetime.now().strftime("%Y-%m-%d-%H.%M.%S")
    name = f"{moment}-{re.sub('[^A-Za-z0-9]+', '-', net).strip('-')}"
    for number in itertools.count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("there are numbers enough")


def _unwritable(folder: Path, why: str) -> InputError:
    return InputError(f"cannot make the folder {folder} for the log: {why}; give --log FILE, or --log none")
