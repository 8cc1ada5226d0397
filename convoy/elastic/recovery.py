"""Recovery: snapshots after steps, and how a training continues with the devices that remain or have joined."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.comm.collectives import from_first, gather, share_number, share_tensor
from convoy.comm.connection import Fields
from convoy.comm.group import ChangingGroup, Group, Pending
from convoy.elastic.admission import Admission, Judge, RunState, gather_joined
from convoy.elastic.agreement import Generation, Pairs
from convoy.elastic.entrance import Entrance
from convoy.elastic.regroup import Membership, UnnamedLossError
from convoy.elastic.snapshot import SnapshotInterval, SnapshotStore, Stateful, restore, take
from convoy.errors import ConvoyError, DeviceLostError
from convoy.machine import roster
from convoy.plan.coupling import plan_for
from convoy.plan.exchange_program import clear_move_cache
from convoy.plan.plan import Plan
from convoy.runtime.module import Distributed


class StateLostError(DeviceLostError):
    """The lost devices held shards of the model that no other device has."""


class LeftError(DeviceLostError):
    """This device has left the job, as requested."""


class StoppedError(ConvoyError):
    """The whole training has ended after a step, as requested."""


class GrownError(DeviceLostError):
    """Devices are joining: all devices regroup."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A change of the devices, as one device sees it.

    Attributes:
        me: this device's id.
        count: devices that train now.
        error: what ended the last step.
        lost: the ids of those that are gone.
        came: the names of the devices that joined.
        parted: pairs that did not reach each other, of which the second is out; also of losses before this one.
        step: the finished step after which all continue.
        done: steps that this device had finished before.
        saved: whether the state of that step came from a checkpoint.
        joins: whether this device has just joined.
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
        """Return one line: how the devices have changed, and after which step they continue."""
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
        """Return who is lost, and how."""
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
    """Return the reason why the others cannot continue without these devices."""
    names = ", ".join(map(str, lost))
    return f"with device{'s' * (len(lost) > 1)} {names} went pieces of the model that no other device has"


class Replan(Protocol):
    """A planner for the devices after a change. Devices are named by their ids, in the order of the group."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """Remember, on every device, what the model's present plan, that of `before`, has shown."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        """Return the plan for the devices `now`; called on the first of them."""
        ...


class InProportion:
    """A planner that keeps the strategies, and the proportions of the shares."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """Remember nothing."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        devices = [before.index(d) if d in before else None for d in now]
        return plan_for(model.plan, model.traced[True].graph, devices)


class MembershipRequests:
    """Requests to leave, to admit devices or to end. They are sent after each step and read one step later, so nobody waits.

    Attributes:
        leaves: this device is to leave.
        ends: all devices are to end.
    """

    def __init__(self) -> None:
        self.leaves, self.ends = False, False
        self._told: tuple[Tensor, Pending] | None = None

    def exchange(self, group: Group, wanted: Callable[[], bool]) -> tuple[list[int], bool, bool]:
        """Return the indices of the devices that leave after this step, whether devices join, and whether all end, as requested
        in the step before. Every device calls it.

        Args:
            wanted: returns whether this device knows a device to admit.
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
        """Drop the requests sent before a loss."""
        self._told = None


def may_leave(leaves: Sequence[bool]) -> list[int]:
    """Return which of the devices that are to leave do so now. The next device of each has the copies of its shards, and stays:
    it leaves after a later step."""
    return [d for d, each in enumerate(leaves) if each and not leaves[(d + 1) % len(leaves)]]


def end_all(group: Group, step: int) -> NoReturn:
    """End all devices after the same step. Every device calls it.

    Raises:
        StoppedError: always.
        DeviceLostError: a device was lost just now.
    """
    share_number(group, 0.0)  # everybody knows
    raise StoppedError(f"the training was stopped after step {step}, as it was asked to")


def hand_over(group: Group, membership: Membership, leaving: Sequence[int], step: int) -> NoReturn:
    """Let devices leave, once the others have copies of their shards of the same step. Every device calls it.

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


def admit(group: Group, membership: Membership) -> None:
    """Admit the wanted devices that still wait. All have a snapshot of the same step; every device calls it.

    Raises:
        GrownError: there are some: all regroup.
        DeviceLostError: a device was lost.
    """
    rows = from_first(group, "who comes in", lambda: membership.number(membership.applicants.wanted()))
    if rows:
        membership.grant(rows)
        raise GrownError(group.device, "devices are joining")


LEAVES, GROWS, ENDS = 1, 2, 4
"""The bits of a request: this device leaves; a device is to be admitted; all end."""


class CompletedWork:
    """The calls of `Members.repeated` that are complete. A device that was behind at a loss takes the result of the others.

    Attributes:
        count: completed calls.
        result: that of the last one.
        drawn: torch's random state after it, on a device that was behind.
    """

    def __init__(self) -> None:
        self.count = 0
        self.result: Any = None
        self.drawn: Tensor | None = None

    def done(self, result: Any) -> None:
        """Count one more."""
        self.count, self.result = self.count + 1, result

    def catch_up(self, group: Group, random: Tensor) -> None:
        """Take the result of a call that others had completed and this device had not. Every device calls it.

        Args:
            random: torch's random state after the last call that this device completed.
        """
        try:
            own = json.dumps([self.count, self.result, random.tolist()])
        except (TypeError, ValueError):
            own = json.dumps([self.count, None, random.tolist()])
        rows = [json.loads(text) for text in group.agree("completed calls", own)]
        count, result, drawn = max(rows, key=lambda row: int(row[0]))
        if count > self.count:
            self.count, self.result = count, result
            self.drawn = torch.tensor(drawn, dtype=torch.uint8)


MOST_TRIALS = 20
"""Losses in sequence without a step between them, after which the training ends."""


class Recovery:
    """The snapshots of one device, and its recovery after a loss; `Members` builds on it."""

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
        admission: Admission | None,
        entrance: tuple[Entrance, Fields] | None,
    ) -> None:
        self.model, self.others, self.every, self.tell = model, tuple(others), every or 1, tell
        self.replan, self.membership, self.admission, self.entrance = replan, membership, admission, entrance
        self.steps = 0
        self.place: Any = None
        self.run_state: RunState | None = None
        self.fall_back: Callable[[], tuple[int, Any]] | None = None
        """Loads the last checkpoint where no snapshot is complete; returns its step and place. Every device calls it."""
        self.states = SnapshotStore(model, optimizers, spares=spares)
        self._pace = SnapshotInterval() if every is None else None
        self._requests, self._completed = MembershipRequests(), CompletedWork()
        self._strict = False  # what the loop did after a step cannot be undone: all wait until all have its snapshot
        self._facts: Fields | None = None  # how this device described itself, where it joined later
        self._judge = None if membership is None or admission is None else Judge(membership, admission)
        self._planned: Generation | None = None  # the generation of the model's plan
        self._alone: Generation | None = None  # of a device that nobody can join, once it trains

    @property
    def generation(self) -> Generation | None:
        """The devices that train now; None before this one does, or where the others could not continue without it."""
        return self._alone if self.membership is None else self.membership.generation

    def begin(self, steps: int = 0, place: Any = None) -> Any:
        """Take the first snapshot, before the first step; on a joining device, wait until it is admitted.

        Args:
            steps: done before, in a resumed run.
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
                        self.states.take(steps, self._others())
                raise
            roster.update(members=self.membership.generation.members)
        elif self.model.group.devices == 1:
            self._alone = Generation(0, (0,))
            roster.update(members=self._alone.members)
        return place

    def after_step(self, place: Any = None) -> None:
        """Take a snapshot if it is due, and act on requests. Call it after each step of the optimizers.

        Args:
            place: where in the data it was, as JSON; what `recover` gives back.

        Raises:
            DeviceLostError: a device was lost.
            LeftError, StoppedError: this device, or all, were to end after this step.
        """
        self.steps, self.place = self.steps + 1, place
        roster.refresh()
        if self.membership is None:
            if self._requests.leaves or self._requests.ends:
                end_all(self.model.group, self.steps)
            return
        if self._pace is not None:
            self._pace.ended()
        judge = self._judge
        leaving, grows, ends = self._requests.exchange(self.model.group, lambda: judge is not None and judge.wanted())
        if self.steps % self.every == 0 or leaving or grows:
            self.states.arrived()
            self._keep()
        if ends:
            self._requests.ends = True  # if a device is lost just now, those that remain end after the next step
            end_all(self.model.group, self.steps)
        elif leaving:
            self.states.arrived()
            hand_over(self.model.group, self.membership, leaving, self.steps)
        elif grows and not self._strict:
            self._grow()
        if self._pace is not None:
            self._pace.begins()

    def leave(self) -> None:
        """Leave the job after the present step: `after_step` raises LeftError here. Any thread or signal may call it."""
        self._requests.leaves = True

    def end(self) -> None:
        """End the training on all devices after the present step: `after_step` raises StoppedError on each. As `leave`."""
        self._requests.ends = True

    def finish(self) -> None:
        """Take a snapshot after the last step, whatever `every` is, so that what follows can be repeated (`Members.repeated`).

        Raises:
            DeviceLostError: a device was lost.
        """
        if self.membership is not None:
            if self.states.kept[-1].step != self.steps:
                self.states.arrived()
                self._keep()
            self.states.arrived()

    def _keep(self) -> None:
        # This exchange also shows that all have finished the step and have the snapshot before: the older one may go.
        wish = self.every if self._pace is None else self._pace.wish or self.every
        own = torch.tensor([float(self.states.has_changed), float(wish)], dtype=torch.float64)
        table, travels = share_tensor(self.model.group, own)
        travels.wait()
        if table[:, 0].any():
            self.states.share_forms()
        self.every = int(table[:, 1].max())  # the same on all devices, also on those that joined since
        with nullcontext() if self._pace is None else self._pace.keeping():
            self.states.take(self.steps, self._others())
        if self._strict:
            self.states.arrived()
            share_number(self.model.group, 0.0)

    def _others(self) -> dict[str, Any]:
        return take(self.place, self.states.optimizers, self.others, self.model.group.torch_device)

    def _restore_others(self, kept: dict[str, Any]) -> None:
        works, device = self._completed, self.model.group.torch_device
        self.place = restore(kept, self.states.optimizers, self.others, device, works.drawn)
        works.drawn = None

    def _grow(self) -> None:
        """All have kept the same step: those that are wanted come in, if they are still there."""
        assert self.membership is not None
        self.states.arrived()
        admit(self.model.group, self.membership)

    def _come_in(self, entrance: Entrance, facts: Fields) -> Any:
        """Join a running job: wait until it admits this device, which is alone so far."""
        group = self.model.group
        assert isinstance(group, ChangingGroup)
        self._facts = facts
        self.membership = entrance.enter(group, facts, self.tell or (lambda _: None))
        if self.admission is not None:
            self._judge = Judge(self.membership, self.admission)
        try:
            return self._resume(self.membership.generation, GrownError(group.device, "devices are joining"))
        except StateLostError:
            raise
        except DeviceLostError as error:
            return self.recover(error)

    # --- after a loss -----------------------------------------------------------------------------------------------------

    def recover(self, error: DeviceLostError) -> Any:
        """Regroup after a step that failed because a device was lost, and return to the last complete snapshot.

        Returns:
            the `place` of that snapshot, after which the training continues.

        Raises:
            StateLostError: no snapshot is complete without the lost devices.
            DeviceLostError: this device cannot continue; or its group cannot change.
        """
        if self.membership is None or isinstance(error, LeftError):
            raise error
        self._requests.forget()
        before = self.membership.generation
        for _ in range(MOST_TRIALS):
            try:
                self.membership.regroup(error)
                return self._resume(before, error)
            except StateLostError:
                raise
            except DeviceLostError as another:
                if self.membership.is_out and self._requests.leaves:
                    # The others continued before it had handed over: it has left.
                    raise LeftError(another.device, f"{another}; it was asked to leave") from another
                if self.membership.is_out:
                    self.membership.regroup(another)  # raises: why this device cannot continue
                error = another
        raise error

    def _resume(self, before: Generation, error: ConvoyError) -> Any:
        """Return to the last snapshot that the present devices have completely, with a plan for them. Return its `place`."""
        assert self.membership is not None
        kept = self.states.kept
        self._completed.catch_up(self.model.group, kept[-1].others["random"] if kept else torch.get_rng_state())
        step, told = self.states.gather_held()
        now, planned = self.membership.generation, self._planned
        lost = [d for d in before.members if d not in now.members]
        came, heard = self._gather_joined(step, told)
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
        clear_move_cache()
        roster.update(device=self.membership.me, members=now.members)
        if self.tell is not None:
            there, joins = self.membership, done == 0 and self._facts is not None
            self.tell(Changed(
                there.me, len(there.generation.members), error, lost, came, there.parted, self.steps, done,
                saved=step is None, joins=joins,
            ).line())  # fmt: skip
        return self.place

    def _gather_joined(self, step: int | None, told: Sequence[Fields]) -> tuple[list[str], Any]:
        """Return the names of the devices that joined, and the state beside the model for devices without a snapshot."""
        if step is None:  # a checkpoint brings the state back; joining devices know nothing of the run all the same
            has = [bool(row) for row in gather(self.model.group, "who trained before", self._planned is not None)]
        else:
            has = [bool(row["has"]) for row in told]
        if all(has) or not any(has):
            return [], None
        assert self.membership is not None
        return gather_joined(
            self.model.group, self.membership, has, self._facts,
            lambda: next((kept.others for kept in self.states.kept if kept.step == step), None), self.admission, self.run_state,
        )  # fmt: skip

    def _enter_plan(self, planned: Generation | None, now: Generation) -> None:
        """Enter the plan for the present devices, which the first of them makes."""
        if planned is not None:
            self.replan.note(self.model, planned.members)

        def make() -> str:
            assert planned is not None
            return self.replan(self.model, planned.members, now.members).to_json()

        text = from_first(self.model.group, "plan for those that train now", make)
        self.model.enter(Plan.from_json(text, "device 0's plan"))
        self._planned = now

    def close(self) -> None:
        """Leave the membership at the end of all work. Every device calls it."""
        roster.update(members=())
        if self._judge is not None:
            self._judge.close()
        if self.membership is not None:
            with suppress(DeviceLostError):  # a device that is lost now does no harm
                self.membership.close()
