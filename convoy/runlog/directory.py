"""Where a run is told about: the folder that holds its log, its settings, its plan, its fleet and its page.

Every training writes a log. Without `--log` it lies in the folder of the run's checkpoints, so that a run that goes on
goes on in one log; or else in a folder of its own, made in `runs`, or in the folder that CONVOY_RUNS names.
"""

import datetime
import itertools
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from convoy.config.settings import Settings
from convoy.errors import InputError
from convoy.runlog.reader import LOG_NAME

RUNS = "runs"

NO_LOG = Path("none")
"""What --log is given where no log is wanted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of one run.

    Attributes:
        folder: None where a person named a file for the log: then nothing else is written.
    """

    log: Path
    folder: Path | None = None

    @property
    def run(self) -> Path:
        """What `convoy report` is to be given."""
        return self.folder or self.log


def check_place(settings: Settings) -> None:
    """Refuse a place that could not be made, before the training that it is for.

    Raises:
        InputError: the folder cannot be written.
    """
    if settings.log is not None:
        return
    folder = (settings.checkpoint or _runs()).absolute()
    near = next(path for path in (folder, *folder.parents) if path.exists())
    if not near.is_dir() or not os.access(near, os.W_OK):
        raise _unwritable(folder, f"{near} cannot be written")


def make_place(settings: Settings) -> Place | None:
    """Where a run is told about that begins now, its folder made; None where its settings want no log.

    Raises:
        InputError: the folder cannot be made.
    """
    if settings.log is not None:
        return None if settings.log == NO_LOG else Place(settings.log)
    try:
        if settings.checkpoint is None:
            folder = _made_new(_runs(), settings.net)
        else:
            folder = settings.checkpoint
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(Path(error.filename), str(error.strerror)) from None
    return Place(folder / LOG_NAME, folder)


def _runs() -> Path:
    return Path(os.environ.get("CONVOY_RUNS", RUNS))


def _made_new(runs: Path, net: str) -> Path:
    """A folder named for the moment and the net; others that are made at the same moment get a number."""
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
