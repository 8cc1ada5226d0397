"""Training that goes on when devices are lost: it keeps the state between steps, and brings it to those that are left."""

import copy
import json
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.values import decode, encode
from convoy.comm import roster
from convoy.comm.agreement import from_first, gather, share_number, share_tensor
from convoy.comm.changing import ChangingGroup
from convoy.comm.channel import Words
from convoy.comm.group import Pending
from convoy.comm.newcomer import Entrance
from convoy.comm.processes import JoinedGroup
from convoy.comm.regroup import Home, Membership, UnnamedLossError
from convoy.comm.signals import LEAVE, hearing_signals
from convoy.errors import ConvoyError, DeviceLostError, InputError, MismatchError
from convoy.membership.agreement import Generation
from convoy.plan.plan import Plan
from convoy.plan.survivors import plan_for
from convoy.runtime.keep import StateKeeper
from convoy.runtime.module import Distributed, StaleBatchError, not_distributed
from convoy.train.newcomers import Judge, Newcomers
from convoy.train.pace import KeepPace
from convoy.train.welcome import Welcome, facts_of, home_here, listens, offer

T = TypeVar("T")


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


class Stateful(Protocol):
    """What has a state beside the model: a schedule, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class StateLostError(DeviceLostError):
    """With the devices that were lost went a part of the model that nobody else had."""


class LeftError(DeviceLostError):
    """This device has left the job, as it was asked to."""


class StoppedError(ConvoyError):
    """The whole training has ended after a step, as it was asked to."""


class GrownError(DeviceLostError):
    """Newcomers are let in: the devices meet anew."""


@dataclass
class Attempt:
    """One attempt at a step.

    Attributes:
        finished: whether it was; else its batches come once more. Known after the step.
    """

    finished: bool = False


EPOCH = "an epoch"
"""Among what was done between steps: a loader began to hand out batches."""


class Members:
    """Lets a training go on without the devices that are lost. Every device has one, and makes it before the first step.

    After each step it keeps the state, and sends the pieces that only this device has to the next one. When a device is lost,
    those that are left meet anew, go back to the last step that all have finished, share out the work among themselves, and go
    on: the trajectory is that of one device, as before.

    Args:
        model, optimizers: all that work on its parameters.
        others: what else has a state that changes from step to step: schedules, a scaler.
        every: steps from one state that is kept to the next; what was done since is repeated after a loss. None: so many that
            keeping takes at most 2 % of their time, by what it takes in the first steps.
        spares: pieces that only one device has are copied to another. Otherwise they are lost with their device.
        replan: makes the plan for those that are left, as `Plans.anew` does; None: the same strategies, with shares in the same
            proportions.
        tell: is called with a line of text when the devices have changed.
        newcomers: judges who asks to be let in, and tells them what they must know; None: nobody is let in.
        home: where a device that trains alone answers newcomers.
        entrance: of a device that comes into a job that trains already, and what that is told of it.

    Attributes:
        steps: finished so far.

    Raises:
        InputError: a model that is not distributed, or by inexact mixing; `every` below 1.
    """

    def __init__(
        self,
        model: Distributed,
        *optimizers: Optimizer,
        others: Sequence[Stateful] = (),
        every: int | None = 1,
        spares: bool = True,
        replan: Replan | None = None,
        tell: Callable[[str], None] | None = None,
        newcomers: Newcomers | None = None,
        home: Home | None = None,
        entrance: tuple[Entrance, Words] | None = None,
    ) -> None:
        if not isinstance(model, Distributed):
            raise not_distributed("Members", model)
        if every is not None and every < 1:
            raise InputError(f"every={every}: the state is kept every so many steps; give 1 or more")
        if model.plan.mixes:
            raise InputError(
                f"Members with reduce {model.plan.reduce}, where each device has weights of its own: leave it out"
            )
        self.model, self.others, self.every, self.tell = model, tuple(others), every or 1, tell
        self._pace = KeepPace() if every is None else None
        self.replan = replan or InProportion()
        self.steps = 0
        self.place: Any = None
        self._leaves, self._ends, self._strict = False, False, False
        self._signals = ExitStack()
        self._works: int = 0  # so many calls of `repeated` are done with
        self._result: Any = None  # of the last
        self._drawn: Tensor | None = None  # torch's state of random numbers behind it, on those that were ahead
        self._told: tuple[Tensor, Pending] | None = None
        group = model.group
        if entrance is None and isinstance(group, ChangingGroup) and group.entrance is not None:
            entrance, group.entrance = (group.entrance, facts_of(model)), None
        home = home_here(group) if home is None else home
        if newcomers is None and (entrance is not None or listens()):
            newcomers = Welcome(model, self.replan, lambda: self._loader is not None)
        changes = isinstance(group, ChangingGroup) and (isinstance(group.present, JoinedGroup) or home is not None)
        self.membership = Membership(group, home) if changes and isinstance(group, ChangingGroup) else None
        self.newcomers, self.entrance = newcomers, entrance
        self.story: tuple[Callable[[], Any], Callable[[Any], None]] | None = None
        """Tells those that come, as JSON, what has happened; and takes it over."""
        self._facts: Words | None = None  # what this device said of itself, where it came later
        self._judge = None if self.membership is None or newcomers is None else Judge(self.membership, newcomers)
        self._done: list[Any] = []  # results of the calls of `repeated`, as far as JSON holds them, and EPOCH
        self._before: deque[Any] = deque()  # the same on a device that came later, as far as it has not got to it
        self._inside = False  # such a call
        self._grows = False  # at the next step
        self._loader: Any = None  # that hands out batches now
        self._facts_of_loader: dict[str, Any] = {}
        self._rows: Any = None  # its batches, with their seed
        self._told_story: dict[str, Any] = {}
        model.guard = self._begin_epoch
        self.states = StateKeeper(model, optimizers, spares=spares)
        self._planned: Generation | None = None  # that the model's plan is for
        self.fall_back: Callable[[], tuple[int, Any]] | None = None
        """Brings back a state that was saved, where with the lost devices went what nobody else has: its step and place. Every
        device calls it."""

    @property
    def generation(self) -> Generation | None:
        """The devices that train now; None: there was one alone from the beginning."""
        return None if self.membership is None else self.membership.generation

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
        if self.membership is None:
            return
        roster.refresh()
        if self._pace is not None:
            self._pace.ended()
        leaving, grows, ends = self._who_changes()
        if self.steps % self.every == 0 or leaving or grows:
            self.states.arrived()
            self._keep()
        if ends:
            self._end()
        elif leaving:
            self._part(leaving)
        elif grows and self._strict:
            self._grows = True  # at the next step: what this loop does in between is to be done with
        elif grows:
            self._grow()
        if self._pace is not None:
            self._pace.begins()

    def leave(self) -> None:
        """Leave the job after the present step, of which nothing is then repeated: `after_step` raises LeftError here. May be
        called on any thread, or by a signal."""
        self._leaves = True

    def end(self) -> None:
        """End the training on all devices after the present step: `after_step` raises StoppedError on each. As `leave`."""
        self._ends = True

    def _who_changes(self) -> tuple[list[int], bool, bool]:
        """The devices that leave after this step, by their index, whether others come in, and whether all end; told in the step
        before, so that nobody waits for it."""
        leaving, grows, ends = [], False, False
        if self._told is not None:
            table, travels = self._told
            travels.wait()
            told = [int(each) for each in table.tolist()]
            leaving = may_leave([bool(each & LEAVES) for each in told])
            grows = any(each & GROWS for each in told)
            ends = any(each & ENDS for each in told)
        wanted = self._judge is not None and self._judge.wanted()
        own = torch.tensor(float(LEAVES * self._leaves + GROWS * wanted + ENDS * self._ends), dtype=torch.float64)
        self._told = share_tensor(self.model.group, own)
        return leaving, grows, ends

    def _end(self) -> None:
        """All have finished the same step, and end there."""
        self._ends = True  # also if a device is lost just now: who goes on then ends after the next step
        share_number(self.model.group, 0.0)  # everybody knows
        raise StoppedError(f"the training was stopped after step {self.steps}, as it was asked to")

    def _part(self, leaving: list[int]) -> None:
        """All have kept the same step: those that leave go, once the others have what only they had."""
        group = self.model.group
        self.states.arrived()
        share_number(group, 0.0)  # everybody has
        if group.device in leaving:
            error = LeftError(
                group.device, f"device {group.device} has left the job after step {self.steps}, as it was asked to"
            )
            assert self.membership is not None
            self.membership.depart(error)
            raise error
        raise DeviceLostError(leaving[0], f"device {leaving[0]} left the job")

    def _grow(self) -> None:
        """All have kept the same step: those that are wanted come in, if they are still there."""
        membership, group = self.membership, self.model.group
        assert membership is not None
        self.states.arrived()
        rows = from_first(group, "who comes in", lambda: membership.number(membership.applicants.wanted()))
        if rows:
            membership.grant(rows)
            raise GrownError(group.device, "newcomers are let in")

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

    @contextmanager
    def step(self) -> Iterator["Attempt"]:
        """Around each step of a loop of one's own, from forward to the optimizer's step. Where a device is lost in it, the rest
        of the body is left out, and Convoy's loader hands out the same batches once more.

        ::

            members = Members(model, optimizer)
            for x, y in loader:
                with members.step() as attempt:
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()
                if attempt.finished:
                    print(float(loss))

        A step that one device has finished is then finished for all: at its end the devices wait until all have kept its state,
        and have what only others had.

        Raises:
            DeviceLostError: see `recover`.
        """
        self._start()
        wanted = self.steps + 1
        self._note_others(
            torch.get_rng_state()
        )  # what was drawn since, such as the order of an epoch, is not drawn again
        if self._grows:
            self._grow_now()
        attempt = Attempt()
        try:
            yield attempt
            if not self.model.stale:
                self.after_step()
        except StaleBatchError:
            pass  # the loader hands it out again
        except DeviceLostError as error:
            self.recover(error)
            self.model.repeats += self.steps < wanted
        self.model.stale = False
        attempt.finished = self.steps == wanted
        self.model.finished_steps = self.steps

    def _start(self) -> None:
        """Before the first thing that talks to others, in a loop of one's own."""
        if self._strict:
            return
        if self.every > 1:
            raise InputError(
                f"every={self.every} with `with members.step()`: what this loop has done after a step is not undone; leave it "
                "out"
            )
        self._strict, self._pace = True, None
        self.story = self._tell_story, self._told_story.update
        if signal.getsignal(LEAVE) == signal.SIG_DFL:  # else it is the script's own
            self._signals.enter_context(hearing_signals(self))
        # Where the group has broken, the next message says it again.
        with suppress(DeviceLostError) if self.entrance is None else nullcontext():
            self.begin()
        if self._told_story:
            for optimizer in self.states.optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # the others have: schedules ask for it
        if self.membership is not None and self.newcomers is not None:
            self.membership.offer = offer()

    def _grow_now(self) -> None:
        """Let newcomers in before a step, whose batch has been handed out already."""
        self._grows = False
        try:
            self._grow()
        except DeviceLostError as error:
            self.recover(error)
            self.model.repeats += 1
            self.model.stale = True

    def _begin_epoch(self, loader: Any) -> tuple[int, list[list[int]]]:
        """The loader's seed and batches of the epoch that it begins. On a device that came later: none of one that is over, and
        of the present one those from the others' place on."""
        if self._inside:  # of what is repeated as a whole
            self._align(loader)
            found: tuple[int, list[list[int]]] = loader._begun()
            return found
        self._start()
        if not self._told_story:
            self._loader, self._facts_of_loader = loader, _facts_of(loader, self.model)
            self._rows = self._repeated(loader._begun, EPOCH)
            return self._rows  # type: ignore[no-any-return]
        self._take_done(EPOCH)
        loader._skipped()
        loader.start = 0
        if EPOCH in self._before:
            return loader.seed, []
        return self._take_place(loader)

    def _note_others(self, random: Tensor | None = None) -> None:
        """What a script has done since the last step, such as a schedule's step after an epoch, is not undone."""
        if self._strict and self.states.kept:
            kept = self.states.kept[-1]
            kept.others = {**self._others(), "random": kept.others["random"] if random is None else random}

    def _align(self, loader: Any) -> None:
        """A loader counts its epochs. Of one that is used in tests a device that came later takes those of the others."""
        if self.newcomers is None:
            return
        knows = self._facts is None or loader.follows
        rows = gather(self.model.group, "the epoch of a loader", loader.epoch if knows else None)
        if not knows and (known := [row for row in rows if row is not None]):
            loader.epoch, loader.follows = known[0], True

    def _take_place(self, loader: Any) -> tuple[int, list[list[int]]]:
        """The epoch in which the others are: go on at their place."""
        story = dict(self._told_story)
        self._told_story.clear()
        self._before.clear()
        if (mine := _facts_of(loader, self.model)) != story["loader"]:
            names = [name for name in mine if mine[name] != story["loader"].get(name)]
            raise MismatchError(
                f"this device's loader differs from that of the job: {names[0]} is {mine[names[0]]}, there "
                f"{story['loader'].get(names[0])}; start the same script with the same data everywhere"
            )
        self._loader, self._rows, loader.start = loader, story["rows"], story["place"]
        self._facts_of_loader = mine
        # What the script did to schedules on its way here, such as a step after each epoch, was done before.
        self._restore_others(self.states.kept[-1].others)
        torch.set_rng_state(torch.tensor(story["random"], dtype=torch.uint8))
        seed, rows = self._rows
        return int(seed), rows

    def _tell_story(self) -> dict[str, Any]:
        """What a newcomer must know of this loop."""
        assert self._loader is not None
        return {
            "done": self._done, "rows": self._rows, "place": self._loader.place, "loader": self._facts_of_loader,
            "random": self.states.kept[-1].others["random"].tolist(),
        }  # fmt: skip

    def _take_done(self, wanted: Any = None) -> Any:
        """What the others have had of the next thing between steps, on a device that came later."""
        if self._told_story and not self._done:
            self._done = list(self._told_story["done"])
            self._before = deque(self._done)
        found = self._before.popleft() if self._before else None
        if (found == EPOCH) != (wanted == EPOCH):
            raise MismatchError(
                "this device's script does not do what the others have done: start the same script with the same arguments"
            )
        return found

    def finish(self) -> None:
        """After the last step: keep its state, whatever `every` is. What follows may be repeated (see `repeated`).

        Raises:
            DeviceLostError: a device was lost.
        """
        if self.membership is not None:
            if self.states.kept[-1].step != self.steps:
                self.states.arrived()
                self._keep()
            self.states.arrived()

    def repeated(self, work: Callable[[], T]) -> T:
        """What `work` returns that talks to the other devices between two steps, such as a test. It is repeated where a device
        is lost. Where others had done with it by then, this device gets their result if JSON can hold it, else None.

        Raises:
            DeviceLostError: see `recover`; or the state was not kept after the last step.
        """
        if self._inside:  # of what is repeated as a whole
            return work()
        if self.entrance is not None and self.membership is None:
            self._start()
        if self._told_story:
            return self._take_done()  # type: ignore[no-any-return]
        return self._repeated(work)

    def _repeated(self, work: Callable[[], T], kind: str | None = None) -> T:
        self._note_others()
        while True:
            try:
                self._inside = True
                try:
                    result = work()
                    if self.membership is not None:
                        share_number(self.model.group, 0.0)  # all have done with it
                finally:
                    self._inside = False
                self._works, self._result = self._works + 1, result
                self._note(kind or result)
                return result
            except DeviceLostError as error:
                works, steps = self._works, self.steps
                self.recover(error)
                if self.steps != steps:
                    raise error
                if self._works > works:
                    self._note(kind or self._result)
                    return self._result  # type: ignore[no-any-return]

    def _note(self, result: Any) -> None:
        """Remember what was done between steps, for those that come later."""
        if self.newcomers is None or (result != EPOCH and self._loader is not None and self._loader.playing):
            return  # who comes later does nothing within an iteration that is over
        try:
            self._done.append(json.loads(json.dumps(result)))
        except (TypeError, ValueError):
            self._done.append(None)

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
        settings = [
            [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self.states.optimizers
        ]
        kind = self.model.group.torch_device
        return {
            "place": self.place, "settings": settings, "others": [copy.deepcopy(each.state_dict()) for each in self.others],
            "random": torch.get_rng_state(),
            "there": None if kind.type == "cpu" else torch.get_device_module(kind).get_rng_state(kind),
        }  # fmt: skip

    # ---------------------------------------------------------------------------------------------- after a loss

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
        self._told, before = None, self.membership.generation
        for _ in range(MOST_TRIALS):
            try:
                self.membership.regroup(error)
                return self._go_on(before, error)
            except StateLostError:
                raise
            except DeviceLostError as another:
                if self.membership.is_out and self._leaves:  # the others went on before it had handed over: it has left
                    raise LeftError(another.device, f"{another}; it was asked to leave") from another
                if self.membership.is_out:
                    raise
                error = another
        raise error

    def _go_on(self, before: Generation, error: ConvoyError) -> Any:
        assert self.membership is not None
        self._catch_up()
        step, told = self.states.tell_kept()
        now, planned = self.membership.generation, self._planned
        lost = [d for d in before.members if d not in now.members]
        came, heard = self._hear_of_newcomers(step, told)
        if (step is None and self.fall_back is None) or (planned is None and self.model.group.device == 0):
            raise StateLostError(lost[0] if lost else 0, f"{_gone(lost)}: resume from the last checkpoint (--resume)")
        if planned is not None:
            self.replan.note(self.model, planned.members)

        def make() -> str:
            assert planned is not None
            return self.replan(self.model, planned.members, now.members).to_json()

        text = from_first(self.model.group, "plan for those that train now", make)
        self.model.enter(Plan.from_json(text, "device 0's plan"))
        self._planned, done = now, self.steps
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
        roster.tell(device=self.membership.me, members=now.members)
        if self.tell is not None:
            self.tell(self._said(error, lost, came, step, done))
        return self.place

    def _said(self, error: ConvoyError, lost: list[int], came: list[str], step: int | None, done: int) -> str:
        """How the devices have changed, in a line."""
        assert self.membership is not None
        count, me = len(self.membership.generation.members), self.membership.me
        again = f"; finished steps that are repeated: {done - self.steps}" if done > self.steps else ""
        after = f"after step {self.steps}"
        if done == 0 and self._facts is not None:
            return f"joined as device {me}; {count} train {after}"
        parted = sorted(pair for pair in self.membership.parted if pair[1] in lost)
        silent = [d for d in lost if all(d != pair[1] for pair in parted)]
        names, why = ", ".join(map(str, silent)), str(error).partition(". ")[0]
        gone = f"device{'s' * (len(silent) > 1)} {names} lost" if silent else "a connection was lost"
        if parted:  # what this device had found out may be of another one, which has not heard of them either
            pairs = (
                f"devices {one} and {other} do not reach each other: device {other} is out" for one, other in parted
            )
            gone = "; ".join([*([gone] if silent else []), *pairs])
        elif lost and why.startswith(f"device {lost[0]} (") and len(lost) == 1:
            gone = why  # it names the device, and how it was lost
        elif not isinstance(error, UnnamedLossError | GrownError):
            gone += f" ({why})"
        if came:
            joined = f"{' and '.join(came)} joined"
            gone = f"{gone}, {joined}" if lost else joined
        where = after if step is not None else f"from the checkpoint of step {self.steps}, since {_gone(lost)}"
        return f"{gone}; {count} go on {where}{again}"

    def _hear_of_newcomers(self, step: int | None, told: Sequence[Words]) -> tuple[list[str], Any]:
        """Who has come, in words; and what every device knows of the state, for who kept nothing of that step."""
        group, membership = self.model.group, self.membership
        assert membership is not None
        has = [bool(row["has"]) for row in told]
        if step is None or all(has):
            return [], None
        rows = gather(group, "who is new", None if has[group.device] else self._facts)
        new = {d: facts for d, facts in zip(membership.generation.members, rows, strict=True) if facts is not None}
        for device, facts in new.items():
            if self.newcomers is not None and device != membership.me:
                self.newcomers.came(device, facts)
        text = ""
        if has.index(True) == group.device:
            others = next(kept.others for kept in self.states.kept if kept.step == step)
            newcomers = None if self.newcomers is None else self.newcomers.told()
            story = None if self.story is None else self.story[0]()
            text = json.dumps([encode(others, "the state of the training"), newcomers, story])
        others, newcomers, story = json.loads(group.agree("what newcomers must know", text)[has.index(True)])
        if membership.me in new:
            if self.newcomers is not None:
                self.newcomers.hear(newcomers)
            if self.story is not None:
                self.story[1](story)
        names = [" ".join(["device", str(d), *([f"({f['title']})"] if "title" in f else [])]) for d, f in new.items()]
        return names, decode(others)

    def _catch_up(self) -> None:
        """Take over the result of what others had done with, and this device had not."""
        random = self.states.kept[-1].others["random"] if self.states.kept else torch.get_rng_state()
        try:
            own = json.dumps([self._works, self._result, random.tolist()])
        except (TypeError, ValueError):
            own = json.dumps([self._works, None, random.tolist()])
        rows = [json.loads(text) for text in self.model.group.agree("works that are done with", own)]
        works, result, drawn = max(rows, key=lambda row: int(row[0]))
        if works > self._works:
            self._works, self._result = works, result
            self._drawn = torch.tensor(drawn, dtype=torch.uint8)

    def _restore_others(self, kept: dict[str, Any]) -> None:
        for optimizer, rows in zip(self.states.optimizers, kept["settings"], strict=True):
            for group, settings in zip(optimizer.param_groups, rows, strict=True):
                group.update(settings)
        for each, state in zip(self.others, kept["others"], strict=True):
            each.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(kept["random"] if self._drawn is None else self._drawn)
        self._drawn = None
        if kept["there"] is not None:
            kind = self.model.group.torch_device
            torch.get_device_module(kind).set_rng_state(kept["there"], kind)
        self.place = kept["place"]

    def close(self) -> None:
        """At the end of all: be no member any more. Every device calls it."""
        self._signals.close()
        roster.tell(members=())
        if self._judge is not None:
            self._judge.close()
        if self.membership is not None:
            with suppress(DeviceLostError):  # whoever is lost now is not missed
                self.membership.close()


def may_leave(wish: Sequence[bool]) -> list[int]:
    """Who of the devices that wish to leaves now. The next one has the copies of what only it had, and stays, unless all leave;
    the others leave after a later step."""
    leaving = [d for d, each in enumerate(wish) if each]
    return leaving if all(wish) else [d for d in leaving if not wish[(d + 1) % len(wish)]]


def _facts_of(loader: Any, model: Distributed) -> dict[str, Any]:
    """What must be the same of a loader; its seed, and what follows from it, are told to those that come."""
    return {name: value for name, value in loader._told(model).items() if name != "seed"}


def _gone(lost: Sequence[int]) -> str:
    names = ", ".join(map(str, lost))
    return f"with device{'s' * (len(lost) > 1)} {names} went pieces of the model that no other device has"


MOST_TRIALS = 20
"""So many losses in sequence without a step between them end the training."""

LEAVES, GROWS, ENDS = 1, 2, 4
"""What a device says after each step: that it leaves; that somebody is to come in; that all are to end."""
