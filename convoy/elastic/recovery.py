"""Keeps the state of a training after its steps, and goes on with the devices that are left or have come."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.comm import roster
from convoy.comm.agreement import from_first, gather, share_number, share_tensor
from convoy.comm.changing import ChangingGroup
from convoy.comm.channel import Words
from convoy.comm.group import Group, Pending
from convoy.elastic.admission import Judge, Newcomers, Story, hear_of_newcomers
from convoy.elastic.agreement import Generation, Pairs
from convoy.elastic.entrance import Entrance
from convoy.elastic.regroup import Membership, UnnamedLossError
from convoy.elastic.snapshot import KeepPace, Stateful, StateKeeper, restore, take
from convoy.errors import ConvoyError, DeviceLostError
from convoy.plan.exchange_program import forget_moves
from convoy.plan.plan import Plan
from convoy.plan.survivors import plan_for
from convoy.runtime.module import Distributed


class StateLostError(DeviceLostError):
    """With the devices that were lost went a part of the model that nobody else had."""


class LeftError(DeviceLostError):
    """This device has left the job, as it was asked to."""


class StoppedError(ConvoyError):
    """The whole training has ended after a step, as it was asked to."""


class GrownError(DeviceLostError):
    """Newcomers are let in: the devices meet anew."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Who went and who came, as one device sees it.

    Attributes:
        me: this device's id.
        count: so many train now.
        error: what ended the last step.
        lost: the ids of those that are gone.
        came: those that have come, in words.
        parted: pairs that did not reach each other, the second one of which is out for it; also of losses before this one.
        step: finished step after which all go on.
        done: steps that this device had finished.
        saved: whether that step is the one of a checkpoint.
        joins: whether this device is one of those that have come.
    """

    me: int
    count: int
    error: ConvoyError
    lost: Sequence[int]
    came: Sequence[str]
    parted: Pairs
    step: int
    done: int
    saved: bool
    joins: bool

    def line(self) -> str:
        """How the devices have changed, and after which step they go on."""
        after = f"after step {self.step}"
        if self.joins:
            return f"joined as device {self.me}; {self.count} train {after}"
        what = self._gone()
        if self.came:
            joined = f"{' and '.join(self.came)} joined"
            what = f"{what}, {joined}" if self.lost else joined
        where = f"from the checkpoint of step {self.step}, since {pieces_lost(self.lost)}" if self.saved else after
        again = f"; finished steps that are repeated: {self.done - self.step}" if self.done > self.step else ""
        return f"{what}; {self.count} go on {where}{again}"

    def _gone(self) -> str:
        """Who is lost, and how."""
        parted = sorted(pair for pair in self.parted if pair[1] in self.lost)
        silent = [d for d in self.lost if all(d != pair[1] for pair in parted)]
        names, why = ", ".join(map(str, silent)), str(self.error).partition(". ")[0]
        gone = f"device{'s' * (len(silent) > 1)} {names} lost" if silent else "a connection was lost"
        if parted:  # what this device had found out may be of another one, which has not heard of them either
            pairs = (
                f"devices {one} and {other} do not reach each other: device {other} is out" for one, other in parted
            )
            return "; ".join([*([gone] if silent else []), *pairs])
        if len(self.lost) == 1 and why.startswith(f"device {self.lost[0]} "):
            return why  # it names the device, and how it was lost
        if not isinstance(self.error, UnnamedLossError | GrownError):
            gone += f" ({why})"
        return gone


def pieces_lost(lost: Sequence[int]) -> str:
    """That with these devices went a part of the model."""
    names = ", ".join(map(str, lost))
    return f"with device{'s' * (len(lost) > 1)} {names} went pieces of the model that no other device has"


class Replan(Protocol):
    """Makes the plan for the next devices. All are named by their ids, in the order in which they are in the group."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """On every device: what there is to be kept of what the model's plan has shown, which is still the one of `before`."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        """On the first of the devices `now`."""
        ...


class InProportion:
    """The same strategies, with shares in the same proportions."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """Nothing."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        devices = [before.index(d) if d in before else None for d in now]
        return plan_for(model.plan, model.traced[True].graph, devices)


class Wishes:
    """Tells the others what this device wishes for, and hears their wishes a step later, so that nobody waits for them.

    Attributes:
        leaves: this device wishes to leave.
        ends: it wishes that all end.
    """

    def __init__(self) -> None:
        self.leaves, self.ends = False, False
        self._told: tuple[Tensor, Pending] | None = None

    def exchange(self, group: Group, wanted: Callable[[], bool]) -> tuple[list[int], bool, bool]:
        """The devices that leave after this step, by their index, whether others come in, and whether all end: as all told in
        the step before. Every device calls it.

        Args:
            wanted: whether this device knows of somebody who is to come in.
        """
        leaving, grows, ends = [], False, False
        if self._told is not None:
            table, travels = self._told
            travels.wait()
            told = [int(each) for each in table.tolist()]
            leaving = may_leave([bool(each & LEAVES) for each in told])
            grows = any(each & GROWS for each in told)
            # Where all leave nobody goes on, so they end together, and save.
            ends = any(each & ENDS for each in told) or all(each & LEAVES for each in told)
        own = torch.tensor(float(LEAVES * self.leaves + GROWS * wanted() + ENDS * self.ends), dtype=torch.float64)
        self._told = share_tensor(group, own)
        return leaving, grows, ends

    def forget(self) -> None:
        """What was told before a loss."""
        self._told = None


def may_leave(wish: Sequence[bool]) -> list[int]:
    """Who of the devices that wish to leaves now. The next one has the copies of what only it had, and stays; the others leave
    after a later step."""
    return [d for d, each in enumerate(wish) if each and not wish[(d + 1) % len(wish)]]


def end_all(group: Group, step: int) -> NoReturn:
    """All have finished the same step, and end there. Every device calls it.

    Raises:
        StoppedError: always.
        DeviceLostError: a device was lost just now.
    """
    share_number(group, 0.0)  # everybody knows
    raise StoppedError(f"the training was stopped after step {step}, as it was asked to")


def part(group: Group, membership: Membership, leaving: Sequence[int], step: int) -> NoReturn:
    """All have kept the same step: those that leave go, once the others have what only they had. Every device calls it.

    Raises:
        LeftError: on those that leave.
        DeviceLostError: on the others.
    """
    share_number(group, 0.0)  # everybody has
    if group.device in leaving:
        me = membership.me
        error = LeftError(me, f"device {me} has left the job after step {step}, as it was asked to")
        membership.depart(error)
        raise error
    left = group.ids[leaving[0]]
    raise DeviceLostError(left, f"device {left} left the job")


def let_in(group: Group, membership: Membership) -> None:
    """All have kept the same step: those that are wanted come in, if they are still there. Every device calls it.

    Raises:
        GrownError: they do: all meet anew.
        DeviceLostError: a device was lost.
    """
    rows = from_first(group, "who comes in", lambda: membership.number(membership.applicants.wanted()))
    if rows:
        membership.grant(rows)
        raise GrownError(group.device, "newcomers are let in")


LEAVES, GROWS, ENDS = 1, 2, 4
"""What a device says after each step: that it leaves; that somebody is to come in; that all are to end."""


class Works:
    """Counts what the devices have done with between steps; who was behind when one was lost takes the result of the others.

    Attributes:
        count: so many are done with.
        result: of the last.
        drawn: torch's state of random numbers behind it, on a device that was behind.
    """

    def __init__(self) -> None:
        self.count = 0
        self.result: Any = None
        self.drawn: Tensor | None = None

    def done(self, result: Any) -> None:
        """One more."""
        self.count, self.result = self.count + 1, result

    def catch_up(self, group: Group, random: Tensor) -> None:
        """Take over the result of what others had done with, and this device had not. Every device calls it.

        Args:
            random: torch's state of random numbers behind what this device has done with.
        """
        try:
            own = json.dumps([self.count, self.result, random.tolist()])
        except (TypeError, ValueError):
            own = json.dumps([self.count, None, random.tolist()])
        rows = [json.loads(text) for text in group.agree("works that are done with", own)]
        count, result, drawn = max(rows, key=lambda row: int(row[0]))
        if count > self.count:
            self.count, self.result = count, result
            self.drawn = torch.tensor(drawn, dtype=torch.uint8)


MOST_TRIALS = 20
"""So many losses in sequence without a step between them end the training."""


class GoingOn:
    """Keeps the state after each step, and goes on after a loss with those that are left; `Members` builds on it."""

    def __init__(
        self,
        model: Distributed,
        optimizers: Sequence[Optimizer],
        others: Sequence[Stateful],
        every: int | None,
        spares: bool,
        replan: Replan,
        tell: Callable[[str], None] | None,
        membership: Membership | None,
        newcomers: Newcomers | None,
        entrance: tuple[Entrance, Words] | None,
    ) -> None:
        self.model, self.others, self.every, self.tell = model, tuple(others), every or 1, tell
        self.replan, self.membership, self.newcomers, self.entrance = replan, membership, newcomers, entrance
        self.steps = 0
        self.place: Any = None
        self.story: Story | None = None
        self.fall_back: Callable[[], tuple[int, Any]] | None = None
        """Brings back a state that was saved, where with the lost devices went what nobody else has: its step and place. Every
        device calls it."""
        self.states = StateKeeper(model, optimizers, spares=spares)
        self._pace = KeepPace() if every is None else None
        self._wishes, self._works = Wishes(), Works()
        self._strict = False  # after a step nothing is undone: all wait until all have kept it
        self._facts: Words | None = None  # what this device said of itself, where it came later
        self._judge = None if membership is None or newcomers is None else Judge(membership, newcomers)
        self._planned: Generation | None = None  # that the model's plan is for
        self._alone: Generation | None = None  # one device that nobody can come to, once it trains

    @property
    def generation(self) -> Generation | None:
        """The devices that train now; None: this one does not yet, or the others could not go on without one."""
        return self._alone if self.membership is None else self.membership.generation

    def begin(self, steps: int = 0, place: Any = None) -> Any:
        """Before the first step: keep the state as it is; on a device with an entrance, wait until it is let in.

        Args:
            steps: done before, where a run goes on.
            place: see `after_step`.

        Returns:
            the `place` after which this device trains.

        Raises:
            InputError: the job refuses it.
            DeviceLostError: a device was lost; or the job has ended, or its devices were lost.
        """
        if not self._strict:
            self.model.guard = None
        if self.entrance is not None:
            return self._come_in(*self.entrance)
        self.steps, self.place = steps, place
        if self.membership is not None:
            self._planned = self.membership.generation
            try:
                self._keep()
                self.states.arrived()
            except DeviceLostError:
                if not self.states.kept:
                    with suppress(DeviceLostError):  # by what would send it on; here it is kept all the same
                        self.states.keep(steps, self._others())
                raise
            roster.tell(members=self.membership.generation.members)
        elif self.model.group.devices == 1:
            self._alone = Generation(0, (0,))
            roster.tell(members=self._alone.members)
        return place

    def after_step(self, place: Any = None) -> None:
        """After each step of the optimizers.

        Args:
            place: where in the data it was, as JSON; what `recover` gives back.

        Raises:
            DeviceLostError: a device was lost.
            LeftError, StoppedError: this device, or all, were to end after this step.
        """
        self.steps, self.place = self.steps + 1, place
        roster.refresh()
        if self.membership is None:
            if self._wishes.leaves or self._wishes.ends:
                end_all(self.model.group, self.steps)
            return
        if self._pace is not None:
            self._pace.ended()
        judge = self._judge
        leaving, grows, ends = self._wishes.exchange(self.model.group, lambda: judge is not None and judge.wanted())
        if self.steps % self.every == 0 or leaving or grows:
            self.states.arrived()
            self._keep()
        if ends:
            self._wishes.ends = True  # also if a device is lost just now: who goes on then ends after the next step
            end_all(self.model.group, self.steps)
        elif leaving:
            self.states.arrived()
            part(self.model.group, self.membership, leaving, self.steps)
        elif grows and not self._strict:
            self._grow()
        if self._pace is not None:
            self._pace.begins()

    def leave(self) -> None:
        """Leave the job after the present step, of which nothing is then repeated: `after_step` raises LeftError here. May be
        called on any thread, or by a signal."""
        self._wishes.leaves = True

    def end(self) -> None:
        """End the training on all devices after the present step: `after_step` raises StoppedError on each. As `leave`."""
        self._wishes.ends = True

    def finish(self) -> None:
        """After the last step: keep its state, whatever `every` is. What follows may be repeated (see `Members.repeated`).

        Raises:
            DeviceLostError: a device was lost.
        """
        if self.membership is not None:
            if self.states.kept[-1].step != self.steps:
                self.states.arrived()
                self._keep()
            self.states.arrived()

    def _keep(self) -> None:
        # Also the sign that all have finished the step, and have what the others kept before: the older may go.
        wish = self.every if self._pace is None else self._pace.wish or self.every
        own = torch.tensor([float(self.states.has_changed), float(wish)], dtype=torch.float64)
        table, travels = share_tensor(self.model.group, own)
        travels.wait()
        if table[:, 0].any():
            self.states.tell_forms()
        self.every = int(table[:, 1].max())  # of all alike, also of devices that have come since
        with nullcontext() if self._pace is None else self._pace.keeping():
            self.states.keep(self.steps, self._others())
        if self._strict:
            self.states.arrived()
            share_number(self.model.group, 0.0)

    def _others(self) -> dict[str, Any]:
        return take(self.place, self.states.optimizers, self.others, self.model.group.torch_device)

    def _restore_others(self, kept: dict[str, Any]) -> None:
        works, device = self._works, self.model.group.torch_device
        self.place = restore(kept, self.states.optimizers, self.others, device, works.drawn)
        works.drawn = None

    def _grow(self) -> None:
        """All have kept the same step: those that are wanted come in, if they are still there."""
        assert self.membership is not None
        self.states.arrived()
        let_in(self.model.group, self.membership)

    def _come_in(self, entrance: Entrance, facts: Words) -> Any:
        """Into a job that trains already: wait until it lets this device in, which is alone so far."""
        group = self.model.group
        assert isinstance(group, ChangingGroup)
        self._facts = facts
        self.membership = entrance.enter(group, facts, self.tell or (lambda _: None))
        if self.newcomers is not None:
            self._judge = Judge(self.membership, self.newcomers)
        try:
            return self._go_on(self.membership.generation, GrownError(group.device, "newcomers are let in"))
        except StateLostError:
            raise
        except DeviceLostError as error:
            return self.recover(error)

    # --- after a loss -----------------------------------------------------------------------------------------------------

    def recover(self, error: DeviceLostError) -> Any:
        """After a step that failed because a device was lost: go on with those that are left.

        Returns:
            the `place` of the last step that all have finished, after which the training goes on.

        Raises:
            StateLostError: with the lost devices went what nobody else has.
            DeviceLostError: this device cannot go on; or the group is one that cannot change.
        """
        if self.membership is None or isinstance(error, LeftError):
            raise error
        self._wishes.forget()
        before = self.membership.generation
        for _ in range(MOST_TRIALS):
            try:
                self.membership.regroup(error)
                return self._go_on(before, error)
            except StateLostError:
                raise
            except DeviceLostError as another:
                if self.membership.is_out and self._wishes.leaves:
                    # The others went on before it had handed over: it has left.
                    raise LeftError(another.device, f"{another}; it was asked to leave") from another
                if self.membership.is_out:
                    self.membership.regroup(another)  # raises: why this device cannot go on
                error = another
        raise error

    def _go_on(self, before: Generation, error: ConvoyError) -> Any:
        """The devices have met: go back to the last step that together they have whole, by a plan for them; its `place`."""
        assert self.membership is not None
        kept = self.states.kept
        self._works.catch_up(self.model.group, kept[-1].others["random"] if kept else torch.get_rng_state())
        step, told = self.states.tell_kept()
        now, planned = self.membership.generation, self._planned
        lost = [d for d in before.members if d not in now.members]
        came, heard = self._hear_of_newcomers(step, told)
        if (step is None and self.fall_back is None) or (planned is None and self.model.group.device == 0):
            remedy = (
                "resume from the last checkpoint (--resume)" if self.steps else "no step was done yet, start it again"
            )
            raise StateLostError(lost[0] if lost else 0, f"{pieces_lost(lost)}: {remedy}")
        self._enter_plan(planned, now)
        done = self.steps
        if step is not None:
            others = self.states.restore(step, told)
            self.model.mark_pieces()
            self._restore_others(heard if others is None else others)
            self.steps = step
        else:
            self.states.forget()
            self.model.mark_pieces()
            assert self.fall_back is not None
            self.steps, self.place = self.fall_back()
        self._keep()
        forget_moves()
        roster.tell(device=self.membership.me, members=now.members)
        if self.tell is not None:
            there, joins = self.membership, done == 0 and self._facts is not None
            self.tell(Changed(
                there.me, len(there.generation.members), error, lost, came, there.parted, self.steps, done,
                saved=step is None, joins=joins,
            ).line())  # fmt: skip
        return self.place

    def _hear_of_newcomers(self, step: int | None, told: Sequence[Words]) -> tuple[list[str], Any]:
        """Who has come, in words; and what every device knows of the state, for who kept nothing of that step."""
        if step is None:  # a checkpoint brings the state back; joining devices know nothing of the run all the same
            has = [bool(row) for row in gather(self.model.group, "who trained before", self._planned is not None)]
        else:
            has = [bool(row["has"]) for row in told]
        if all(has) or not any(has):
            return [], None
        assert self.membership is not None
        return hear_of_newcomers(
            self.model.group, self.membership, has, self._facts,
            lambda: next((kept.others for kept in self.states.kept if kept.step == step), None), self.newcomers, self.story,
        )  # fmt: skip

    def _enter_plan(self, planned: Generation | None, now: Generation) -> None:
        """Take over the plan for the devices that train now, which the first of them makes."""
        if planned is not None:
            self.replan.note(self.model, planned.members)

        def make() -> str:
            assert planned is not None
            return self.replan(self.model, planned.members, now.members).to_json()

        text = from_first(self.model.group, "plan for those that train now", make)
        self.model.enter(Plan.from_json(text, "device 0's plan"))
        self._planned = now

    def close(self) -> None:
        """At the end of all: be no member any more. Every device calls it."""
        roster.tell(members=())
        if self._judge is not None:
            self._judge.close()
        if self.membership is not None:
            with suppress(DeviceLostError):  # whoever is lost now is not missed
                self.membership.close()
