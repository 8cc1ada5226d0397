"""Train LightningModules, unchanged: `python lightning_modules.py FOLDER [PLAN SPEED,...]`, with Convoy if a plan is given.

Five are Lightning's own demos, three are written like the examples of its documentation. For each, FOLDER gets a checkpoint,
and a row of `results.json` with what was logged.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos import BoringDataModule, BoringModel
from lightning.pytorch.demos.boring_classes import DemoModel, Net, RandomDataset
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(lightning.LightningModule):
    """Calls two modules in training_step, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8 * 8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8 * 8))

    def training_step(self, batch: Any, _number: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class LitClassifier(lightning.LightningModule):
    """A CNN with batch norm, validation, a metric object, a scheduler that follows it, and layers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(6), nn.Linear(8 * 2 * 2, 4)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)
        self.seen = torchmetrics.SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.conv1(x))), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.fc(torch.flatten(x, 1))

    def training_step(self, batch: Any, _number: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _number: int) -> None:
        logits = self(batch[0])
        self.seen(len(logits))
        self.accuracy(logits, batch[1])
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))
        self.log_dict({"accuracy": self.accuracy, "seen": self.seen})

    def configure_optimizers(self) -> Any:
        decay = [p for name, p in self.named_parameters() if name.endswith("weight")]
        others = [p for name, p in self.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class ImageClassifier(lightning.LightningModule):
    """Trains the network of Lightning's MNIST examples, which one attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.model.dropout1 = self.model.dropout2 = nn.Identity()  # only dropout's numbers depend on the plan

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, _number: int) -> Tensor:
        loss = functional.nll_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.model.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


def images(count: int, batch: int, *, shuffle: bool, size: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(count)
    x, y = torch.rand(count, 1, size, size, generator=generator), torch.randint(4, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=shuffle)


def language_model(kind: Any) -> Any:
    model = kind(vocab_size=30)
    model.prepare_data = lambda: None  # it would download a text
    return model


def words() -> DataLoader:
    x = torch.randint(30, (16, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x[:, :-1], x[:, 1:].contiguous()), batch_size=8)


CASES: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "BoringModel": (BoringModel, [], {"max_epochs": 1}),
    "DataModule": (BoringModel, [BoringDataModule], {"max_epochs": 1, "accumulate_grad_batches": 5}),
    "DemoModel": (DemoModel, [lambda: DataLoader(RandomDataset(32, 40), batch_size=7)], {"max_epochs": 2}),
    "LSTM": (lambda: language_model(LightningLSTM), [words], {"max_epochs": 1}),
    "Transformer": (lambda: language_model(LightningTransformer), [words], {"max_epochs": 1}),
    "ImageClassifier": (ImageClassifier, [lambda: images(20, 8, shuffle=True, size=28)], {"gradient_clip_val": 0.1}),
    "AutoEncoder": (LitAutoEncoder, [lambda: images(50, 12, shuffle=True)], {"gradient_clip_val": 0.05}),
    "Classifier": (
        LitClassifier,
        [lambda: images(50, 12, shuffle=True), lambda: images(30, 8, shuffle=False)],
        {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
}


def main(folder: Path, plan: str = "", speeds: str = "") -> None:
    strategy: Any = "auto"
    results = {}
    for name, (module, loaders, options) in CASES.items():
        if plan:
            import convoy.lightning

            strategy = convoy.lightning.ConvoyStrategy(plan=plan, speeds=[float(each) for each in speeds.split(",")])
        lightning.seed_everything(0, workers=True)
        made = module()
        trainer = lightning.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, precision="64-true", logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, callbacks=[ModelCheckpoint(folder, name)],
            **{"max_epochs": 2, **options},
        )  # fmt: skip
        trainer.fit(made, *(loader() for loader in loaders))
        results[name] = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if trainer.is_global_zero:
            torch.save(made.state_dict(), folder / f"{name}.pt")
    if trainer.is_global_zero:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
