"""Admits joining devices to a running `convoy train`, and stores facts about all devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convoy._version import __version__
from convoy.cli.joining import Invitation
from convoy.cli.reporter import Reporter
from convoy.comm.connection import Fields
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.train_options import Settings
from convoy.elastic.admission import ScriptAdmission, Verdict, refusal, required_facts
from convoy.elastic.members import JoinOptions, Members
from convoy.elastic.regroup import home_at
from convoy.machine import roster
from convoy.measure.job_plans import Replanner
from convoy.plan.presets import Speeds
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.replan import with_joining_device
from convoy.runlog.directory import paths_of
from convoy.runtime.module import Distributed
from convoy.train.loop import Training

MAX_SHOWN = 4  # addresses for joining devices


class TrainAdmission(ScriptAdmission):
    """The admission of devices that would make steps faster, with facts about all devices."""

    def __init__(self, model: Distributed, data: str, replan: Replanner, reporter: Reporter) -> None:
        super().__init__(model, replan, lambda: True)
        self.data, self.reporter = data, reporter

    def required(self) -> dict[str, str]:
        """Return the values that must be equal on all devices, by their names in messages."""
        return {**required_facts(self.model), "data": self.data}

    def offer(self) -> Fields:
        """Return the description of the job for joining devices."""
        known = self.replan.known
        return {
            "version": __version__, "run": to_toml(self.reporter.run.settings),
            "directory": paths_of(self.reporter.directory), "measured": known.measured is not None,
            "timed": known.speeds is not None and known.speeds.measured, "job": roster.job(),
        }  # fmt: skip

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:
        if (refused := refusal(facts, self.required())) is not None:
            return refused
        known = self._with(device, facts)
        plan, now = self.model.plan, tuple(members)
        found, gain = with_joining_device(replace(self.replan.request, fleet=known), plan, now, device)
        if gain is not None and gain <= 1:
            slower = f"a step of the {len(members)} devices is predicted to take {1 / gain:.3g} times as long with it"
            return "spare", f"{slower}; this is predicted again when the devices change"
        assert known.speeds is not None
        self.replan.prepared = plan, now, tuple(sorted({*now, device})), known.speeds, found
        return "wanted", ""

    def note_joined(self, device: int, facts: Fields) -> None:
        self.replan.known = self._with(device, facts)
        self._note({device: facts["device"]})

    def knowledge(self) -> Any:
        run, devices = self.reporter.run, self.reporter.devices
        return {
            "replan": super().knowledge(), "devices": [[device, *row] for device, row in devices.items()],
            "settings": run.settings.model_dump(mode="json"), "sources": dict(run.sources),
        }  # fmt: skip

    def learn(self, knowledge: Any) -> None:
        super().learn(knowledge["replan"])
        # If this device has to continue the log, it logs the settings of the run, not its own.
        self.reporter.run = RunSettings(Settings(**knowledge["settings"]), knowledge["sources"])
        self.reporter.devices.clear()
        self._note({device: row for device, *row in knowledge["devices"]})

    def _with(self, device: int, facts: Fields) -> FleetKnowledge:
        theirs, known = FleetKnowledge.from_json(facts["known"]), self.replan.known
        if known.speeds is not None and not known.speeds.measured:
            # The user gave speeds, but none for this device: use the mean.
            mean = sum(known.speeds.devices) / len(known.speeds.devices)
            theirs = replace(theirs, speeds=Speeds((mean,), measured=False))
        joined: FleetKnowledge = known.with_device(device, theirs)
        return joined

    def _note(self, rows: Mapping[int, Sequence[Any]]) -> None:
        """Add these devices to those that the log lists."""
        known = self.replan.known
        assert known.speeds is not None
        self.reporter.devices |= {d: (str(kind), str(host), float(times)) for d, (kind, host, times) in rows.items()}
        self.reporter.speeds = dict(zip(known.ids, known.speeds.devices, strict=True))


def join_addresses(addresses: Sequence[tuple[str, int]]) -> str:
    """Return the argument of `convoy join`: addresses on different hosts, because a host may leave."""
    ports = dict(reversed(addresses))
    hosts = list(dict.fromkeys(host for host, _ in addresses))[:MAX_SHOWN]
    return ",".join(f"[{host}]:{ports[host]}" if ":" in host else f"{host}:{ports[host]}" for host in hosts)


def build_members(
    admission: TrainAdmission, training: Training, invitation: Invitation | None, known: FleetKnowledge | None
) -> Members | None:
    """Return the `Members` that let training continue with fewer or more devices, or None if the settings disable them.

    Args:
        known: measurements of this device, if it joins the job.
    """
    model, replan, reporter = admission.model, admission.replan, admission.reporter
    settings, screen = reporter.run.settings, reporter.screen
    roster.update(run="" if reporter.directory is None else str(reporter.directory.run.absolute()))
    entrance = home = None
    if invitation is not None and known is not None:
        row = reporter.devices[0]
        facts = {"same": admission.required(), "title": f"host {row[1]}, {row[0]}", "device": list(row)}
        entrance = invitation.entrance, facts | {"known": known.to_json()}
    elif settings.recovers and settings.listens_at:
        home = home_at(*settings.listens_at, model.group)
    if model.group.devices == 1 and entrance is None and home is None:
        return Members(model, training.optimizer, joins=JoinOptions(admission))
    if not settings.recovers:
        return None
    shown: list[str] = []

    def update_offer() -> None:
        """Update the job's offer to joining devices, and show the user the command to join."""
        if members.membership is None or (settings.listen is None and invitation is None):
            return
        members.membership.offer = admission.offer()
        addresses = join_addresses(members.membership.addresses)
        if settings.listen is not None and screen.visible and shown[-1:] != [addresses]:
            screen.line(f"Others may join: convoy join {addresses} --job-key FILE")
            shown.append(addresses)

    def on_change(reason: str) -> None:
        if entrance is not None and not screen.visible:
            print(reason, flush=True)
        if members.generation is None:  # it still waits to be admitted
            return
        reporter.on_members(members.steps, reason)
        planned = replan.message()
        screen.lines([f"  {reason}", *([f"  {planned}"] if planned else [])])
        update_offer()

    every = 1 if settings.spare == "every-step" else None
    others = [each for each in (training.schedule, training.scaler) if each is not None]
    members = Members(
        model, training.optimizer, others=others, every=every, replan=replan, tell=on_change,
        joins=JoinOptions(admission, home, entrance)
    )  # fmt: skip
    update_offer()
    return members
