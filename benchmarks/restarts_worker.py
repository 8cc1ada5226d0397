"""One device of `benchmarks/restarts.py`: train the same net and batches by Convoy, torchrun or torchft.

    python -m benchmarks.restarts_worker WAY NET BATCH DEVICES FOLDER

It trains until somebody ends it, and notes when each step was done in FOLDER/marks-PID.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from convoy.model.nets import build_net

IMAGE, CLASSES = (3, 32, 32), 10
Mark = Callable[[int], None]


def work(way: str, name: str, batch: int, devices: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights and data on every device
    marks = (folder / f"marks-{os.getpid()}").open("a")

    def mark(step: int) -> None:
        marks.write(f"{time.time()} {step}\n")
        marks.flush()

    net = build_net(name, IMAGE, CLASSES)
    data = TensorDataset(torch.randn(batch * 8, *IMAGE), torch.randint(CLASSES, (batch * 8,)))
    match way:
        case "convoy":
            by_convoy(net, data, batch, mark)
        case "torchft":
            by_torchft(net, data, batch // devices, mark)
        case _:
            by_torchrun(net, data, batch, mark, folder / "saved.pt", int(way.rpartition(" ")[2]))


def by_convoy(net: nn.Module, data: TensorDataset, batch: int, mark: Mark) -> None:
    import convoy
    from convoy.train import Members

    group, example = convoy.join(), torch.zeros(2, *IMAGE)
    plan = convoy.make_plan("data", net, example, batch, group, speeds=[1.0] * group.devices)
    model = convoy.distribute(net, plan, group, example)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    members, train = Members(model, optimizer, tell=convoy.print), convoy.loader(data, batch, model)
    while True:
        for x, y in train:
            with members.step() as attempt:
                optimizer.zero_grad()
                _loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if attempt.finished:
                mark(members.steps)


def by_torchrun(net: nn.Module, data: TensorDataset, batch: int, mark: Mark, saved: Path, every: int) -> None:
    """Train on even shares of the batch over the available devices; resume from the last checkpoint."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, ranks, step = distributed.get_rank(), distributed.get_world_size(), 0
    state: dict[str, Any] | None = None
    with suppress(FileNotFoundError):
        state = torch.load(saved)
    if state is not None:
        net.load_state_dict(state["net"])
        step = state["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    own = batch // ranks
    while True:
        first = (step * batch) % len(data) + rank * own
        _step(model, optimizer, data, first, own)
        step += 1
        if rank == 0 and step % every == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.part")
            Path(f"{saved}.part").rename(saved)
        mark(step)


def by_torchft(net: nn.Module, data: TensorDataset, own: int, mark: Mark) -> None:
    """Replica groups of one device each. A device keeps its part of the batch: of fewer devices the whole one is smaller.

    Gradients go through the manager as one tensor: in torchft 0.2.0 its own DistributedDataParallel ends with an AssertionError
    (`assert fut._fut` in `_comm_hook`) where gloo's allreduce fails, which is what a killed replica makes it do.
    """
    import torchft

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def state() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        net.load_state_dict(found["net"])
        inner.load_state_dict(found["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=state, replica_id=f"replica_{os.environ['REPLICA']}", timeout=timedelta(seconds=10), rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
    )  # fmt: skip
    optimizer, parameters = torchft.Optimizer(manager, inner), list(net.parameters())
    while True:
        before = manager.current_step()
        first = (before * own) % (len(data) - own)
        x, y = data[first : first + own]
        optimizer.zero_grad()
        _loss(net(x), y).backward()  # type: ignore[no-untyped-call]
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        manager.allreduce(flat).wait()
        for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        if manager.current_step() > before:  # else somebody was lost in it, and it is made again
            mark(manager.current_step())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, first: int, count: int) -> None:
    x, y = data[first : first + count]
    optimizer.zero_grad()
    _loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _loss(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, y)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
