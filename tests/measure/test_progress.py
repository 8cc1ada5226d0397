"""Whoever waits in a script is told for what and about how long: `prepare` measured for seconds in silence."""

import contextlib
import io
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.comm.group import AloneGroup, Group
from convoy.measure.progress import to_stderr
from tests.support.processes import on_processes
from tests.support.small_script import net
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


def one_of_two(device: int) -> Group:
    group = AloneGroup(CPU)
    group.device, group.devices = device, 2
    return group


def clock(*times_s: float) -> Iterator[float]:
    return iter(times_s)


def test_a_line_at_once_and_then_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = clock(100.0, 101.0, 111.0, 111.0, 115.0, 131.0, 131.0)
    tell = to_stderr(one_of_two(0), "measuring 2 devices", 20.0, lambda: next(times))
    for layer in range(4):
        tell(f"layer {layer}", layer, 4)
    assert capsys.readouterr().err.splitlines() == [
        "convoy: measuring 2 devices, about 20 s ...",
        "convoy:   11 s: layer 1 (1 of 4)",
        "convoy:   31 s: layer 3 (3 of 4)",
    ]


@pytest.mark.parametrize("group", [AloneGroup(CPU), one_of_two(1)])
def test_only_device_0_of_several_speaks(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    to_stderr(group, "measuring", 20.0)("layer", 1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("auto", "convoy: measuring 2 devices and planning for them, about 1 s ..."),
        ("data-by-speed", "convoy: every device times the model's layers, about 2 s ..."),
    ],
)
def test_prepare_says_what_it_measures(plan: str, said: str) -> None:
    first, other = on_processes(2, "tests.measure.test_progress:prepared", plan)
    assert first.splitlines()[0] == said
    assert ("convoy: auto chose device" in first) == (plan == "auto")
    assert ("alone\n" in first) == (plan == "auto"), "what is predicted against one device"
    assert other == ""


def prepared(group: Group, plan: str) -> str:
    """What this device says on its standard error."""
    data = TensorDataset(torch.randn(16, 1, 6, 6, dtype=torch.float64), torch.zeros(16, dtype=torch.int64))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        convoy.prepare(net(), None, DataLoader(data, 8), plan=plan, group=group, budget_s=0.5)
    return said.getvalue()


def test_prepare_with_speeds_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    data = TensorDataset(torch.randn(16, 1, 6, 6, dtype=torch.float64), torch.zeros(16, dtype=torch.int64))
    run_on_threads(
        2, lambda group: convoy.prepare(net(), None, DataLoader(data, 8), plan="data", speeds=(1, 2), group=group)
    )
    assert capsys.readouterr().err == ""
