"""Training that goes on when devices are lost: it keeps the state between steps, and brings it to those that are left."""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.comm.agreement import from_first, share_number, share_tensor
from convoy.comm.changing import ChangingGroup
from convoy.comm.group import Pending
from convoy.comm.processes import JoinedGroup
from convoy.comm.regroup import Membership
from convoy.errors import ConvoyError, DeviceLostError, InputError
from convoy.membership.agreement import Generation
from convoy.plan.plan import Plan
from convoy.plan.survivors import plan_for
from convoy.runtime.keep import StateKeeper
from convoy.runtime.module import Distributed, not_distributed

T = TypeVar("T")

Replan = Callable[[Plan, Sequence[int | None]], Plan]
"""Makes, on device 0, the plan for the next generation, of the last one and of the index that each of its devices had in it."""


class Stateful(Protocol):
    """What has a state beside the model: a schedule, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class StateLostError(DeviceLostError):
    """With the devices that were lost went a part of the model that nobody else had."""


class LeftError(DeviceLostError):
    """This device has left the job, as it was asked to."""


class Members:
    """Lets a training go on without the devices that are lost. Every device has one, and makes it before the first step.

    After each step it keeps the state, and sends the pieces that only this device has to the next one. When a device is lost,
    those that are left meet anew, go back to the last step that all have finished, share out the work among themselves, and go
    on: the trajectory is that of one device, as before.

    Args:
        model, optimizers: all that work on its parameters.
        others: what else has a state that changes from step to step: schedules, a scaler.
        every: steps between two states that are kept; what was done since the last one is repeated after a loss.
        spares: pieces that only one device has are copied to another. Otherwise they are lost with their device.
        replan: see `Replan`; None: the same strategies, with shares in the same proportions.
        tell: is called with a line of text when the devices have changed.

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
        every: int = 1,
        spares: bool = True,
        replan: Replan | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if not isinstance(model, Distributed):
            raise not_distributed("Members", model)
        if every < 1:
            raise InputError(f"every={every}: the state is kept every so many steps; give 1 or more")
        if model.plan.mixes:
            raise InputError(
                f"Members with reduce {model.plan.reduce}, where each device has weights of its own: leave it out"
            )
        self.model, self.others, self.every, self.tell = model, tuple(others), every, tell
        self.replan = replan or (lambda plan, devices: plan_for(plan, model.traced[True].graph, devices))
        self.steps = 0
        self.place: Any = None
        self._leaves = False
        self._told: tuple[Tensor, Pending] | None = None
        group = model.group
        changes = isinstance(group, ChangingGroup) and isinstance(group.present, JoinedGroup)
        self.membership = Membership(group) if changes and isinstance(group, ChangingGroup) else None
        self.states = StateKeeper(model, optimizers, spares=spares)
        self._planned: Generation | None = None  # that the model's plan is for
        self.on_change: list[Callable[[], None]] = []
        """Called on every device when others have gone on, after the state is back."""

    @property
    def generation(self) -> Generation | None:
        """The devices that train now; None: there was one alone from the beginning."""
        return None if self.membership is None else self.membership.generation

    def begin(self, steps: int = 0, place: Any = None) -> None:
        """Before the first step: keep the state as it is.

        Args:
            steps: done before, where a run goes on.
            place: see `after_step`.
        """
        self.steps, self.place = steps, place
        if self.membership is not None:
            self._planned = self.membership.generation
            self._keep()
            self.states.arrived()

    def after_step(self, place: Any = None) -> None:
        """After each step of the optimizers.

        Args:
            place: where in the data it was, as JSON; what `recover` gives back.

        Raises:
            DeviceLostError: a device was lost.
        """
        self.steps, self.place = self.steps + 1, place
        if self.membership is None:
            return
        leaving = self._who_leaves()
        if self.steps % self.every == 0 or leaving:
            self.states.arrived()
            self._keep()
        if leaving:
            self._part(leaving)

    def leave(self) -> None:
        """Leave the job after the present step, of which nothing is then repeated: `after_step` raises LeftError here. May be
        called on any thread, or by a signal."""
        self._leaves = True

    def _who_leaves(self) -> list[int]:
        """The devices that leave after this step, by their index; told in the step before, so that nobody waits for it."""
        if self._told is not None:
            table, travels = self._told
            travels.wait()
            found = [device for device, leaves in enumerate(table.tolist()) if leaves]
        else:
            found = []
        self._told = share_tensor(self.model.group, torch.tensor(float(self._leaves), dtype=torch.float64))
        return found

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
        """What `work` returns that talks to the other devices between two steps, such as a test: repeated where one is lost.

        Raises:
            DeviceLostError: see `recover`; or the state was not kept after the last step.
        """
        while True:
            try:
                return work()
            except DeviceLostError as error:
                steps = self.steps
                self.recover(error)
                if self.steps != steps:
                    raise error

    def _keep(self) -> None:
        # Also the sign that all have finished the step, and have what the others kept before: the older may go.
        if max(share_number(self.model.group, float(self.states.has_changed))):
            self.states.tell_forms()
        self.states.keep(self.steps, self._others())

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
        self._told = None
        for _ in range(MOST_TRIALS):
            before = self.membership.generation
            try:
                self.membership.regroup(error)
                return self._go_on(before, error)
            except StateLostError:
                raise
            except DeviceLostError as another:
                if self.membership.is_out:
                    raise
                error = another
        raise error

    def _go_on(self, before: Generation, error: ConvoyError) -> Any:
        assert self.membership is not None
        assert self._planned is not None
        step, told = self.states.tell_kept()
        now, planned = self.membership.generation, self._planned
        lost = [d for d in before.members if d not in now.members]
        if step is None:
            raise StateLostError(
                lost[0] if lost else 0,
                f"with device{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} went pieces of the model that no other device "
                "has: go on from the last checkpoint",
            )
        devices = [planned.members.index(d) if d in planned.members else None for d in now.members]
        text = from_first(
            self.model.group, "plan for those that are left", lambda: self.replan(self.model.plan, devices).to_json()
        )
        self.model.enter(Plan.from_json(text, "device 0's plan"))
        self._planned = now
        others = self.states.restore(step, told)
        self.model.mark_pieces()
        self._restore_others(others)
        done, self.steps = self.steps, step
        self._keep()
        for each in self.on_change:
            each()
        if self.tell is not None:
            names = ", ".join(map(str, lost))
            gone = f"device{'s' * (len(lost) > 1)} {names} lost" if lost else "a connection was lost"
            why = str(error).partition(". ")[0]
            again = f"; {done - step} finished steps are repeated" if done > step else ""
            self.tell(f"{gone} ({why}): {len(now.members)} go on after step {step}{again}")
        return self.place

    def _restore_others(self, kept: dict[str, Any]) -> None:
        for optimizer, rows in zip(self.states.optimizers, kept["settings"], strict=True):
            for group, settings in zip(optimizer.param_groups, rows, strict=True):
                group.update(settings)
        for each, state in zip(self.others, kept["others"], strict=True):
            each.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(kept["random"])
        if kept["there"] is not None:
            kind = self.model.group.torch_device
            torch.get_device_module(kind).set_rng_state(kept["there"], kind)
        self.place = kept["place"]

    def close(self) -> None:
        """At the end of all: be no member any more. Every device calls it."""
        if self.membership is not None:
            with suppress(DeviceLostError):  # whoever is lost now is not missed
                self.membership.close()


MOST_TRIALS = 20
"""So many losses in sequence without a step between them end the training."""
