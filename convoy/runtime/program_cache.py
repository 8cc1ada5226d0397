"""A device's programs for a plan: lowered, checked, compiled and prepared at first use."""

from collections.abc import Mapping

from convoy.errors import InputError
from convoy.layout.layout import holders
from convoy.model.graph import Graph
from convoy.plan.compile import check_programs, compile_all
from convoy.plan.lower import lower
from convoy.plan.steps import ComputeStep, InputGradient, MicroBatch, StepList
from convoy.runtime.executor import Executor, Expected
from convoy.runtime.plan_in_use import PlanInUse
from convoy.runtime.program import Program

CHECKED_DEVICES = 16
"""Programs of larger fleets are not checked against each other before the first step: that takes seconds."""

Noting = dict[str, set[int]]
"""By layer that changes its own state: the devices on which it has run."""


class ProgramCache:
    """The programs of this device for one plan.

    Args:
        executors: by mode (True: training).
        noting: kept from plan to plan, as the state of layers is.

    Attributes:
        programs: by mode, batch, where gradients of inputs are brought, and which micro-batch.
    """

    def __init__(self, in_use: PlanInUse, executors: Mapping[bool, Executor], noting: Noting) -> None:
        self._in_use, self._executors, self._noting = in_use, executors, noting
        self.programs: dict[tuple[bool, int, tuple[InputGradient, ...], MicroBatch], Program] = {}

    def get(
        self, training: bool, batch: int, wanted: tuple[InputGradient, ...] = (), micro_batch: MicroBatch = "only"
    ) -> Program:
        """Return the program for a global batch of this size.

        Raises:
            InputError: a layer with a state of its own would run on other devices than before.
        """
        key = (training, batch, wanted, micro_batch)
        if key not in self.programs:
            self.programs[key] = self._make(*key)
        return self.programs[key]

    def expect(self, seconds: Expected) -> None:
        """Set the measured seconds of layers, used to divide a segment's time."""
        for executor in self._executors.values():
            executor.expected_s = seconds
        for program in self.programs.values():
            program.expected_s.clear()

    def _make(self, training: bool, batch: int, wanted: tuple[InputGradient, ...], micro_batch: MicroBatch) -> Program:
        in_use, executor, graph = self._in_use, self._executors[training], self._executors[training].traced.graph
        kept = {key: layout for key, layout in in_use.layouts.items() if key not in in_use.borrowed}
        steps = lower(in_use.plans[training], graph, batch, wanted, kept, micro_batch)
        self._check_noting(steps, graph)
        if not self.programs and in_use.devices <= CHECKED_DEVICES:
            check_programs(compile_all(steps, graph))
        return executor.program(steps)

    def _check_noting(self, steps: StepList, graph: Graph) -> None:
        for step in steps.phase("forward"):
            if not isinstance(step, ComputeStep) or not (graph[step.layer].changes_state or step.layer in self._noting):
                continue
            here = set(holders(step.writes.layout))
            before = self._noting.setdefault(step.layer, here)
            if here != before if graph[step.layer].changes_state else not here <= before:
                raise InputError(
                    f"layer {step.layer!r} changes its Python state, buffers or parameters in forward, on the devices "
                    f"{sorted(before)} so far, and would run on {sorted(here)} for a batch of {steps.batch}: their state would "
                    "no longer be the same. Use batches with samples for each of these devices (drop_last=True), or give "
                    "the layer the strategy 'one'"
                )
