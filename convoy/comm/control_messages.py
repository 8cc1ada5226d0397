"""Provide small collectives: all-gather values, broadcast device 0's result, check that all devices have the same value.

All devices must call these functions in the same order. Like :meth:`Group.agree` and :meth:`Pending.wait`, each raises
DeviceLostError if a device does not answer, and MismatchError if a device calls another function.
"""

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from convoy.comm.group import Group, Message, Pending
from convoy.errors import DataError, InputError, MismatchError, PlanError
from convoy.machine.accelerator import modes

_ERRORS = {kind.__name__: kind for kind in (InputError, PlanError, DataError)}


def gather(group: Group, topic: str, value: object) -> list[Any]:
    """All-gather a JSON value, in device order."""
    return [json.loads(text) for text in group.agree(topic, json.dumps(value))]


def from_first(group: Group, topic: str, work: Callable[[], object]) -> Any:
    """Run `work` on device 0 only, and broadcast its result (JSON).

    Raises:
        InputError, PlanError, DataError: `work` raised it on device 0; every device then raises it.
        DeviceLostError: also if `work` takes longer than the group's time limit.
    """
    answer: dict[str, object] = {}
    refusal: InputError | None = None
    if group.device == 0:
        try:
            answer = {"result": work()}
        except InputError as error:
            refusal = error
            answer = {"refused": str(error), "kind": type(error).__name__}
    reply = json.loads(group.agree(topic, json.dumps(answer))[0])
    if "refused" in reply:
        raise refusal or _ERRORS.get(reply["kind"], InputError)(reply["refused"])
    return reply["result"]


def agree_on(group: Group, topic: str, text: str, otherwise: str) -> None:
    """Raise MismatchError if the devices have different texts; see :func:`check_same`."""
    check_same(group.agree(topic, text), otherwise)


def check_same(values: Sequence[object], otherwise: str) -> None:
    """Raise MismatchError if values, one per device, differ. It names the devices that differ from device 0.

    Args:
        otherwise: words for the message: "device 2 <otherwise> than device 0", e.g. "started with another plan".
    """
    others = [str(device) for device, value in enumerate(values) if value != values[0]]
    if others:
        raise MismatchError(
            f"device{'s' * (len(others) > 1)} {', '.join(others)} {otherwise} than device 0: start every device "
            "with the same script, options and random seeds"
        )


def difference(values: Sequence[object]) -> str:
    """Describe how values differ: "64 on device 0, but 32 on device 1". Empty: they are the same."""
    others = [f"{value} on device {device}" for device, value in enumerate(values) if value != values[0]]
    return f"{values[0]} on device 0, but {', '.join(others)}" if others else ""


def agree_on_modes(group: Group) -> None:
    """Check that torch has the same modes on every device: TF32, cuDNN, deterministic algorithms, the default dtype."""
    rows = gather(group, "modes of torch", modes())
    for name in rows[0]:
        values = [row.get(name, "unknown") for row in rows]
        if "unknown" not in values and (found := difference(values)):
            raise MismatchError(
                f"torch would compute differently: {name} is {found}. Set it to the same on every device before the model is "
                "distributed, outside of any `if rank == 0:`; if your script does not set it, look for an environment "
                "variable (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE) or another version of torch"
            )


def share_tensor(group: Group, own: Tensor, senders: Collection[int] | None = None) -> tuple[Tensor, Pending]:
    """Start an all-gather. Return a table of shape (devices, *own.shape), complete after the Pending's `wait`.

    Args:
        own: the same shape and dtype on every device. A host tensor stays on the host and waits for no accelerator.
        senders: the devices that send; the others only receive, and give zeros. None: all send.
    """
    table = torch.zeros(group.devices, *own.shape, dtype=own.dtype, device=own.device)
    table[group.device] = own
    giving = range(group.devices) if senders is None else senders
    peers = [device for device in range(group.devices) if device != group.device]
    mine = table[group.device].clone()
    sends = [Message(d, mine) for d in peers if group.device in giving]
    return table, group.start(sends, [Message(d, table[d]) for d in peers if d in giving])


def share_number(group: Group, number: float) -> list[float]:
    """All-gather a number, in device order."""
    table, pending = share_tensor(group, torch.tensor([number], dtype=torch.float64))
    pending.wait()
    return [float(value) for value in table.flatten()]
