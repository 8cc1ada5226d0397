"""What all devices of a job must know alike: every device's value, device 0's result, and checks that values are the same.

Every device calls these functions, in the same order. As in :meth:`Group.agree` and :meth:`Pending.wait`, each raises
DeviceLostError where a device did not answer, and MismatchError where one is elsewhere in the program.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convoy.comm.group import Group, Message, Pending
from convoy.errors import DataError, InputError, MismatchError, PlanError
from convoy.machine.accelerator import modes

_ERRORS = {kind.__name__: kind for kind in (InputError, PlanError, DataError)}


def gather(group: Group, topic: str, value: object) -> list[Any]:
    """Every device's value, in the order of the devices: whatever JSON can hold, as JSON gives it back."""
    return [json.loads(text) for text in group.agree(topic, json.dumps(value))]


def from_first(group: Group, topic: str, work: Callable[[], object]) -> Any:
    """What `work` returns on device 0 (JSON), on every device; the others do not call it.

    Raises:
        InputError: `work` did, on device 0; also its kinds PlanError and DataError. On every device.
        DeviceLostError: also if `work` took longer than the group's time limit.
    """
    answer: dict[str, object] = {}
    refusal: InputError | None = None
    if group.device == 0:
        try:
            answer = {"result": work()}
        except InputError as error:
            refusal = error
            answer = {"refused": str(error), "kind": type(error).__name__}
    told = json.loads(group.agree(topic, json.dumps(answer))[0])
    if "refused" in told:
        raise refusal or _ERRORS.get(told["kind"], InputError)(told["refused"])
    return told["result"]


def agree_on(group: Group, topic: str, text: str, otherwise: str) -> None:
    """Check that every device comes with the same text; `otherwise` as in :func:`check_same`.

    Raises:
        MismatchError: names the devices whose text is not device 0's.
    """
    check_same(group.agree(topic, text), otherwise)


def check_same(values: Sequence[object], otherwise: str) -> None:
    """Check that the values of all devices, in their order, are the same.

    Args:
        otherwise: what a device did whose value is not device 0's, e.g. "started with another plan".

    Raises:
        MismatchError: names the devices whose value is not device 0's.
    """
    strangers = [str(device) for device, value in enumerate(values) if value != values[0]]
    if strangers:
        raise MismatchError(
            f"device{'s' * (len(strangers) > 1)} {', '.join(strangers)} {otherwise} than device 0: start every device "
            "with the same script and options"
        )


def difference(values: Sequence[object]) -> str:
    """How the values of all devices differ, such as "64 on device 0, but 32 on device 1"; empty if they are the same."""
    strangers = [f"{value} on device {device}" for device, value in enumerate(values) if value != values[0]]
    return f"{values[0]} on device 0, but {', '.join(strangers)}" if strangers else ""


def agree_on_modes(group: Group) -> None:
    """Check that torch computes in the same modes on every device: TF32, cuDNN, deterministic algorithms, the default dtype.

    Raises:
        MismatchError: names the setting, the devices and their values.
    """
    rows = gather(group, "modes of torch", modes())
    for name in rows[0]:
        values = [row.get(name, "unknown") for row in rows]
        if "unknown" not in values and (found := difference(values)):
            raise MismatchError(
                f"torch would compute differently: {name} is {found}. Set it to the same on every device before the model is "
                "distributed, outside of any `if rank == 0:`; where nobody sets it, look for an environment variable "
                "(TORCH_ALLOW_TF32_CUBLAS_OVERRIDE) or another version of torch"
            )


def share_tensor(group: Group, own: Tensor) -> tuple[Tensor, Pending]:
    """Start to send a tensor to every other device.

    Args:
        own: the same shape and dtype on every device. Numbers on the host stay there: no accelerator is waited for.

    Returns:
        a table of shape (devices, *own.shape), the same on every device once the Pending has been waited for.
    """
    table = torch.zeros(group.devices, *own.shape, dtype=own.dtype, device=own.device)
    table[group.device] = own
    others = [device for device in range(group.devices) if device != group.device]
    mine = table[group.device].clone()
    return table, group.start([Message(d, mine) for d in others], [Message(d, table[d]) for d in others])


def share_number(group: Group, number: float) -> list[float]:
    """One number of each device, in the order of the devices, on every device."""
    table, travels = share_tensor(group, torch.tensor([number], dtype=torch.float64))
    travels.wait()
    return [float(value) for value in table.flatten()]
