"""How devices come into a training of the command: what it tells them, and how it judges them by what they say."""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convoy._version import __version__
from convoy.app.handover import Handover
from convoy.app.joining_address import doors_text, listening, told_doors
from convoy.comm.channel import Words
from convoy.comm.group import Group
from convoy.config.run_file import RunSettings, resolve_settings, to_toml
from convoy.config.settings import Settings
from convoy.elastic.admission import Verdict
from convoy.elastic.entrance import Entrance
from convoy.elastic.members import Members
from convoy.elastic.regroup import Home, home_at
from convoy.errors import InputError
from convoy.files import parse_toml
from convoy.machine import roster
from convoy.machine.accelerator import modes, random_state_kept
from convoy.measure.anew import Replanner
from convoy.measure.job import MeasureOptions, measure_job
from convoy.measure.speeds import measure_speeds
from convoy.model.entry_points import lies_here, names_callable
from convoy.model.nets.imported import is_packaged
from convoy.model.tracing import trace
from convoy.plan.presets import AUTO, PLANS, Speeds
from convoy.planner.anew import with_newcomer
from convoy.planner.knowledge import FleetKnowledge
from convoy.runlog.directory import RunDirectory
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed


@dataclass(frozen=True)
class Coming:
    """The way of this device into a training.

    Attributes:
        offer: what that says of itself.
    """

    entrance: Entrance
    offer: Words


def home_of(settings: Settings, group: Group) -> Home | None:
    """Where this device answers as a member, where that is not any port of its group's address; see :func:`home_at`.

    Raises:
        InputError: as `door_address`.
    """
    if settings.listen is None:
        return None
    return home_at(*listening(settings), group)


def run_of(offer: Words, own: Mapping[str, Any], accepted: Collection[str] = ()) -> RunSettings:
    """The settings of a training that runs, for a device that comes.

    Args:
        own: what this device has otherwise.
        accepted: functions outside of the working folder that the training may name as its net or data.

    Raises:
        InputError: a folder for checkpoints, of which the training saves none; a function that is not accepted.
    """
    if "checkpoint" in own and "checkpoint" not in parse_toml(str(offer["run"]), "the job's settings", ""):
        raise InputError(f"--checkpoint {own['checkpoint']}: the training saves no checkpoints; leave it out")
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
    # Of the fleet that began, and what only its first device does. Plans are for the job; this device begins alone.
    alone: dict[str, Any] = dict.fromkeys(("slowdown", "speeds", "memory", "fleet", "save_run", "save_plan"))
    settings = run.settings.model_copy(update={**alone, "resume": False})
    if settings.plan not in (*PLANS, AUTO):
        settings = settings.model_copy(update={"plan": "data"})
    return RunSettings(settings, run.sources)


class Opening:
    """Admits joining devices, and prints where they can ask.

    Args:
        came: this device has come in itself.
    """

    def __init__(self, settings: Settings, *, came: bool) -> None:
        self.settings = settings
        self.opens = settings.listen is not None or came
        self._shown: list[tuple[str, int]] = []

    def tell(self, members: Members, known: FleetKnowledge, here: Handover) -> None:
        """At the beginning, and whenever the devices have changed."""
        membership = members.membership
        if membership is None or not self.opens:
            return
        membership.offer = offer_of(self.settings, known, here.directory)
        doors = told_doors(membership.doors)
        if self.settings.listen is not None and here.screen.visible and doors != self._shown:
            here.screen.line(f"Others may join: convoy join {doors_text(doors)} --job-key FILE")
            self._shown = doors


def offer_of(settings: Settings, known: FleetKnowledge, directory: RunDirectory | None) -> Words:
    """What a training tells who asks."""
    places = None if directory is None else [str(directory.log), directory.folder and str(directory.folder)]
    return {
        "version": __version__, "run": to_toml(settings), "directory": places, "measured": known.measured is not None,
        "timed": known.speeds is not None and known.speeds.measured, "job": roster.job(),
    }  # fmt: skip


def facts_of(part: Distributed, data: str, known: FleetKnowledge, title: str, device: tuple[str, str, float]) -> Words:
    """What a device says of itself that asks to be let in."""
    return {
        "same": _same(part, data), "known": known.to_json(), "title": title, "device": list(device),
    }  # fmt: skip


def _same(part: Distributed, data: str) -> dict[str, str]:
    """What must be the same on all devices, by its name in messages."""
    version = ".".join(torch.__version__.split(".")[:2])
    return {
        "convoy": __version__,
        "torch": version,
        "model": part.traced[True].graph.fingerprint,
        "data": data,
        **modes(),
    }


def measured_alone(
    offer: Words, settings: Settings, model: nn.Module, example: Tensor, group: Group, slowdown: float
) -> FleetKnowledge:
    """How fast this device is, alone and while the others train; measured as they were."""
    traced, batch = trace(model, example), settings.pass_batch
    if not offer["timed"]:
        return FleetKnowledge(ids=(0,), speeds=Speeds((1.0,), measured=False))
    with random_state_kept(group.torch_device):
        if offer["measured"]:
            options = MeasureOptions(
                settings.net, budget_s=settings.budget_s, slowdown=slowdown, precision=settings.precision
            )
            found = measure_job(group, traced, model, batch, options)
            speeds = Speeds((1.0,))  # by the layers' times, which are known of all
            return FleetKnowledge(ids=(0,), speeds=speeds, measured=found)
        clock = Clock(group.torch_device, slowdown)
        speeds = measure_speeds(group, traced, model, batch, clock, settings.precision)
        return FleetKnowledge(ids=(0,), speeds=speeds)


class JoiningDevices:
    """Judges who asks to be let in by what the planner predicts, and keeps what is known of all devices."""

    def __init__(self, part: Distributed, data: str, replan: Replanner, here: Handover) -> None:
        self.part, self.data, self.replan, self.here = part, data, replan, here

    def judge(self, facts: Words, members: Sequence[int], device: int) -> Verdict:
        for what, mine in _same(self.part, self.data).items():
            if (theirs := facts["same"].get(what)) != mine and "unknown" not in (theirs, mine):
                return (
                    "refused",
                    f"its {what} is {theirs}, that of the job is {mine}: it must be the same on every machine",
                )
        known = self._with(device, facts)
        plan, now = self.part.plan, tuple(members)
        found, gain = with_newcomer(replace(self.replan.request, fleet=known), plan, now, device)
        if gain is not None and gain <= 1:
            return "spare", (
                f"a step of the {len(members)} devices is predicted to take {1 / gain:.3g} times as long with it; it is "
                "asked again when the devices change"
            )
        assert known.speeds is not None
        self.replan.prepared = plan, now, tuple(sorted({*now, device})), known.speeds, found
        return "wanted", ""

    def came(self, device: int, facts: Words) -> None:
        self.replan.known = self._with(device, facts)
        kind, host, slowdown = facts["device"]
        self._note({device: (str(kind), str(host), float(slowdown))})

    def told(self) -> Any:
        run = self.here.header.run
        return {
            "replan": self.replan.to_json(), "devices": [list(each) for each in self.here.header.devices],
            "settings": run.settings.model_dump(mode="json"), "sources": dict(run.sources),
        }  # fmt: skip

    def hear(self, told: Any) -> None:
        self.replan.learn(told["replan"])
        # Should this device have to go on with the log, that is of the run and not of how this device came into it.
        run = RunSettings(Settings(**told["settings"]), told["sources"])
        self.here.header = replace(self.here.header, run=run, devices=())
        self._note({d: (str(kind), str(host), float(times)) for d, (kind, host, times) in enumerate(told["devices"])})

    def _with(self, device: int, facts: Words) -> FleetKnowledge:
        """What is known with a device that says this of itself."""
        theirs, known = FleetKnowledge.from_json(facts["known"]), self.replan.known
        if known.speeds is not None and not known.speeds.measured:  # somebody gave these numbers: nobody knows its own
            mean = sum(known.speeds.devices) / len(known.speeds.devices)
            theirs = replace(theirs, speeds=Speeds((mean,), measured=False))
        return known.with_device(device, theirs)

    def _note(self, rows: dict[int, tuple[str, str, float]]) -> None:
        """Devices by their ids, in the header of the log; of one that never came there is a row, too."""
        header = self.here.header
        count = max(len(header.devices), max(rows) + 1)
        devices = [*header.devices, *[("?", "?", 1.0)] * (count - len(header.devices))]
        for device, row in rows.items():
            devices[device] = row
        known = self.replan.known
        assert known.speeds is not None
        speeds = tuple(known.speeds.devices[known.ids.index(d)] if d in known.ids else 1.0 for d in range(count))
        self.here.header = replace(header, devices=devices, speeds=Speeds(speeds, measured=known.speeds.measured))
