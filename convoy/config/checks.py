"""Checks settings before torch is imported, which takes seconds. Every function raises InputError."""

import os
import sys
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from convoy.comm.environment import imposed_slowdown
from convoy.config.train_options import AUTO_DEVICE, NO_LOG, Settings
from convoy.data import check as check_data
from convoy.data import folder_of
from convoy.errors import InputError, shortened, shown, unknown_name
from convoy.fleet import MAX_SLOWDOWN
from convoy.model.entry_points import names_callable
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS

NETS = ("two-conv", "alexnet", "vgg", "resnet", "resnet18", "unet")  # of model.nets, which imports torch


def check_net(text: str) -> None:
    name = text.partition(":")[0]
    if name not in (*NETS, "torchvision", "timm") and not names_callable(text):
        near = get_close_matches(name[:80], NETS, n=1, cutoff=0.87)
        meant = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"unknown net {shown(text)}: {meant}built in are {', '.join(NETS)}; those of torchvision and timm are called "
            f"torchvision:{shortened(name)} and timm:{shortened(name)}, and a function of your own MODULE:FUNCTION"
        )


def check_places(settings: Settings) -> None:
    """Refuse folders, modules and devices that do not exist on this machine."""
    folder = folder_of(settings.data)
    for option, path in (("--data", folder), ("--data-dir", settings.data_dir)):
        if path is not None and not os.path.isdir(path):
            raise InputError(f"{option} {path} is no folder: give an existing one")
    for option, text in (("--net", settings.net), ("--data", settings.data if folder is None else "")):
        name = text.partition(":")[0].split(".")[0]
        if not names_callable(text) or name in sys.modules or find_spec(name) is not None:
            continue
        if PathFinder.find_spec(name, [os.getcwd()]) is None:
            raise InputError(f"{option} {text}: there is no module {name!r}, installed or in the working folder")
    for name in dict.fromkeys(settings.device_names):
        if name not in (AUTO_DEVICE, "cpu"):
            from convoy.machine.accelerator import check_device

            check_device(name)


def check(settings: Settings) -> None:
    """Refuse settings that contradict each other or the devices."""
    check_data(settings.data, settings.data_dir, settings.image_size, settings.test_fraction)
    check_net(settings.net)
    imposed_slowdown()
    _check_devices(settings)
    if settings.listen is not None and not settings.recovers:
        raise InputError("--listen with --spare none: no device can join such a training; leave one out")
    if settings.batch % settings.accumulate:
        some = [str(n) for n in range(1, min(settings.batch, 1024)) if not settings.batch % n]
        raise InputError(
            f"--accumulate {settings.accumulate} with --batch {settings.batch}: micro-batches must be equally "
            f"large; set --accumulate to one of {', '.join([*some, str(settings.batch)])}"
        )
    for option, given in (("--checkpoint-steps", settings.checkpoint_steps), ("--resume", settings.resume)):
        if given and settings.checkpoint is None:
            raise InputError(f"{option} without --checkpoint: name the folder of the run's checkpoints")
    if settings.resume and settings.compare:
        raise InputError("--compare with --resume: one device would start from the beginning; leave one out")
    if settings.page and settings.log == NO_LOG:
        raise InputError("--page with --log none: the page is made of the log; leave one of them out")
    if settings.fleet is not None and settings.plan != AUTO:
        raise InputError(
            f"--fleet {settings.fleet} with --plan {settings.plan}: if its hosts have no addresses, only --plan auto reads "
            "the file; add --plan auto, or give every host its address"
        )
    plan, count = settings.plan, len(settings.device_names)
    if plan in (*PLANS, AUTO):
        return
    if not (plan.endswith(".json") or os.path.isfile(plan)):
        raise unknown_name("plan", plan, [*PLANS, AUTO, "a plan file (….json)"])
    saved = Plan.load(Path(plan))
    if settings.micro_batch != saved.batch:
        parts = f" in {settings.accumulate} micro-batches of {settings.micro_batch}" if settings.accumulate > 1 else ""
        remedy = f"give --batch {saved.batch * settings.accumulate}, or make a new plan"
        raise InputError(f"--batch {settings.batch}{parts}, but the plan {plan} is for {saved.batch}: {remedy}")
    if count != saved.devices:
        remedy = f"give --devices {saved.devices}, or another plan"
        raise InputError(f"--devices {count}, but the plan {plan} is for {saved.devices}: {remedy}")


def _check_devices(settings: Settings) -> None:
    """Compare the numbers of slowdowns, speeds and memory sizes with the number of devices."""
    count, slowdowns, speeds, memory = len(settings.device_names), settings.slowdowns, settings.speeds, settings.memory
    if len(slowdowns) != count or not 1 <= min(slowdowns) <= max(slowdowns) <= MAX_SLOWDOWN:
        rule = f"give one factor from 1 to {MAX_SLOWDOWN:g} for each of the {count} devices"
        raise InputError(f"--slowdown {_listed(slowdowns)}: {rule}, e.g. --slowdown {_listed((1.0,) * count)}")
    if speeds is not None and settings.plan == AUTO:
        raise InputError("--speeds with --plan auto, which measures every layer: leave it out, or name a plan")
    if speeds is not None and (len(speeds) != count or not 1e-12 <= min(speeds) <= max(speeds) <= 1e12):
        rule = f"give one positive number for each of the {count} devices, from 1e-12 to 1e12"
        raise InputError(f"--speeds {_listed(speeds)}: {rule}")
    if memory is not None and len(memory) not in (1, count):
        raise InputError(f"--memory has {len(memory)} values: give one for all devices, or one for each of the {count}")
    if memory is not None and settings.fleet is not None:
        raise InputError("--memory with --fleet: write memory_bytes of each device into the fleet file instead")


def check_outputs(settings: Settings) -> None:
    """Refuse output files that cannot be written."""
    for option, path in (("save-run", settings.save_run), ("save-plan", settings.save_plan), ("log", settings.log)):
        if path is not None:
            check_output(f"--{option}", path)


def check_output(option: str, path: Path) -> None:
    """Refuse a file that cannot be written."""
    if not os.path.isdir(path.parent):
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist; make it or name another")
    if os.path.isdir(path):
        raise InputError(f"{option} {path} is a folder: name a file in it, e.g. {option} {path / 'FILE'}")
    written = path if os.path.exists(path) else path.parent
    if not os.access(written, os.W_OK):
        raise InputError(f"{option} {path}: {written} cannot be written; change its permissions or name another file")


def _listed(values: tuple[float, ...]) -> str:
    return shortened(",".join(f"{value:g}" for value in values))
