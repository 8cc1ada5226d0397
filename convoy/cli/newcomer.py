"""A device that joins a running `convoy train`: its settings, and its own speed."""

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from convoy.comm.connection import Fields
from convoy.comm.group import Group
from convoy.config.run_file import RunSettings, resolve_settings
from convoy.config.settings import Settings
from convoy.elastic.entrance import Entrance
from convoy.errors import InputError
from convoy.files import parse_toml
from convoy.machine.accelerator import random_state_kept
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.speeds import measure_speeds
from convoy.model.entry_points import lies_here, names_callable
from convoy.model.nets.imported import is_packaged
from convoy.model.tracing import trace
from convoy.plan.presets import AUTO, PLANS, Speeds
from convoy.planner.knowledge import FleetKnowledge
from convoy.runtime.clock import Clock


@dataclass(frozen=True)
class Invitation:
    """The answer of a running job to a device that asked to join.

    Attributes:
        offer: what `admission.offer_of` made there.
    """

    entrance: Entrance
    offer: Fields


def run_of(offer: Fields, own: Mapping[str, Any], accepted: Collection[str] = ()) -> RunSettings:
    """Return the settings of a running job for a device that joins it.

    Args:
        own: settings that this device has for itself.
        accepted: functions outside of the working folder that the job may name as its net or data.

    Raises:
        InputError: a folder for checkpoints, while the job saves none; a function that is not accepted.
    """
    if "checkpoint" in own and "checkpoint" not in parse_toml(str(offer["run"]), "the job's settings", ""):
        raise InputError(f"--checkpoint {own['checkpoint']}: the job saves no checkpoints; leave it out")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(str(offer["run"]))
        run = resolve_settings(file, {"compare": False, "explain": False, "page": False, "port": None, **own})
    for option, text in (("--net", run.settings.net), ("--data", run.settings.data)):
        own_code = names_callable(text) and not (option == "--net" and is_packaged(text))
        if own_code and text not in accepted and not lies_here(text):
            raise InputError(
                f"the job trains with {option} {text}, a function that does not lie in this folder, so it is not called: if "
                f"you trust the job, join with --accept {text}"
            )
    # These describe the first fleet, or are the business of its device 0. A plan is for several devices; this one is alone.
    alone: dict[str, Any] = dict.fromkeys(("slowdown", "speeds", "memory", "fleet", "save_run", "save_plan"))
    alone |= {"resume": False} | ({} if run.settings.plan in (*PLANS, AUTO) else {"plan": "data"})
    return RunSettings(run.settings.model_copy(update=alone), run.sources)


def measured_alone(
    offer: Fields, settings: Settings, model: nn.Module, example: Tensor, group: Group, slowdown: float
) -> FleetKnowledge:
    """Measure this device alone, in the way that the job measured its devices."""
    if not offer["timed"]:
        return FleetKnowledge(ids=(0,), speeds=Speeds((1.0,), measured=False))
    traced, batch = trace(model, example), settings.pass_batch
    with random_state_kept(group.torch_device):
        if not offer["measured"]:
            clock = Clock(group.torch_device, slowdown)
            speeds = measure_speeds(group, traced, model, batch, clock, settings.precision)
            return FleetKnowledge(ids=(0,), speeds=speeds)
        options = MeasureOptions(
            settings.net, budget_s=settings.budget_s, slowdown=slowdown, precision=settings.precision
        )
        measured = measure_job(group, traced, model, batch, options)
        return FleetKnowledge(ids=(0,), speeds=Speeds((1.0,)), measured=measured)  # the times of layers tell the speeds
