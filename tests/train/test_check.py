"""`convoy run --check`: everything that `prepare` would refuse, in one run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.cli import app, scripts
from convoy.train import adopt
from tests.support.small_script import images, net


class Branching(nn.Module):
    """A layer that torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.mean() > 0 else x


def checked(capsys: pytest.CaptureFixture[str], model: nn.Module, *given: Any) -> tuple[int, list[str]]:
    """Return the exit status of a check, and its lines."""
    adopt._refused.clear()

    def script() -> None:
        prepared, *_ = convoy.prepare(model, *given, plan="data", speeds=(3.0, 2.0))
        prepared(torch.zeros(2, 1, 3, 3, dtype=torch.float64))

    with pytest.raises(SystemExit) as ended:
        script()
    return int(ended.value.code or 0), capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def _check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_CHECK", "1")


def test_what_runs_on_every_device_is_listed_with_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(net(), Branching())
    status, lines = checked(capsys, model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), 5))
    assert status == 0
    assert lines[0].startswith(
        "the forward of Sequential runs on every device (0% of the arithmetic), because of '1': "
    )
    assert lines[1:] == ["checked prepare: 0 refused, 0 layers not split"]


def test_all_refusals_are_listed_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    small = DataLoader(TensorDataset(torch.zeros(4, 1, 3, 3, dtype=torch.float64), torch.zeros(4)), 2)
    status, lines = checked(capsys, net(), other, small, DataLoader(images(), None))
    assert status == 1
    found = [line for line in lines if line.startswith("refused: ")]
    for line, says in zip(found, ("does not run on the example", "batch_size=None", "works on none of"), strict=True):
        assert says in line
    assert lines[-1] == "checked prepare: 3 refused, 0 layers not split"


def test_hooks_and_optimizers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(net(), nn.Identity())
    model.register_full_backward_hook(lambda *_: None)
    status, lines = checked(capsys, model, torch.optim.LBFGS(model.parameters()), DataLoader(images(), 5))
    assert status == 1
    assert "the model that was distributed has a backward hook" in lines[0]
    assert lines[-2] == "LBFGS: only with plans that copy parameters ('data', 'data-by-speed')"


def test_models_prepared_later_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    first, _, _ = convoy.prepare(net(), None, DataLoader(images(), 5))
    status, lines = checked(capsys, net(), torch.optim.SGD(net().parameters(), lr=0.1), DataLoader(images(), 5))
    assert status == 1
    assert lines[0] == "checked prepare: 0 refused, 0 layers not split"
    assert lines[-1] == "checked prepare: 1 refused, 0 layers not split"
    with pytest.raises(SystemExit, match="True"):
        first(torch.zeros(2, 1, 3, 3, dtype=torch.float64))


def test_command_runs_the_script_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def become(_path: str, argv: list[str], environment: dict[str, str]) -> None:
        started.append((argv[1:], environment["CONVOY_CHECK"]))
        raise NotADirectoryError

    monkeypatch.setattr(scripts.os, "execve", become)
    with pytest.raises(NotADirectoryError):
        app(["run", "--devices", "3", "--check", __file__, "--lr", "1"], standalone_mode=False)
    assert started == [([__file__, "--lr", "1"], "1")]
