"""Train on the nodes of a Ray cluster with Ray Train, and continue from the last checkpoint when nodes come and go.

Start each node with `ray start ... --resources '{"device": 1}'`, then on one of them:

python examples/engines/ray/train_digits.py --workers 3 --storage SHARED_FOLDER
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.checkpoint import Progress
from convoy.data import load
from convoy.ray import ConvoyConfig


def parts(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]:
    """Return model, optimizer and loader as for one device."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    ).to(dtype)
    images, labels = zip(*load("digits").train.first(640), strict=True)
    data = TensorDataset(torch.stack(images).to(dtype), torch.tensor(labels))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), DataLoader(data, 64, shuffle=True)


def train_func(config: dict[str, Any]) -> None:
    """Train with one Convoy device per worker. After a restart, continue from the last reported checkpoint."""
    model, optimizer, loader = parts(getattr(torch, config["dtype"]))
    model, optimizer, loader = convoy.prepare(model, optimizer, loader, plan=config["plan"], speeds=config["speeds"])

    progress = Progress()
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            progress = convoy.load_checkpoint(folder, model, optimizer, loader=loader)

    for epoch in range(progress.epoch, config["epochs"]):
        losses = []
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        metrics = {"epoch": epoch, "loss": sum(losses) / len(losses), "devices": model.group.devices}
        with tempfile.TemporaryDirectory() as folder:  # every worker calls both; device 0 writes
            convoy.save_checkpoint(folder, model, optimizer, Progress(epoch=epoch + 1), loader=loader)
            written = train.Checkpoint.from_directory(folder) if convoy.is_first() else None
            train.report(metrics, checkpoint=written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--least", type=int, help="continue with this number of workers while nodes are missing")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plan", default="data-by-speed")
    parser.add_argument("--storage", type=Path, help="folder that all nodes share")
    given = parser.parse_args()
    workers = given.workers if given.least is None else (given.least, given.workers)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": given.epochs, "plan": given.plan, "speeds": None, "dtype": "float32"},
        torch_config=ConvoyConfig(whole_nodes=True),
        scaling_config=train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1, "device": 1}),
        run_config=train.RunConfig(
            storage_path=given.storage and str(given.storage.absolute()),
            failure_config=train.FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(result.metrics_dataframe.to_string(index=False))


if __name__ == "__main__":
    main()
