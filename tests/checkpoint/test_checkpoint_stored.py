"""A stored checkpoint of an earlier Convoy loads, and the run continues as it did then.

`stored/` was written by Convoy at format 1 (November 2026): `write_stored` trained three steps, saved, trained three more, and
stored the weights at the end as `after_six_steps.safetensors`.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from convoy.checkpoint import Checkpointer, Progress
from convoy.comm.group import Group
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage
from convoy.runtime.precision import GradScaler
from convoy.train.loop import RateCurve, build_schedule
from tests.support.one_device import part
from tests.support.threads import run_on_threads

STORED = Path(__file__).parent / "stored"
BATCH = 6
SETTINGS = {"seed": 0, "batch": BATCH, "lr": 0.1, "net": "small"}


def net() -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)]
    return nn.Sequential(*layers).double()


def batches(start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    rows = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 2, 4, 4, dtype=torch.float64, generator=generator)
        rows.append((x, torch.randint(0, 3, (BATCH,), generator=generator)))
    return rows


class Run:
    """A model with everything that a checkpoint keeps."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=1e-3)
        self.average = WeightAverage(self.optimizer, 0.9)
        self.schedule = build_schedule(self.optimizer, RateCurve("cosine", 6, warmup_steps=2))
        self.scaler = GradScaler(model, init_scale=1024.0)
        self.keeper = Checkpointer(
            folder, model, self.optimizer, schedule=self.schedule, scaler=self.scaler, settings=SETTINGS
        )

    def train(self, start: int, stop: int) -> None:
        for x, y in batches(start, stop):
            self.optimizer.zero_grad()
            outputs = (
                self.model(part(self.model, x), batch=BATCH) if isinstance(self.model, Distributed) else self.model(x)
            )
            loss = nn.functional.cross_entropy(outputs, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.keeper.after_step()


def write_stored(folder: Path) -> None:
    """Write `stored/`; today's code need not write the same bytes."""
    run = Run(net(), folder)
    run.keeper.begin(resume=False)
    run.train(0, 3)
    run.keeper.at_evaluation(0.5)
    run.train(3, 6)
    safetensors.torch.save_file(run.model.state_dict(), folder / "after_six_steps.safetensors")


@pytest.mark.parametrize("plan", [None, "hybrid", "master"])
def test_a_checkpoint_of_an_earlier_convoy_resumes(plan: str | None, tmp_path: Path) -> None:
    def go_on(model: nn.Module) -> dict[str, Any]:
        run = Run(model, tmp_path / "run")
        assert run.keeper.begin(resume=True) == Progress(3, 1, 0)
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 + 0.5**0.5) / 2, rel=1e-12)
        assert run.scaler.get_scale() == 1024.0
        run.train(3, 6)
        return model.full_state_dict() if isinstance(model, Distributed) else model.state_dict()

    shutil.copytree(STORED, tmp_path / "run", symlinks=True)
    whole, example = net(), batches(0, 1)[0][0]

    def work(group: Group) -> dict[str, Any]:
        made = named_plan(str(plan), trace(whole, example).graph, BATCH, Speeds((3.0, 1.0)))
        return go_on(Distributed(whole, made, group, example))

    expected = safetensors.torch.load_file(STORED / "after_six_steps.safetensors")
    for weights in [go_on(whole)] if plan is None else run_on_threads(2, work, timeout_s=30):
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-10)


def test_plain_pytorch_loads_its_weights_and_averages() -> None:
    best = STORED / "best"
    weights = safetensors.torch.load_file(best / "model.safetensors")
    net().load_state_dict(weights)
    averages = safetensors.torch.load_file(best / "average.safetensors")
    assert averages.keys() == weights.keys()
    assert not torch.equal(averages["0.weight"], weights["0.weight"])
