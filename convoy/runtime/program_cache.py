"""Lower, check and compile a device's programs for a plan at first use, and cache them."""

from collections.abc import Mapping

from convoy.errors import InputError
from convoy.layout.layout import holders
from convoy.model.graph import Graph
from convoy.plan.compile import check_programs, compile_all
from convoy.plan.lower import lower
from convoy.plan.steps import ComputeStep, InputGradient, MicroBatch, StepList
from convoy.runtime.executor import Executor, Expected
from convoy.runtime.program import Program
from convoy.runtime.weights import PlanInUse

CHECKED_DEVICES = 16
"""Largest fleet whose programs are checked against each other before the first step: more would take seconds."""

StateDevices = dict[str, set[int]]
"""Devices on which each layer that changes its own state has run."""


class ProgramCache:
    """The programs of this device for one plan.

    Args:
        executors: one per mode (True: training).
        state_devices: kept when the plan changes, because the layers' state is.

    Attributes:
        programs: by mode, batch size, destination of input gradients, and kind of micro-batch.
    """

    def __init__(self, in_use: PlanInUse, executors: Mapping[bool, Executor], state_devices: StateDevices) -> None:
        self._in_use, self._executors, self._state_devices = in_use, executors, state_devices
        self.programs: dict[tuple[bool, int, tuple[InputGradient, ...], MicroBatch], Program] = {}

    def get(
        self, training: bool, batch: int, wanted: tuple[InputGradient, ...] = (), kind: MicroBatch = "only"
    ) -> Program:
        """Return the program for a global batch of this size.

        Raises:
            InputError: a layer with its own state would run on other devices than before.
        """
        key = (training, batch, wanted, kind)
        if key not in self.programs:
            in_use, executor = self._in_use, self._executors[training]
            graph = executor.traced.graph
            kept = {name: layout for name, layout in in_use.layouts.items() if name not in in_use.borrowed}
            steps = lower(in_use.plans[training], graph, batch, wanted, kept, kind)
            self._check_state(steps, graph)
            if not self.programs and in_use.devices <= CHECKED_DEVICES:
                check_programs(compile_all(steps, graph))
            self.programs[key] = executor.program(steps)
        return self.programs[key]

    def expect(self, seconds: Expected) -> None:
        """Set the measured seconds per layer, used to divide a segment's time."""
        for executor in self._executors.values():
            executor.expected_s = seconds
        for program in self.programs.values():
            program.expected_s.clear()

    def _check_state(self, steps: StepList, graph: Graph) -> None:
        """Raise InputError if a layer with its own state would run on devices where that state is outdated."""
        for step in steps.phase("forward"):
            if not isinstance(step, ComputeStep) or not (
                graph[step.layer].changes_state or step.layer in self._state_devices
            ):
                continue
            here = set(holders(step.writes.layout))
            before = self._state_devices.setdefault(step.layer, here)
            if here != before if graph[step.layer].changes_state else not here <= before:
                raise InputError(
                    f"layer {step.layer!r} changes its Python state, buffers or parameters in forward. It ran on the devices "
                    f"{sorted(before)}, and would run on {sorted(here)} for a batch of {steps.batch}, so their states would "
                    "differ. Use batches with samples for each of these devices (drop_last=True), or give the layer the "
                    "strategy 'one'"
                )
