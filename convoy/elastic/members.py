"""Runs training steps while devices are lost, leave and join: recovery, admission and requests."""

import json
import math
import sys
import time
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
from convoy.elastic.admission import AdmissionThread, RunState, ScriptAdmission, facts_of, gather_joined, offer
from convoy.elastic.agreement import Generation
from convoy.elastic.entrance import Entrance
from convoy.elastic.regroup import Home, Membership, UnnamedLossError, home_here
from convoy.elastic.snapshot import TIMED, SnapshotStore, interval_of, restore, take
from convoy.errors import ConvoyError, DeviceLostError, InputError
from convoy.machine import roster
from convoy.machine.process import handle_signals
from convoy.plan.coupling import plan_for
from convoy.plan.exchange_program import clear_move_cache
from convoy.plan.plan import Plan
from convoy.runtime.module import Distributed, StaleBatchError, not_distributed

T = TypeVar("T")

ASKED_STATUS = 2  # exit status of a script that ended on request, as for `convoy train`
LEAVES, GROWS, ENDS = 1, 2, 4  # bits of a request: this device leaves; a device may join; all devices end
MOST_TRIALS = 20  # attempts to recover without a finished step between them


class StateLostError(DeviceLostError):
    """The error if the lost devices held shards of the model that no other device has."""


class LeftError(DeviceLostError):
    """The error on a device that has left the job, as requested."""


class StoppedError(ConvoyError):
    """The error on all devices after the training has ended, as requested."""


class GrownError(DeviceLostError):
    """The error on all devices when other devices join, after which all regroup."""


class Replan(Protocol):
    """A planner for changed devices, which are given by id in group order."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """Record the measurements of the model's current plan, made for devices `before`. Every device calls it."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        """Return the plan for the devices `now`. Only the first device calls it."""
        ...


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options for joining devices.

    Attributes:
        admission: decides about join requests; None: admit no device.
        home: address at which a device that trains alone answers join requests.
        entrance: if this device joins a running job, the client for joining and the device's description of itself.
    """

    admission: ScriptAdmission | None = None
    home: Home | None = None
    entrance: tuple[Entrance, Fields] | None = None


@dataclass
class Attempt:
    """One attempt at a step. If it is not `finished` afterwards, the loader returns its batches again."""

    finished: bool = False


class Members:
    """The membership of one device in an elastic training. Every device creates one before the first step.

    It takes snapshots after steps, and copies the shards that only this device has to the next device. When a device is lost,
    the others regroup, return to the last step that all have finished, plan again, and continue as one device would.

    Args:
        model, optimizers: the model and all optimizers of its parameters.
        others: schedules, a scaler, and other objects whose state changes from step to step.
        every: steps from one snapshot to the next; they are repeated if a device is lost. None: choose it from the first
            steps, so that snapshots take at most 2 % of the time.
        replan: returns the plan after a change, such as `Plans.replanner()`; None: keep strategies and proportions of shares.
        tell: called with a line of text when the devices have changed.
        joins: options for joining devices; None: read them from the environment of `convoy run`.

    Attributes:
        steps: number of finished steps.
        run_state: reads and loads the state of the run that joining devices need; see `RunState`.
        fall_back: loads the last checkpoint if no snapshot is complete; returns its step and place. Every device calls it.
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
        self.model, self.others, self.every, self.tell = model, tuple(others), every or 1, tell
        self.replan, joins, group = replan, joins or JoinOptions(), model.group
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
        self._timed = every is None  # time steps and snapshots, to choose the interval
        self._snapshots_s: list[float] = []
        self._steps_s: list[float] = []
        self._began_s: float | None = None
        self._longest_s, self._ended_s = 5.0, math.inf  # steps; shorter ones need no longer time to leave
        self._leaves, self._ends = False, False  # requests
        self._requests: tuple[Tensor, Pending] | None = None  # of all devices; sent in one step, read in the next
        self._planned: Generation | None = None  # the generation of the model's plan
        self._alone: Generation | None = None  # the generation of a device that trains without membership
        self._facts: Fields | None = None  # this device's description, if it joined a running job
        # A script's loop cannot undo its actions after a step, so each device waits until all have the snapshot.
        self._is_script = False
        self._joins_here = False  # the script uses `epochs`, where devices join
        self._epoch: int | None = None  # current epoch of `epochs`
        self._inside = False  # within a call of `repeated`
        self._completed: tuple[int, Any] = 0, None  # calls of `repeated`, and the result of the last one
        self._random_state: Tensor | None = None  # after that call, on a device that had not completed it
        self._signals = ExitStack()
        model.guard = self._begin_epoch

    @property
    def generation(self) -> Generation | None:
        """The devices that train now; None before this device trains, or if the job is not elastic."""
        return self._alone if self.membership is None else self.membership.generation

    # --- a script's own loop ------------------------------------------------------------------------------------------

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Yield the epoch numbers of your own loop, from `start` to `count - 1`. Devices join at the start of each epoch.

        ::

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
        """Enclose one step of your own loop, from forward to the optimizer's step. If a device is lost inside, skip the rest of
        the block; Convoy's loader returns the same batches again, see `Attempt`.

        All devices finish a step together: at its end they wait until all have its snapshot and copies.

        Raises:
            SystemExit: this device, or all devices, ended after this step on request. One line was printed.
            DeviceLostError: see `recover`.
        """
        self._start()
        wanted = self.steps + 1
        # A repeated step must not draw earlier random numbers again, such as an epoch's order.
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
        """Return the result of `work`, which communicates between two steps, such as a test. Repeat it if a device is lost.

        If others had already completed it, this device gets their result (None if it is not JSON). A joining device gets None
        before its first epoch, because the others did the work without it.

        Raises:
            DeviceLostError: see `recover`; or there is no snapshot of the last step.
        """
        if self._inside:
            return work()
        if self.entrance is not None and self.membership is None:
            return None  # type: ignore[return-value]
        if self.membership is not None and self._planned is None:
            self._start()  # from here on, a lost device does not end the training
        return self._repeated(work)

    def _start(self) -> None:
        """Set up a script's loop before its first communication."""
        if self._is_script:
            return
        if self.entrance is not None and self.membership is None and not self._joins_here:
            raise InputError(
                "this device joins a running job, which is possible at the start of an epoch: write "
                "`for epoch in members.epochs(n):` around the loop over batches, on all devices"
            )
        if self.every > 1:
            raise InputError(f"every={self.every} with `with members.step()`, which needs 1: leave it out")
        self._is_script, self._timed = True, False
        self.run_state = lambda: self._epoch, lambda epoch: setattr(self, "_epoch", epoch)
        self._signals.enter_context(handle_signals(self))
        # If the group is broken, the next message reports it again.
        with suppress(DeviceLostError) if self.entrance is None else nullcontext():
            self.begin()
        if self.membership is not None and self.admission is not None:
            self.membership.offer = offer()

    def _begin_epoch(self, loader: Any) -> tuple[int, list[list[int]]]:
        """Begin an epoch of the loader. Return its seed and batches."""
        work: Callable[[], tuple[int, list[list[int]]]] = partial(loader.begin, joined=self._facts is not None)
        if self._inside:
            return work()
        self._start()
        return self._repeated(work)

    def _update_snapshot(self, random: Tensor | None = None) -> None:
        """Update the snapshot with the script's changes since the last step, such as a schedule's step after an epoch."""
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
        """Take the first snapshot, before the first step. On a joining device, wait for the admission.

        Args:
            steps: finished steps of a resumed run.
            place: see `after_step`. It is returned; a joining device gets the place of the others instead.
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
                    with suppress(DeviceLostError):  # sending copies may fail, but the local snapshot is needed
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
            place: position in the data, as JSON; `recover` returns it.

        Raises:
            LeftError, StoppedError: this device leaves, or all end, as requested.
        """
        self.steps, self.place = self.steps + 1, place
        step_s, self._ended_s = time.monotonic() - self._ended_s, time.monotonic()
        if step_s > self._longest_s:
            self._longest_s = step_s
            roster.update(step_s=step_s)
        if self.membership is None:
            if self._leaves or self._ends:
                self._end_all()
            return
        if self._began_s is not None:
            self._steps_s.append(time.perf_counter() - self._began_s)
        leaving, grows, ends = self._exchange_requests()
        if self.steps % self.every == 0 or leaving or grows:
            self.states.arrived()
            self._take_snapshot()
        if ends:
            self._ends = True  # if a device is lost now, the others end after the next step
            self._end_all()
        elif leaving:
            self._hand_over(leaving)
        elif grows and not self._is_script:
            self._admit()
        self._began_s = time.perf_counter() if self._timed and len(self._steps_s) < TIMED else None

    def leave(self) -> None:
        """Leave the job after the current step: `after_step` raises LeftError here. Any thread or signal may call it."""
        self._leaves = True

    def end(self) -> None:
        """End the training after the current step: `after_step` raises StoppedError on each device. Call it like `leave`."""
        self._ends = True

    def finish(self) -> None:
        """Take a snapshot after the last step even if none is due, for later calls of `repeated`."""
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
            with suppress(DeviceLostError):  # a lost device is harmless now
                self.membership.close()

    def _take_snapshot(self) -> None:
        # After this exchange, all have finished the step and have the previous snapshot, so the older one can be replaced.
        every = interval_of(self._snapshots_s, self._steps_s) if self._timed else self.every
        own = torch.tensor([float(self.states.has_changed), float(every)], dtype=torch.float64)
        table, pending = share_tensor(self.model.group, own)
        pending.wait()
        if table[:, 0].any():
            self.states.share_forms()
        self.every = int(table[:, 1].max())  # the same on all devices, also on joined ones
        begin_s = time.perf_counter()
        self.states.take(self.steps, self._others())
        self._snapshots_s = [*self._snapshots_s, time.perf_counter() - begin_s][:TIMED]
        if self._is_script:
            self.states.arrived()
            share_number(self.model.group, 0.0)

    def _others(self) -> dict[str, Any]:
        return take(self.place, self.states.optimizers, self.others, self.model.group.torch_device)

    # --- requests: sent after each step and read one step later, so that no device waits --------------------------------

    def _exchange_requests(self) -> tuple[list[int], bool, bool]:
        """Return the requests of the previous step: indices of leaving devices, whether devices join, whether all end."""
        leaving, grows, ends = [], False, False
        if self._requests is not None:
            table, pending = self._requests
            pending.wait()
            requests = [int(each) for each in table.tolist()]
            leaving = may_leave([bool(each & LEAVES) for each in requests])
            grows = any(each & GROWS for each in requests)
            # If all leave, no device continues, so they end together and save.
            ends = any(each & ENDS for each in requests) or all(each & LEAVES for each in requests)
        joins = self.admissions is not None and self.admissions.wanted()
        own = torch.tensor(float(LEAVES * self._leaves + GROWS * joins + ENDS * self._ends), dtype=torch.float64)
        self._requests = share_tensor(self.model.group, own)
        return leaving, grows, ends

    def _end_all(self) -> NoReturn:
        share_number(self.model.group, 0.0)  # all devices have read the request
        raise StoppedError(f"the training was stopped after step {self.steps}, as requested")

    def _hand_over(self, leaving: Sequence[int]) -> NoReturn:
        assert self.membership is not None
        group, me = self.model.group, self.membership.me
        self.states.arrived()
        share_number(group, 0.0)  # all devices have the copies
        if group.device in leaving:
            error = LeftError(me, f"device {me} has left the job after step {self.steps}, as requested")
            self.membership.depart(error)
            raise error
        left = group.ids[leaving[0]]
        raise DeviceLostError(left, f"device {left} left the job")

    def _admit(self) -> None:
        """Admit the accepted processes that still wait: raise GrownError on all devices."""
        membership = self.membership
        assert membership is not None
        self.states.arrived()
        wanted = membership.applicants.waiting
        if rows := from_first(self.model.group, "admission", lambda: membership.number(wanted("wanted"))):
            membership.grant(rows)
            raise GrownError(self.model.group.device, "devices are joining")

    def _join(self, entrance: Entrance, facts: Fields) -> Any:
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
        """Regroup after a device was lost during a step. Return the `place` of the last complete snapshot.

        Raises:
            StateLostError: no snapshot is complete without the lost devices.
            DeviceLostError: this device cannot continue, or its group cannot change.
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
                    # The others continued before it had handed over its shards: it has left.
                    raise LeftError(another.device, f"{another}; it was requested to leave") from another
                if self.membership.is_out:
                    self.membership.regroup(another)  # raises: why this device cannot continue
                error = another
        raise error

    def _resume(self, before: Generation, error: ConvoyError) -> Any:
        """Plan for the current devices, and restore the last snapshot that they hold completely. Return its `place`."""
        assert self.membership is not None
        self._catch_up()
        step, held = self.states.gather_held()
        now, planned = self.membership.generation, self._planned
        lost = [d for d in before.members if d not in now.members]
        joined, others_there = self._gather_joined(step, held)
        if (step is None and self.fall_back is None) or (planned is None and self.model.group.device == 0):
            remedy = "resume from the last checkpoint (--resume)" if self.steps else "start it again"
            raise StateLostError(lost[0] if lost else 0, f"{_shards_lost(lost)}: {remedy}")
        if planned is not None and self.replan is not None:
            self.replan.note(self.model, planned.members)

        def make() -> str:
            assert planned is not None
            if self.replan is not None:
                return self.replan(self.model, planned.members, now.members).to_json()
            devices = [planned.members.index(d) if d in planned.members else None for d in now.members]
            return plan_for(self.model.plan, self.model.traced[True].graph, devices).to_json()

        text = from_first(self.model.group, "plan after a regroup", make)
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
                self.tell(f"{', '.join(changes)}; {len(now.members)} continue {where}{again}")
        return self.place

    def _catch_up(self) -> None:
        """Get the result of a call of `repeated` that other devices have completed, but not this one."""
        kept, (count, result) = self.states.kept, self._completed
        random = (kept[-1].others["random"] if kept else torch.get_rng_state()).tolist()
        try:
            own = json.dumps([count, result, random])
        except (TypeError, ValueError):
            own = json.dumps([count, None, random])
        rows = [json.loads(text) for text in self.model.group.agree("completed calls", own)]
        most, result, random_there = max(rows, key=lambda row: int(row[0]))
        if most > count:
            self._completed = most, result
            self._random_state = torch.tensor(random_there, dtype=torch.uint8)

    def _gather_joined(self, step: int | None, held: Sequence[Fields]) -> tuple[list[str], Any]:
        has = [bool(row["has"]) for row in held]
        if step is None:  # a checkpoint restores the model's state, but joining devices also need the run's state
            has = gather(self.model.group, "has trained before", self._planned is not None)
        if all(has) or not any(has):
            return [], None
        assert self.membership is not None
        others = next((kept.others for kept in self.states.kept if kept.step == step), None)
        return gather_joined(self.membership, has, self._facts, others, self.admission, self.run_state)


def may_leave(leaves: Sequence[bool]) -> list[int]:
    """Return the devices that may leave now. The device after each of them has copies of its shards, so it leaves later."""
    return [d for d, each in enumerate(leaves) if each and not leaves[(d + 1) % len(leaves)]]


def _shards_lost(lost: Sequence[int]) -> str:
    names = ", ".join(map(str, lost))
    return f"no other device has the model shards of lost device{'s' * (len(lost) > 1)} {names}"


def _loss_line(lost: Sequence[int], parted: frozenset[tuple[int, int]], error: ConvoyError) -> str:
    pairs = sorted(pair for pair in parted if pair[1] in lost)
    silent = [d for d in lost if all(d != pair[1] for pair in pairs)]
    names, why = ", ".join(map(str, silent)), str(error).partition(". ")[0]
    line = f"device{'s' * (len(silent) > 1)} {names} lost" if silent else "a connection was lost"
    if pairs:  # `error` may belong to another lost device
        reasons = [f"devices {one} and {other} cannot reach each other: device {other} is out" for one, other in pairs]
        return "; ".join([*([line] if silent else []), *reasons])
    if len(lost) == 1 and why.startswith(f"device {lost[0]} "):
        return why
    return line if isinstance(error, UnnamedLossError | GrownError) else f"{line} ({why})"
