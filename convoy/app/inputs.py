"""What the settings of a training name: images, net, files; and all that can be refused before anything starts."""

import os
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from convoy.config.option_types import AUTO_DEVICE
from convoy.config.settings import Settings
from convoy.data import Splits, load
from convoy.data import check as check_data
from convoy.errors import InputError, unknown_name
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS, Speeds, named_plan
from convoy.profile.auto import read_times
from convoy.runlog.directory import NO_LOG
from convoy.runtime.precision import check_kinds


def load_images(settings: Settings) -> Splits:
    """The data; `limit` keeps only the first training images."""
    splits = load(
        settings.data, settings.data_dir, image_size=settings.image_size, test_fraction=settings.test_fraction
    )
    return splits if settings.limit is None else splits.first(settings.limit)


def build_model(settings: Settings, splits: Splits) -> nn.Module:
    return build_net(settings.net, splits.train.image_shape, splits.train.classes, settings.seed)


def example_of(splits: Splits) -> Tensor:
    """One image, as a batch of one."""
    return splits.train[0][0][None]


def device_named(names: tuple[str, ...]) -> str | None:
    """The device to join as: alone, the one that an option names; in a job of several, the launcher has told each its own."""
    return names[0] if len(names) == 1 and names[0] != AUTO_DEVICE else None


def imposed_slowdown() -> float:
    """How many times slower a rehearsal wants this device (its fleet file's `slowdown`)."""
    return float(os.environ.get("CONVOY_SLOWDOWN", "1"))


def check_inputs(settings: Settings) -> None:
    """Load the data and build the net once, in the launching process: bad input is told once, before anything starts.

    Raises:
        InputError, DataError: as the parts say.
    """
    check(settings)
    check_outputs(settings)
    splits, devices = load_images(settings), len(settings.device_names)
    graph = trace(build_model(settings, splits), example_of(splits)).graph
    if settings.plan == AUTO:
        if settings.fleet is not None:
            read_times(settings.fleet, graph, devices, settings.precision)
    elif settings.plan in PLANS:
        plan = named_plan(settings.plan, graph, settings.pass_batch, Speeds((1.0,) * devices), settings.reduce)
        replace(plan, wire=settings.wire or "exact").check(graph, devices)
    else:
        Plan.load(Path(settings.plan)).check(graph, devices)


def check(settings: Settings) -> None:
    """Refuse settings that do not fit each other or the devices.

    Raises:
        InputError: with the value, the rule and the remedy.
    """
    check_data(settings.data, settings.data_dir, settings.image_size, settings.test_fraction)
    count, slowdowns, speeds = len(settings.device_names), settings.slowdowns, settings.speeds
    if len(slowdowns) != count or min(slowdowns) < 1:
        raise InputError(
            f"--slowdown {_listed(slowdowns)}: give one factor of 1 or more for each of the {count} devices, e.g. "
            f"--slowdown {_listed((1.0,) * count)}"
        )
    if speeds is not None and (len(speeds) != count or min(speeds) <= 0):
        raise InputError(
            f"--speeds {_listed(speeds)}: give one positive number for each of the {count} devices, e.g. --speeds 4,2,1,1"
        )
    if settings.batch % settings.accumulate:
        fitting = [str(n) for n in range(1, settings.batch + 1) if not settings.batch % n]
        raise InputError(
            f"--accumulate {settings.accumulate} with --batch {settings.batch}: the passes of a step must be equal; give one "
            f"of {', '.join(fitting)}"
        )
    check_kinds(settings.precision, settings.device_names)
    _check_checkpoint(settings)
    _check_plan(settings)


def _check_checkpoint(settings: Settings) -> None:
    for option, given in (("--checkpoint-steps", settings.checkpoint_steps), ("--resume", settings.resume)):
        if given and settings.checkpoint is None:
            raise InputError(
                f"{option} without --checkpoint: name the folder of the run's checkpoints: --checkpoint DIR"
            )
    if settings.resume and settings.compare:
        raise InputError("--compare with --resume: one device would begin at the beginning; leave one of them out")
    if settings.page and settings.log == NO_LOG:
        raise InputError("--page with --log none: the page is made of the log; leave one of them out")


def _check_plan(settings: Settings) -> None:
    plan = settings.plan
    if settings.fleet is not None and plan != AUTO:
        raise InputError(
            f"--fleet {settings.fleet} with --plan {plan}: only --plan auto reads a fleet file; leave it out"
        )
    if settings.speeds is not None and plan == AUTO:
        raise InputError(
            f"--speeds {_listed(settings.speeds)} with --plan auto, which needs the times of every layer: leave it out, or "
            "name a plan"
        )
    if plan in (*PLANS, AUTO):
        return
    if not (plan.endswith(".json") or Path(plan).is_file()):
        raise unknown_name("plan", plan, [*PLANS, AUTO, "a plan file (….json)"])
    saved, count = Plan.load(Path(plan)), len(settings.device_names)
    if settings.pass_batch != saved.batch:
        passes = f" in {settings.accumulate} passes of {settings.pass_batch}" if settings.accumulate > 1 else ""
        raise InputError(
            f"--batch {settings.batch}{passes}, but the plan {plan} is for {saved.batch}: give --batch "
            f"{saved.batch * settings.accumulate}, or make a new plan"
        )
    if count != saved.devices:
        raise InputError(
            f"--devices {count}, but the plan {plan} is for {saved.devices}: give --devices {saved.devices}, or make a new "
            "plan"
        )


def check_outputs(settings: Settings) -> None:
    """Refuse files that could not be written, before the training whose results they would hold. InputError."""
    rows = (("--save-run", settings.save_run), ("--save-plan", settings.save_plan), ("--log", settings.log))
    for option, path in rows:
        if path is not None:
            check_output(option, path, appends=path == settings.log)


def check_output(option: str, path: Path, *, appends: bool = False) -> None:
    """Refuse a file that could not be written.

    Args:
        appends: it is written where it is; else a new one takes its place, in the same folder.

    Raises:
        InputError: the folder is missing or not writable, or the path is a folder.
    """
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist; make it or name another")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder: name a file in it, e.g. {option} {path / 'FILE'}")
    written = path if appends and path.exists() else path.parent
    if not os.access(written, os.W_OK):
        raise InputError(f"{option} {path}: {written} cannot be written; change its permissions or name another file")


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{n:g}" for n in numbers)
