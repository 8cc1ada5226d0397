"""The plan that a model follows in training and in evaluation: where every parameter lies. Values, without any tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

from convoy.layout.layout import Layout, Replicated, Split, everywhere, holders
from convoy.model.graph import Graph, Parameter
from convoy.plan.placing import borrowed, parameter_layouts, pin
from convoy.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanInUse:
    """A plan, and what follows from it for parameters and buffers. They are named by their keys in `state_dict`.

    Attributes:
        plans: by mode (True: training), the plan to lower.
        layouts: where each of them lies.
        borrowed: where evaluation wants those that no strategy of its layers finds where training keeps them.
        half_trained: one of these that has a gradient, which would not be right in evaluation.
        whole: of each, whether every device holds all of it, and has all of its gradient at once.
        stays_whole: parameters that are kept in shares stay whole from one pass of a step to the next.
    """

    devices: int
    plan: Plan
    plans: Mapping[bool, Plan]
    layouts: Mapping[str, Layout]
    borrowed: Mapping[str, Layout]
    half_trained: str | None
    whole: Mapping[str, bool]
    stays_whole: bool

    def counts(self, key: str, device: int) -> bool:
        """Whether this device is the one that counts a parameter: owner of a piece, or first holder of copies."""
        layout = self.layouts[key]
        return isinstance(layout, Split) or holders(layout)[0] == device

    def sums_on(self, key: str, device: int) -> bool:
        """Whether a device keeps what several passes have summed of a gradient, where all devices may have the same."""
        return not isinstance(self.layouts[key], Replicated) or self.counts(key, device)

    def is_copied(self, key: str) -> bool:
        """Whether every device holds the whole parameter."""
        return _is_copied(self.layouts[key], self.devices)


def plan_in_use(
    plan: Plan, trained: Graph, evaluated: Graph, known: Mapping[str, Parameter], devices: int
) -> PlanInUse:
    """What follows from a plan.

    Args:
        trained, evaluated: the model in both modes.
        known: all parameters and buffers; those that no layer reads are whole on every device.
    """
    pinned = pin(plan, trained, evaluated)
    lent = borrowed(pinned, plan, trained, evaluated)
    # Layers that exist only in evaluation add theirs.
    layouts: dict[str, Layout] = {key: everywhere(devices) for key in known}
    layouts |= parameter_layouts(pinned, evaluated) | parameter_layouts(plan, trained)
    layers = [*trained.layers.values(), *evaluated.layers.values()]
    in_parts = {p.key for layer in layers if layer.unfusable for p in layer.parameters.values()}
    return PlanInUse(
        devices,
        plan,
        {True: plan, False: pinned},
        layouts,
        lent,
        next((key for key in lent if known[key].trainable), None),
        {k: _is_copied(how, devices) and not plan.mixes and k not in in_parts for k, how in layouts.items()},
        any(how.form == "keep" for how in plan.sharded.values()),
    )


def _is_copied(layout: Layout, devices: int) -> bool:
    return isinstance(layout, Replicated) and len(layout.devices) == devices
