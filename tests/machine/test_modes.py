"""torch's computing modes (TF32, cuDNN, deterministic algorithms, default dtype): set, reported, and equal
everywhere."""

import pytest
import torch
from torch import nn

import convoy
from convoy.comm.group import Group
from convoy.errors import MismatchError
from convoy.machine.accelerator import MODES, modes, set_modes
from tests.support.processes import on_processes


def test_every_mode_is_known_to_this_torch() -> None:
    found = modes()
    assert list(found) == [f"torch.{name}" for name in MODES]
    assert "unknown" not in found.values()
    assert found["torch.get_default_dtype"] == "torch.float32"


def choose(group: Group) -> dict[str, str]:
    """Run device 0 without TF32 and device 1 with it."""
    before = modes()
    set_modes(None, deterministic=False)
    assert modes() == before
    set_modes(tf32=group.device == 1, deterministic=group.device == 1)
    return {name: value for name, value in modes().items() if value != before[name]}


def test_chosen_modes_are_set_in_torch() -> None:
    """torch's defaults: TF32 in cuDNN, none in matrix products."""
    without, with_tf32 = on_processes(2, "tests.machine.test_modes:choose")
    assert without == {
        "torch.backends.cudnn.conv.fp32_precision": "ieee", "torch.backends.cudnn.rnn.fp32_precision": "ieee",
        "torch.backends.cuda.matmul.fp32_precision": "ieee", "torch.backends.mkldnn.matmul.fp32_precision": "ieee",
    }  # fmt: skip
    assert with_tf32 == {
        "torch.get_float32_matmul_precision": "high", "torch.are_deterministic_algorithms_enabled": "True",
        "torch.backends.cuda.matmul.fp32_precision": "tf32", "torch.backends.mkldnn.matmul.fp32_precision": "tf32",
    }  # fmt: skip


def refused(group: Group) -> list[str]:
    """Return the error as device 1 differs in one setting after another."""
    model, x, told = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(2, 3, 8, 8), []

    def make() -> None:
        plan = convoy.make_plan("data", model, x, 4, group, speeds=[1, 1])
        convoy.distribute(model, plan, group, x)

    make()
    for here, undo in (
        (lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")),
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    ):
        if group.device == 1:
            here()
        with pytest.raises(MismatchError) as caught:
            make()
        told.append(str(caught.value))
        undo()
    return told


def test_differing_torch_setting_is_named_with_both_values() -> None:
    precision, dtype = on_processes(2, "tests.machine.test_modes:refused")[0]
    assert precision.startswith(
        "torch would compute differently: torch.get_float32_matmul_precision is highest on device 0, but high on device 1."
    )
    assert "torch.get_default_dtype is torch.float32 on device 0, but torch.float64 on device 1" in dtype
