"""Members: what a training loop uses around its steps, and between them, so that devices may be lost, leave and join."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.checkpoint import Stateful
from convoy.comm.connection import Fields
from convoy.comm.control_messages import from_first, gather, share_number, share_tensor
from convoy.comm.group import ChangingGroup, Pending
from convoy.comm.processes import JoinedGroup
from convoy.elastic.admission import (
    Admission,
    AdmissionThread,
    RunState,
    ScriptAdmission,
    facts_of,
    gather_joined,
    offer,
)
from convoy.elastic.agreement import Generation
from convoy.elastic.entrance import Entrance
from convoy.elastic.regroup import Home, Membership, UnnamedLossError, home_here
from convoy.elastic.snapshot import SnapshotInterval, SnapshotStore, restore, take
from convoy.errors import ConvoyError, DeviceLostError, InputError
from convoy.machine import roster
from convoy.machine.process import handle_signals
from convoy.plan.coupling import plan_for
from convoy.plan.exchange_program import clear_move_cache
from convoy.plan.plan import Plan
from convoy.runtime.module import Distributed, StaleBatchError, not_distributed

T = TypeVar("T")

ASKED_STATUS = 2
"""Exit status of a script that ended by request, as of `convoy train`."""

LEAVES, GROWS, ENDS = 1, 2, 4
"""The bits of a request: this device leaves; a device is to be admitted; all end."""

MOST_TRIALS = 20
"""Losses in sequence without a step between them, after which the training ends."""


class StateLostError(DeviceLostError):
    """The lost devices held shards of the model that no other device has."""


class LeftError(DeviceLostError):
    """This device has left the job, as requested."""


class StoppedError(ConvoyError):
    """The whole training has ended after a step, as requested."""


class GrownError(DeviceLostError):
    """Devices are joining: all devices regroup."""


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
        pass

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        devices = [before.index(d) if d in before else None for d in now]
        return plan_for(model.plan, model.traced[True].graph, devices)


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """How devices join a job.

    Attributes:
        admission: decides about join requests, and sends joining devices the state of the run; None: no device is admitted.
        home: where a device that trains alone answers join requests.
        entrance: of this device, if it joins a running job, with its description of itself.
    """

    admission: Admission | None = None
    home: Home | None = None
    entrance: tuple[Entrance, Fields] | None = None


@dataclass
class Attempt:
    """One attempt at a step.

    Attributes:
        finished: whether the step is complete; otherwise its batches come again. Known after the step.
    """

    finished: bool = False


class Members:
    """The membership of one device in an elastic training. Every device makes one before the first step.

    It takes snapshots after steps, and copies the shards that only this device has to the next one. When a device is lost, the
    others regroup, return to the last step that all have finished, plan again, and continue: the trajectory stays that of one
    device.

    Args:
        model, optimizers: all optimizers that work on the model's parameters.
        others: schedules, a scaler: whatever else has a state that changes from step to step.
        every: steps from one snapshot to the next; the steps since are repeated after a loss. None: chosen so that snapshots
            take at most 2 % of the time, measured in the first steps.
        replan: makes the plan after a change, as `Plans.anew` does; None: the same strategies, with shares in proportion.
        tell: called with a line of text when the devices have changed.
        joins: how devices join; None: as the environment of `convoy run` says.

    Attributes:
        steps: finished steps.
        run_state: what a joining device must know of the run; see `RunState`.
        fall_back: loads the last checkpoint where no snapshot is complete; returns its step and place. Every device calls it.

    Raises:
        InputError: a model that is not distributed, or by inexact mixing; `every` below 1.
    """

    def __init__(
        self,
        model: Distributed,
        *optimizers: Optimizer,
        others: Sequence[Stateful] = (),
        every: int | None = 1,
        replan: Replan | None = None,
        tell: Callable[[str], None] | None = None,
        joins: JoinOptions | None = None,
    ) -> None:
        if not isinstance(model, Distributed):
            raise not_distributed("Members", model)
        if every is not None and every < 1:
            raise InputError(f"every={every}: steps from one snapshot to the next; give 1 or more")
        if model.plan.mixes:
            raise InputError(
                f"Members with reduce {model.plan.reduce}, where each device has weights of its own: leave it out"
            )
        self.model, self.others, self.every, self.tell = model, tuple(others), every or 1, tell
        self.replan, joins, group = replan or InProportion(), joins or JoinOptions(), model.group
        self.admission, self.entrance, home = joins.admission, joins.entrance, joins.home
        if self.entrance is None and isinstance(group, ChangingGroup) and group.entrance is not None:
            self.entrance, group.entrance = (group.entrance, facts_of(model)), None
        listens = home is None and (home := home_here(group)) is not None
        if self.admission is None and (self.entrance is not None or listens):
            self.admission = ScriptAdmission(model, self.replan, lambda: self._epoch is not None)
        self.membership: Membership | None = None
        if isinstance(group, ChangingGroup) and (isinstance(group.present, JoinedGroup) or home is not None):
            self.membership = Membership(group, home)
        self.admissions: AdmissionThread | None = None
        if self.membership is not None and self.admission is not None:
            self.admissions = AdmissionThread(self.membership, self.admission)
        self.steps = 0
        self.place: Any = None
        self.run_state: RunState | None = None
        self.fall_back: Callable[[], tuple[int, Any]] | None = None
        self.states = SnapshotStore(model, optimizers)
        self._interval = SnapshotInterval() if every is None else None
        self._leaves, self._ends = False, False  # requests
        self._requests: tuple[Tensor, Pending] | None = None  # of all devices, read one step after they were sent
        self._planned: Generation | None = None  # the generation of the model's plan
        self._alone: Generation | None = None  # of a device that nobody can join, once it trains
        self._facts: Fields | None = None  # how this device described itself, where it joined later
        # Of a script's own loop. What it did after a step cannot be undone, so all wait until all have its snapshot.
        self._is_script = False
        self._joins_here = False  # within `epochs`
        self._epoch: int | None = None  # of `epochs`
        self._inside = False  # what is repeated as a whole
        self._completed: tuple[int, Any] = 0, None  # calls of `repeated`, and the result of the last one
        self._random_state: Tensor | None = None  # after that call, on a device that was behind
        self._signals = ExitStack()
        model.guard = self._begin_epoch

    @property
    def generation(self) -> Generation | None:
        """The devices that train now; None before this one does, or where the others could not continue without it."""
        return self._alone if self.membership is None else self.membership.generation

    # --- a script's own loop ------------------------------------------------------------------------------------------

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Yield the numbers of the epochs of your own loop, from `start` to `count - 1`. Devices join at the start of each.

        On a joining device it waits until the others start their next epoch, and yields from that one on::

            for epoch in members.epochs(20):
                for x, y in loader:
                    with members.step():
                        ...

        """
        self._joins_here = True
        self._start()
        has_joined = self._facts is not None and self._epoch is not None
        for epoch in range(start if self._epoch is None else self._epoch, count):
            self._epoch = epoch
            if not has_joined and self.membership is not None and self.admission is not None:
                self._update_snapshot(torch.get_rng_state())
                try:
                    self._admit()
                except DeviceLostError as error:
                    self.recover(error)
            has_joined = False
            yield epoch

    @contextmanager
    def step(self) -> Iterator[Attempt]:
        """Surround one step of your own loop, from forward to the optimizer's step. If a device is lost in it, the rest of the
        body is skipped, and Convoy's loader returns the same batches again, see `Attempt`.

        A step that one device has finished is finished for all: at its end the devices wait until all have its snapshot, with
        the copies.

        Raises:
            SystemExit: this device, or all, were to end after this step. One line has been printed.
            DeviceLostError: see `recover`.
        """
        self._start()
        wanted = self.steps + 1
        # Random numbers drawn since, such as the order of an epoch, are not drawn again.
        self._update_snapshot(torch.get_rng_state())
        attempt = Attempt()
        try:
            try:
                yield attempt
                if not self.model.stale:
                    self.after_step()
            except StaleBatchError:
                pass  # the loader returns it again
            except DeviceLostError as error:
                self.recover(error)
                self.model.repeats += self.steps < wanted
        except (LeftError, StoppedError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(ASKED_STATUS) from error
        self.model.stale = False
        attempt.finished = self.steps == wanted
        self.model.finished_steps = self.steps

    def repeated(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which communicates between two steps, such as a test. It is repeated if a device is lost.
        If others had completed it by then, this device gets their result if JSON can hold it, else None.

        Before the first of `epochs` a joining device gets None: the others did the work without it.

        Raises:
            DeviceLostError: see `recover`; or there is no snapshot of the last step.
        """
        if self._inside:
            return work()
        if self.entrance is not None and self.membership is None:
            return None  # type: ignore[return-value]
        if self.membership is not None and self._planned is None:
            self._start()  # from here on a loss ends nothing
        return self._repeated(work)

    def _start(self) -> None:
        """Begin, before the first communication of a script's loop."""
        if self._is_script:
            return
        if self.entrance is not None and self.membership is None and not self._joins_here:
            raise InputError(
                "this device joins a running job, which it can at the start of an epoch: write "
                "`for epoch in members.epochs(n):` around the loop over batches, on all devices"
            )
        if self.every > 1:
            raise InputError(
                f"every={self.every} with `with members.step()`: what this loop has done after a step is not undone; leave it "
                "out"
            )
        self._is_script, self._interval = True, None
        self.run_state = lambda: self._epoch, lambda epoch: setattr(self, "_epoch", epoch)
        self._signals.enter_context(handle_signals(self))
        # Where the group has broken, the next message reports it again.
        with suppress(DeviceLostError) if self.entrance is None else nullcontext():
            self.begin()
        if self.membership is not None and self.admission is not None:
            self.membership.offer = offer()

    def _begin_epoch(self, loader: Any) -> tuple[int, list[list[int]]]:
        """Return the loader's seed and batches of the epoch that it begins."""
        work: Callable[[], tuple[int, list[list[int]]]] = partial(loader.begin, joined=self._facts is not None)
        if self._inside:
            return work()
        self._start()
        return self._repeated(work)

    def _update_snapshot(self, random: Tensor | None = None) -> None:
        """Add to the snapshot what the script has done since the last step, such as a schedule's step after an epoch."""
        if self._is_script and self.states.kept:
            kept = self.states.kept[-1]
            kept.others = {**self._others(), "random": kept.others["random"] if random is None else random}

    def _repeated(self, work: Callable[[], T]) -> T:
        self._update_snapshot()
        while True:
            try:
                self._inside = True
                try:
                    result = work()
                    if self.membership is not None:
                        share_number(self.model.group, 0.0)  # all have completed it
                finally:
                    self._inside = False
                self._completed = self._completed[0] + 1, result
                return result
            except DeviceLostError as error:
                count, steps = self._completed[0], self.steps
                self.recover(error)
                if self.steps != steps:
                    raise error
                if self._completed[0] > count:
                    return self._completed[1]  # type: ignore[no-any-return]

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, steps: int = 0, place: Any = None) -> Any:
        """Take the first snapshot, before the first step; on a joining device, wait until it is admitted.

        Args:
            steps: done before, in a resumed run.
            place: see `after_step`.

        Returns:
            the `place` after which this device trains.
        """
        if not self._is_script:
            self.model.guard = None
        if self.entrance is not None:
            return self._join(*self.entrance)
        self.steps, self.place = steps, place
        if self.membership is not None:
            self._planned = self.membership.generation
            try:
                self._take_snapshot()
                self.states.arrived()
            except DeviceLostError:
                if not self.states.kept:
                    with suppress(DeviceLostError):  # in sending copies; the local snapshot is there all the same
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
            place: where in the data it was, as JSON; what `recover` returns.

        Raises:
            LeftError, StoppedError: this device, or all, were to end after this step.
        """
        self.steps, self.place = self.steps + 1, place
        if self.membership is None:
            if self._leaves or self._ends:
                self._end_all()
            return
        if self._interval is not None:
            self._interval.end_step()
        leaving, grows, ends = self._exchange_requests()
        if self.steps % self.every == 0 or leaving or grows:
            self.states.arrived()
            self._take_snapshot()
        if ends:
            self._ends = True  # if a device is lost just now, those that remain end after the next step
            self._end_all()
        elif leaving:
            self._hand_over(leaving)
        elif grows and not self._is_script:
            self._admit()
        if self._interval is not None:
            self._interval.begin_step()

    def leave(self) -> None:
        """Leave the job after the present step: `after_step` raises LeftError here. Any thread or signal may call it."""
        self._leaves = True

    def end(self) -> None:
        """End the training on all devices after the present step: `after_step` raises StoppedError on each. As `leave`."""
        self._ends = True

    def finish(self) -> None:
        """Take a snapshot after the last step, whatever `every` is, so that what follows can be repeated (`repeated`)."""
        if self.membership is not None:
            if self.states.kept[-1].step != self.steps:
                self.states.arrived()
                self._take_snapshot()
            self.states.arrived()

    def close(self) -> None:
        """Leave the membership at the end of all work. Every device calls it."""
        self._signals.close()
        roster.update(members=())
        if self.admissions is not None:
            self.admissions.close()
        if self.membership is not None:
            with suppress(DeviceLostError):  # a device that is lost now does no harm
                self.membership.close()

    def _take_snapshot(self) -> None:
        # This exchange also shows that all have finished the step and have the snapshot before: the older one may go.
        every = self.every if self._interval is None else self._interval.every or self.every
        own = torch.tensor([float(self.states.has_changed), float(every)], dtype=torch.float64)
        table, pending = share_tensor(self.model.group, own)
        pending.wait()
        if table[:, 0].any():
            self.states.share_forms()
        self.every = int(table[:, 1].max())  # the same on all devices, also on those that joined since
        with nullcontext() if self._interval is None else self._interval.timing():
            self.states.take(self.steps, self._others())
        if self._is_script:
            self.states.arrived()
            share_number(self.model.group, 0.0)

    def _others(self) -> dict[str, Any]:
        return take(self.place, self.states.optimizers, self.others, self.model.group.torch_device)

    # --- requests: sent after each step and read one step later, so that nobody waits -----------------------------------

    def _exchange_requests(self) -> tuple[list[int], bool, bool]:
        """Return the indices of the devices that leave after this step, whether devices join, and whether all end, as requested
        in the step before. Every device calls it."""
        leaving, grows, ends = [], False, False
        if self._requests is not None:
            table, pending = self._requests
            pending.wait()
            requests = [int(each) for each in table.tolist()]
            leaving = may_leave([bool(each & LEAVES) for each in requests])
            grows = any(each & GROWS for each in requests)
            # Where all leave nobody continues, so they end together, and save.
            ends = any(each & ENDS for each in requests) or all(each & LEAVES for each in requests)
        wants = self.admissions is not None and self.admissions.wanted()
        own = torch.tensor(float(LEAVES * self._leaves + GROWS * wants + ENDS * self._ends), dtype=torch.float64)
        self._requests = share_tensor(self.model.group, own)
        return leaving, grows, ends

    def _end_all(self) -> NoReturn:
        share_number(self.model.group, 0.0)  # all devices have read the request
        raise StoppedError(f"the training was stopped after step {self.steps}, as it was asked to")

    def _hand_over(self, leaving: Sequence[int]) -> NoReturn:
        """Let devices leave, once the others have copies of their shards of the same step."""
        assert self.membership is not None
        group, me = self.model.group, self.membership.me
        self.states.arrived()
        share_number(group, 0.0)  # all devices have the copies
        if group.device in leaving:
            error = LeftError(me, f"device {me} has left the job after step {self.steps}, as it was asked to")
            self.membership.depart(error)
            raise error
        left = group.ids[leaving[0]]
        raise DeviceLostError(left, f"device {left} left the job")

    def _admit(self) -> None:
        """Admit the wanted devices that still wait: GrownError. All have a snapshot of the same step."""
        membership = self.membership
        assert membership is not None
        self.states.arrived()
        rows = from_first(self.model.group, "who comes in", lambda: membership.number(membership.applicants.wanted()))
        if rows:
            membership.grant(rows)
            raise GrownError(self.model.group.device, "devices are joining")

    def _join(self, entrance: Entrance, facts: Fields) -> Any:
        """Join a running job: wait until it admits this device, which is alone so far."""
        group = self.model.group
        assert isinstance(group, ChangingGroup)
        self._facts = facts
        self.membership = entrance.enter(group, facts, self.tell or (lambda _: None))
        if self.admission is not None:
            self.admissions = AdmissionThread(self.membership, self.admission)
        try:
            return self._resume(self.membership.generation, GrownError(group.device, "devices are joining"))
        except StateLostError:
            raise
        except DeviceLostError as error:
            return self.recover(error)

    # --- recovery -----------------------------------------------------------------------------------------------------

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
        self._requests = None
        before = self.membership.generation
        for _ in range(MOST_TRIALS):
            try:
                self.membership.regroup(error)
                return self._resume(before, error)
            except StateLostError:
                raise
            except DeviceLostError as another:
                if self.membership.is_out and self._leaves:
                    # The others continued before it had handed over: it has left.
                    raise LeftError(another.device, f"{another}; it was asked to leave") from another
                if self.membership.is_out:
                    self.membership.regroup(another)  # raises: why this device cannot continue
                error = another
        raise error

    def _resume(self, before: Generation, error: ConvoyError) -> Any:
        """Return to the last snapshot that the present devices have completely, with a plan for them. Return its `place`."""
        assert self.membership is not None
        self._catch_up()
        step, held = self.states.gather_held()
        now, planned = self.membership.generation, self._planned
        lost = [d for d in before.members if d not in now.members]
        joined, others_there = self._gather_joined(step, held)
        if (step is None and self.fall_back is None) or (planned is None and self.model.group.device == 0):
            remedy = (
                "resume from the last checkpoint (--resume)" if self.steps else "no step was done yet, start it again"
            )
            raise StateLostError(lost[0] if lost else 0, f"{_shards_lost(lost)}: {remedy}")
        if planned is not None:
            self.replan.note(self.model, planned.members)

        def make() -> str:
            assert planned is not None
            return self.replan(self.model, planned.members, now.members).to_json()

        text = from_first(self.model.group, "plan for those that train now", make)
        self.model.enter(Plan.from_json(text, "device 0's plan"))
        self._planned, done = now, self.steps
        if step is not None:
            others = self.states.restore(step, held)
            self.model.mark_shards()
            others, device = others_there if others is None else others, self.model.group.torch_device
            self.place = restore(others, self.states.optimizers, self.others, device, self._random_state)
            self._random_state = None
            self.steps = step
        else:
            self.states.forget()
            self.model.mark_shards()
            assert self.fall_back is not None
            self.steps, self.place = self.fall_back()
        self._take_snapshot()
        clear_move_cache()
        roster.update(device=self.membership.me, members=now.members)
        if self.tell is not None:
            where = f"after step {self.steps}"
            if done == 0 and self._facts is not None:
                self.tell(f"joined as device {self.membership.me}; {len(now.members)} train {where}")
            else:
                changes = [_loss_line(lost, self.membership.parted, error)] if lost or not joined else []
                changes += [f"{' and '.join(joined)} joined"] if joined else []
                if step is None:
                    where = f"from the checkpoint of step {self.steps}, since {_shards_lost(lost)}"
                again = f"; finished steps that are repeated: {done - self.steps}" if done > self.steps else ""
                self.tell(f"{', '.join(changes)}; {len(now.members)} go on {where}{again}")
        return self.place

    def _catch_up(self) -> None:
        """Take the result of a call of `repeated` that others had completed and this device had not. Every device calls it."""
        kept, (count, result) = self.states.kept, self._completed
        random = kept[-1].others["random"] if kept else torch.get_rng_state()
        try:
            own = json.dumps([count, result, random.tolist()])
        except (TypeError, ValueError):
            own = json.dumps([count, None, random.tolist()])
        rows = [json.loads(text) for text in self.model.group.agree("completed calls", own)]
        most, result, random_there = max(rows, key=lambda row: int(row[0]))
        if most > count:
            self._completed = most, result
            self._random_state = torch.tensor(random_there, dtype=torch.uint8)

    def _gather_joined(self, step: int | None, held: Sequence[Fields]) -> tuple[list[str], Any]:
        """Return the names of the devices that joined, and the state besides the model for devices without a snapshot."""
        if step is None:  # a checkpoint restores the state; joining devices know nothing of the run all the same
            has = [bool(row) for row in gather(self.model.group, "who trained before", self._planned is not None)]
        else:
            has = [bool(row["has"]) for row in held]
        if all(has) or not any(has):
            return [], None
        assert self.membership is not None
        others = next((kept.others for kept in self.states.kept if kept.step == step), None)
        return gather_joined(self.membership, has, self._facts, others, self.admission, self.run_state)


def may_leave(leaves: Sequence[bool]) -> list[int]:
    """Return which of the devices that are to leave do so now. The next device of each has the copies of its shards, and stays:
    it leaves after a later step."""
    return [d for d, each in enumerate(leaves) if each and not leaves[(d + 1) % len(leaves)]]


def _shards_lost(lost: Sequence[int]) -> str:
    names = ", ".join(map(str, lost))
    return f"with device{'s' * (len(lost) > 1)} {names} went shards of the model that no other device has"


def _loss_line(lost: Sequence[int], parted: frozenset[tuple[int, int]], error: ConvoyError) -> str:
    """Return which devices are lost, and why."""
    pairs = sorted(pair for pair in parted if pair[1] in lost)
    silent = [d for d in lost if all(d != pair[1] for pair in pairs)]
    names, why = ", ".join(map(str, silent)), str(error).partition(". ")[0]
    line = f"device{'s' * (len(silent) > 1)} {names} lost" if silent else "a connection was lost"
    if pairs:  # the cause that this device knows may be of another loss
        reasons = [f"devices {one} and {other} do not reach each other: device {other} is out" for one, other in pairs]
        return "; ".join([*([line] if silent else []), *reasons])
    if len(lost) == 1 and why.startswith(f"device {lost[0]} "):
        return why
    return line if isinstance(error, UnnamedLossError | GrownError) else f"{line} ({why})"
