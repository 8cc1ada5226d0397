"""Admits joining devices to a running `convoy train`, and follows its devices as they come and go."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from convoy._version import __version__
from convoy.api import Plans
from convoy.cli.job import Job, paths_of
from convoy.cli.reporter import Reporter
from convoy.comm.connection import Fields
from convoy.config.option_types import addresses_text, shown_addresses
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.settings import Settings
from convoy.elastic.admission import Verdict, refusal, required_facts
from convoy.elastic.members import JoinOptions, Members
from convoy.elastic.regroup import home_at
from convoy.machine import roster
from convoy.measure.replanner import Replanner
from convoy.plan.presets import Speeds
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.replan import with_joining_device
from convoy.runtime.module import Distributed
from convoy.train.loop import Training


class Opening:
    """Says where joining devices can ask, to them and to the user."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter = job, reporter
        self._shown: list[tuple[str, int]] = []

    def on_members(self, members: Members, known: FleetKnowledge) -> None:
        """Update the offer. Called at the beginning, and when the devices have changed."""
        settings, membership = self.job.settings, members.membership
        if membership is None or (settings.listen is None and self.job.invitation is None):
            return
        membership.offer = {
            "version": __version__, "run": to_toml(settings), "directory": paths_of(self.reporter.directory),
            "measured": known.measured is not None,
            "timed": known.speeds is not None and known.speeds.measured, "job": roster.job(),
        }  # fmt: skip
        addresses = shown_addresses(membership.addresses)
        if settings.listen is not None and self.job.screen.visible and addresses != self._shown:
            self.job.screen.line(f"Others may join: convoy join {addresses_text(addresses)} --job-key FILE")
            self._shown = addresses


def facts_of(part: Distributed, data: str, known: FleetKnowledge, device: tuple[str, str, float]) -> Fields:
    """Return what a joining device reports of itself."""
    title = f"host {device[1]}, {device[0]}"
    return {
        "same": {**required_facts(part), "data": data},
        "known": known.to_json(),
        "title": title,
        "device": list(device),
    }


class JoiningDevices:
    """Judges joining devices by what the planner predicts, and keeps what is known of all devices."""

    def __init__(self, part: Distributed, data: str, replan: Replanner, reporter: Reporter) -> None:
        self.part, self.data, self.replan, self.reporter = part, data, replan, reporter

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:
        if (refused := refusal(facts, {**required_facts(self.part), "data": self.data})) is not None:
            return refused
        known = self._with(device, facts)
        plan, now = self.part.plan, tuple(members)
        found, gain = with_joining_device(replace(self.replan.request, fleet=known), plan, now, device)
        if gain is not None and gain <= 1:
            return "spare", (
                f"a step of the {len(members)} devices is predicted to take {1 / gain:.3g} times as long with it; this is "
                "predicted again when the devices change"
            )
        assert known.speeds is not None
        self.replan.prepared = plan, now, tuple(sorted({*now, device})), known.speeds, found
        return "wanted", ""

    def note_joined(self, device: int, facts: Fields) -> None:
        self.replan.known = self._with(device, facts)
        kind, host, slowdown = facts["device"]
        self._note({device: (str(kind), str(host), float(slowdown))})

    def knowledge(self) -> Any:
        run = self.reporter.header.run
        return {
            "replan": self.replan.to_json(), "devices": [list(each) for each in self.reporter.header.devices],
            "settings": run.settings.model_dump(mode="json"), "sources": dict(run.sources),
        }  # fmt: skip

    def learn(self, knowledge: Any) -> None:
        self.replan.learn(knowledge["replan"])
        # If this device has to continue the log, it logs the settings of the run, not its own.
        run = RunSettings(Settings(**knowledge["settings"]), knowledge["sources"])
        self.reporter.header = replace(self.reporter.header, run=run, devices=())
        self._note(
            {d: (str(kind), str(host), float(times)) for d, (kind, host, times) in enumerate(knowledge["devices"])}
        )

    def _with(self, device: int, facts: Fields) -> FleetKnowledge:
        """Return what is known of all devices, this joining one included."""
        theirs, known = FleetKnowledge.from_json(facts["known"]), self.replan.known
        if known.speeds is not None and not known.speeds.measured:
            # The user gave speeds, and none for this device: take the mean.
            mean = sum(known.speeds.devices) / len(known.speeds.devices)
            theirs = replace(theirs, speeds=Speeds((mean,), measured=False))
        return known.with_device(device, theirs)

    def _note(self, rows: dict[int, tuple[str, str, float]]) -> None:
        """Write devices into the log's header, by id. An id that never came gets a row too."""
        header = self.reporter.header
        count = max(len(header.devices), max(rows) + 1)
        devices = [*header.devices, *[("?", "?", 1.0)] * (count - len(header.devices))]
        for device, row in rows.items():
            devices[device] = row
        known = self.replan.known
        assert known.speeds is not None
        speeds = tuple(known.speeds.devices[known.ids.index(d)] if d in known.ids else 1.0 for d in range(count))
        self.reporter.header = replace(header, devices=devices, speeds=Speeds(speeds, measured=known.speeds.measured))


def build_members(
    job: Job,
    training: Training,
    reporter: Reporter,
    plans: Plans,
    replan: Replanner,
    data: str,
    known: FleetKnowledge | None,
) -> Members | None:
    """Return what lets the training continue with fewer or more devices; None if the settings do not want that.

    Args:
        data: fingerprint of the images.
        known: what this device measured of itself, if it joins the job.
    """
    model, settings, entrance, opening = training.model, job.settings, None, Opening(job, reporter)
    if not isinstance(model, Distributed) or model.plan.mixes:
        return None
    joining = JoiningDevices(model, data, replan, reporter)
    if job.invitation is not None and known is not None:
        entrance = job.invitation.entrance, facts_of(model, data, known, reporter.header.devices[0])
    home = (
        home_at(*settings.listens_at, model.group)
        if entrance is None and settings.goes_on and settings.listens_at
        else None
    )
    if model.group.devices == 1 and entrance is None and home is None:
        return Members(model, training.optimizer, joins=JoinOptions(joining))
    if not settings.goes_on:
        return None

    def on_change(reason: str) -> None:
        waits = members.generation is None  # to be admitted
        if entrance is not None and not job.screen.visible:
            print(reason, flush=True)
        if waits:
            return
        reporter.on_members(members, reason)
        words = replan.message()
        job.screen.lines([f"  {reason}", *([f"  {words}"] if words else [])])
        opening.on_members(members, replan.known)

    every, price = (1 if settings.spare == "every-step" else None), plans.spare
    if every is None and price is not None:
        every = price.every
    if price is not None and price.overfull:
        job.screen.line(
            f"WARNING: there is no room for the snapshots that replace a lost device: {'; '.join(price.overfull)}. With "
            "--spare none there are none"
        )
    others = [each for each in (training.schedule, training.scaler) if each is not None]
    members = Members(
        model, training.optimizer, others=others, every=every, replan=replan, tell=on_change,
        joins=JoinOptions(joining, home, entrance),
    )  # fmt: skip
    opening.on_members(members, replan.known)
    return members
