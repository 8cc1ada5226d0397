"""Train a module of which loader workers draw the batches: `python lightning_resume.py PLAN START,STEPS,PRECISION,END ...`.

For each job, train from the checkpoint START, or from the beginning, to STEPS, and save END. An empty PLAN: without Convoy.
"""

import random
import sys
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class RandomImages(Dataset):
    """Images by the random generators of torch, Python and NumPy."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.randn(1, 4, 4) + random.random() + np.random.rand(), number % 3


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
        )

    def training_step(self, batch: Any, _number: int) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def main(plan: str, *jobs: str) -> None:
    for start, steps, precision, end in (job.split(",") for job in jobs):
        strategy: Any = "auto"
        if plan:
            import convoy.lightning

            strategy = convoy.lightning.ConvoyStrategy(plan=plan, speeds=[3.0, 2.0, 1.0])
        lightning.seed_everything(0, workers=True)
        folder, _, name = end.rpartition("/")
        saved = ModelCheckpoint(folder, name, every_n_train_steps=int(steps))
        trainer = lightning.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, precision=precision, logger=False, callbacks=[saved],
            enable_progress_bar=False, enable_model_summary=False, max_steps=int(steps),
        )  # fmt: skip
        loader = DataLoader(RandomImages(), batch_size=12, shuffle=True, num_workers=2)
        trainer.fit(Module(), loader, ckpt_path=f"{start}.ckpt" if start else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
