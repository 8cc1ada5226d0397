"""Plans on real processes: the same numbers as plain PyTorch on one device, to 1e-10 in float64."""

import functools
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it; the nursery imports this file, so that the devices forked from it have it
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import convoy
from convoy.comm.group import Group
from tests.support import nets
from tests.support.processes import on_processes

SAMPLES, BATCH, EPOCHS, DEVICES = 23, 10, 1, 4
SPEEDS = [7.0, 0.0001, 2.0, 1.0]
EXACT = 1e-10

RUNS = [
    *(("two-conv", plan, None) for plan in ("data", "sharded", "hybrid")),
    ("two-conv", "data-by-speed", "star"),
    ("resnet", "data-by-speed", None),
    ("resnet", "model", None),
]
"""Net, plan, how sums are made. Batches of 10, 10 and 3; shares such as (7, 0, 2, 1); batch norm in the last two."""


class Samples(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
        self.y = torch.randint(nets.CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def train(model: nn.Module, loader: Any, clip: Any) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            losses += [loss.item(), float(clip())]
            optimizer.step()
    return losses, optimizer


def follow(group: Group, runs: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    """Runs on every process: what training leaves, as lists of numbers, one table per run."""
    return [_follow(group, *run) for run in runs]


def _follow(group: Group, net: str, name: str, reduce: Any) -> dict[str, Any]:
    # Device 0's weights count; the others start from something else.
    model, example = nets.build(net, seed=group.device), torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    plan = convoy.make_plan(name, model, example, BATCH, group, speeds=SPEEDS, reduce=reduce)
    part = convoy.distribute(model, plan, group, example)
    sent = list(group.sent_bytes)
    losses, optimizer = train(
        part, convoy.loader(Samples(), BATCH, part), lambda: convoy.train.clip_grad_norm_(part, 0.5)
    )
    part.eval()
    outputs = [part(x) for x, _ in convoy.loader(Samples(), BATCH, part, shuffle=False)]
    state = convoy.train.full_optimizer_state(part, optimizer)["state"]
    tensors = part.full_state_dict() | {f"momentum of {key}": row["momentum_buffer"] for key, row in state.items()}
    tensors["outputs"] = torch.cat(outputs).detach()
    found = {key: value.double().flatten().tolist() for key, value in tensors.items()}
    return found | {"losses": losses, "exact": not plan.inexact, "sent": sum(group.sent_bytes) - sum(sent)}


@functools.cache
def on_one(net: str) -> dict[str, list[float]]:
    """Plain PyTorch; of Convoy only the order of the samples."""
    model, samples = nets.build(net), Samples()
    batches = convoy.loader(samples, BATCH)
    losses, optimizer = train(model, batches, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    state = {f"momentum of {key}": optimizer.state[p]["momentum_buffer"] for key, p in model.named_parameters()}
    with torch.no_grad():
        outputs = model.eval()(samples.x)
    tensors = dict(model.state_dict()) | state | {"outputs": outputs}
    return {key: value.double().flatten().tolist() for key, value in tensors.items()} | {"losses": losses}


@pytest.fixture(scope="module")
def found() -> list[list[dict[str, Any]]]:
    """What every device found, by run: one start of processes for all."""
    results = on_processes(DEVICES, "tests.parity.test_parity_processes:follow", RUNS, limit_s=100)
    return [[device[run] for device in results] for run in range(len(RUNS))]


@pytest.mark.parametrize("run", range(len(RUNS)), ids=[" ".join(map(str, run)) for run in RUNS])
def test_processes_train_like_one_device(found: list[list[dict[str, Any]]], run: int) -> None:
    expected = on_one(RUNS[run][0])
    assert sum(table["sent"] for table in found[run]) > 0, "they would have trained alone"
    for device, table in enumerate(found[run]):
        assert table["exact"] is True
        assert table.keys() == {*expected, "exact", "sent"}
        for key, values in expected.items():
            assert len(table[key]) == len(values), key
            apart = max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(table[key], values, strict=True)), default=0.0)
            assert apart <= EXACT, f"{key} on device {device}: {apart}"
