"""Agreement between devices: gathered values, device 0's result or error, and differing devices."""

import time

import pytest
import torch

from convoy.comm.control_messages import check_same, difference, from_first, gather, share_number, share_tensor
from convoy.comm.group import AloneGroup, Group
from convoy.errors import InputError, MismatchError, PlanError
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads


def share_all(group: Group) -> list[object]:
    table, pending = share_tensor(group, torch.full((2, 3), float(group.device)))
    pending.wait()
    assert [each.unique().tolist() for each in table] == [[float(device)] for device in range(group.devices)]
    rows = gather(group, "rows", {"device": group.device, "name": "é"})
    assert [row["device"] for row in rows] == list(range(group.devices))
    only_first = from_first(group, "first", lambda: [group.device, None])
    return [share_number(group, group.device + 0.1), only_first]


def test_all_devices_gather_the_same_values() -> None:
    told = [[0.1, 1.1, 2.1], [0, None]]
    assert run_on_threads(3, share_all) == [told] * 3
    assert on_processes(3, "tests.comm.test_collectives:share_all") == [told] * 3
    assert share_all(AloneGroup(torch.device("cpu"))) == [[0.1], [0, None]]


def refuse(group: Group) -> str:
    """Raise an error on device 0, slightly after the others ask."""

    def work() -> None:
        assert group.device == 0
        time.sleep(0.2)
        raise PlanError("plan 'x' does not fit: use another")

    with pytest.raises(InputError) as caught:
        from_first(group, "plan", work)
    group.agree("and the group is well", "")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_error_of_device_0_is_raised_everywhere() -> None:
    assert set(run_on_threads(3, refuse)) == {"PlanError: plan 'x' does not fit: use another"}


def test_differing_devices_are_named() -> None:
    check_same(["a", "a"], "was given another x")
    assert difference([64, 64]) == ""
    assert difference([64, 32, 64, 16]) == "64 on device 0, but 32 on device 1, 16 on device 3"
    with pytest.raises(MismatchError, match="device 1 was given another x than device 0: start every device"):
        check_same(["a", "b", "a"], "was given another x")
    with pytest.raises(MismatchError, match="devices 1, 2 were late"):
        check_same([1, 2, 3], "were late")
