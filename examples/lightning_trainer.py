"""A LightningModule that several devices train by a strategy. Run it alone, or on three processes:

python examples/lightning_trainer.py
convoy run --devices 3 examples/lightning_trainer.py
"""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import convoy
from convoy.data import load
from convoy.lightning import ConvoyStrategy


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], _number: int) -> None:
        x, y = batch
        self.log("loss", cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


lightning.seed_everything(0)
net: nn.Module = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
)  # fmt: skip
digits = load("digits")
train, test = DataLoader(digits.train, batch_size=64, shuffle=True), DataLoader(digits.test, batch_size=64)

strategy = ConvoyStrategy(plan="data-by-speed")
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, strategy=strategy, logger=False)
trainer.fit(Classifier(net), train, test)
convoy.print(f"loss {trainer.callback_metrics['loss']:.6f}")
