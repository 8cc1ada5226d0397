"""Joins a running `convoy train`: takes over its settings and measures this device."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from convoy.comm.connection import Fields
from convoy.comm.group import Group
from convoy.config.run_file import RunSettings, resolve_settings
from convoy.config.train_options import AUTO_DEVICE, FIELDS, Settings, key_of
from convoy.elastic.entrance import Entrance
from convoy.errors import InputError
from convoy.files import parse_toml
from convoy.machine.accelerator import random_state_kept
from convoy.measure.layer_timer import measure_speeds
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.entry_points import lies_here, names_callable
from convoy.model.nets.imported import is_packaged
from convoy.model.tracing import trace
from convoy.plan.presets import AUTO, PLANS, Speeds
from convoy.planner.knowledge import FleetKnowledge


@dataclass(frozen=True)
class Invitation:
    """A running job's reply to a join request; `TrainAdmission` makes the offer."""

    entrance: Entrance
    offer: Fields


def device_named(names: tuple[str, ...]) -> str | None:
    """Return the device that an option names; None: the launcher assigns one to each process."""
    return names[0] if len(names) == 1 and names[0] != AUTO_DEVICE else None


def run_of(offer: Fields, own: Mapping[str, Any], accepted: Collection[str] = ()) -> RunSettings:
    """Return the settings of a running job for a device that joins it.

    Args:
        own: settings of this device alone.
        accepted: functions outside of the working folder that the job may name as its net or data.
    """
    table = parse_toml(str(offer["run"]), "the job's settings", "")
    if "checkpoint" in own and "checkpoint" not in table:
        raise InputError(f"--checkpoint {own['checkpoint']}: the job saves no checkpoints; leave it out")
    values = {name: table[key_of(name)] for name in FIELDS if key_of(name) in table} | {**own}
    # These describe the first fleet or concern its device 0. A plan is for several devices; this one is still alone.
    for name in ("slowdown", "speeds", "memory", "fleet", "port", "save_plan", "compare", "explain", "page", "resume"):
        values.pop(name, None)
    if values["plan"] not in (*PLANS, AUTO):
        values["plan"] = "data"
    run = resolve_settings(None, values)
    for option, text in (("--net", run.settings.net), ("--data", run.settings.data)):
        own_code = names_callable(text) and not (option == "--net" and is_packaged(text))
        if own_code and text not in accepted and not lies_here(text):
            raise InputError(
                f"the job trains with {option} {text}, a function outside of this folder, so it is not called: if "
                f"you trust the job, join with --accept {text}"
            )
    return run


def measured_alone(
    offer: Fields, settings: Settings, model: nn.Module, example: Tensor, group: Group, slowdown: float
) -> FleetKnowledge:
    """Measure this device alone, with the same method as the job's devices."""
    if not offer["timed"]:
        return FleetKnowledge(ids=(0,), speeds=Speeds((1.0,), measured=False))
    traced, batch, precision = trace(model, example), settings.micro_batch, settings.precision
    with random_state_kept(group.torch_device):
        if not offer["measured"]:
            speeds = measure_speeds(group, traced, model, batch, slowdown, precision)
            return FleetKnowledge(ids=(0,), speeds=speeds)
        options = MeasureOptions(settings.net, budget_s=settings.budget_s, slowdown=slowdown, precision=precision)
        measured = measure_job(group, traced, model, batch, options)
        # Speeds follow from the layers' times.
        return FleetKnowledge(ids=(0,), speeds=Speeds((1.0,)), measured=measured)
