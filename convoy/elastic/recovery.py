"""Keeps the state of a training after its steps, and goes on with the devices that are left or have come."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from convoy.comm import roster
from convoy.comm.agreement import from_first, share_number, share_tensor
from convoy.comm.changing import ChangingGroup
from convoy.comm.channel import Words
from convoy.elastic.agreement import Generation
from convoy.elastic.changed import Changed, GrownError, LeftError, StateLostError, pieces_lost
from convoy.elastic.entrance import Entrance
from convoy.elastic.newcomers import Judge, Newcomers, Story, hear_of_newcomers
from convoy.elastic.others import Stateful, restore, take
from convoy.elastic.pace import KeepPace
from convoy.elastic.regroup import Membership
from convoy.elastic.replan import Replan
from convoy.elastic.requests import Wishes, end_all, let_in, part
from convoy.elastic.snapshot import StateKeeper
from convoy.elastic.works import Works
from convoy.errors import ConvoyError, DeviceLostError
from convoy.plan.exchange_program import forget_moves
from convoy.plan.plan import Plan
from convoy.runtime.module import Distributed

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
        has = [bool(row["has"]) for row in told]
        if step is None or all(has):
            return [], None
        assert self.membership is not None
        return hear_of_newcomers(
            self.model.group, self.membership, has, self._facts,
            lambda: next(kept.others for kept in self.states.kept if kept.step == step), self.newcomers, self.story,
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
