"""Creates the folder of a run, with its log, settings, plan and fleet.

With `--checkpoint` it is that folder, so that a resumed run appends to its log. Otherwise it is a new folder in `runs`, or in
the folder that CONVOY_RUNS names.
"""

import datetime
import itertools
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from convoy.checkpoint.run_folder import run_folder
from convoy.config.run_file import to_toml
from convoy.config.train_options import NO_LOG, Settings
from convoy.errors import InputError
from convoy.files import unwritable, write_whole
from convoy.plan.plan import Plan
from convoy.runlog.reader import LOG_NAME
from convoy.simulate.table import Measurement


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run's log and folder. `folder` is None with --log FILE, which writes only the log."""

    log: Path
    folder: Path | None = None

    @property
    def run(self) -> Path:
        """The argument for `convoy report`."""
        return self.folder or self.log


def paths_of(directory: RunDirectory | None) -> list[str | None] | None:
    """Return log and folder as JSON for all devices: any of them may have to continue the log."""
    if directory is None:
        return None
    return [str(directory.log), None if directory.folder is None else str(directory.folder)]


NO_FOLDER = "cannot make the folder {} for the log: {}; give --log FILE, or --log none"


def check_directory(settings: Settings) -> None:
    """Raise InputError if :func:`make_directory` would fail."""
    if settings.log is None:
        folder = runs_folder() if settings.checkpoint is None else run_folder(settings.checkpoint)
        if why := unwritable(folder):
            raise InputError(NO_FOLDER.format(folder, why))


def make_directory(settings: Settings) -> RunDirectory | None:
    """Create the folder of a new run; None with `--log none`. Raises InputError if that fails."""
    if settings.log is not None:
        return None if settings.log == NO_LOG else RunDirectory(settings.log)
    try:
        folder = new_folder(settings.net) if settings.checkpoint is None else run_folder(settings.checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(NO_FOLDER.format(error.filename, error.strerror)) from None
    return RunDirectory(folder / LOG_NAME, folder)


def runs_folder() -> Path:
    return Path(os.environ.get("CONVOY_RUNS") or "runs")


def new_folder(net: str) -> Path:
    """Create a folder with the time and the net as its name, and a number if that name is taken. Raises OSError."""
    time = datetime.datetime.now().strftime("%Y-%m-%d-%H.%M.%S")
    name = f"{time}-{re.sub('[^A-Za-z0-9]+', '-', net).strip('-')}"
    for number in itertools.count(1):
        folder = runs_folder() / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def write_files(directory: RunDirectory | None, settings: Settings, plan: Plan, measured: Measurement | None) -> None:
    """Write settings, plan and measurement into the run's folder, and the files of --save-run and --save-plan."""
    folder = None if directory is None else directory.folder
    texts = {settings.save_run: to_toml(settings), settings.save_plan: plan.to_json()}
    if folder is not None:
        texts |= {folder / "run.toml": to_toml(settings), folder / "plan.json": plan.to_json()}
        if measured is not None:
            texts[folder / "fleet.toml"] = measured.to_toml()
    for path, text in texts.items():
        if path is not None:
            write_whole(path, text)
