"""Lightning: modules train unchanged on three devices, with the checkpoints of one; what cannot be right is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

lightning = pytest.importorskip("lightning", reason="the extra 'lightning' is not installed")
demos = pytest.importorskip("lightning.pytorch.demos.boring_classes")

SCRIPT = Path(__file__).with_name("lightning_modules.py")
ROOT = Path(__file__).parents[2]


def trained(folder: Path, *arguments: str, devices: int = 0) -> dict[str, Any]:
    """Run the script, alone or on several devices. Return its logged values."""
    folder.mkdir()
    run = ["-m", "convoy", "run", "--devices", str(devices)] if devices else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *run, str(SCRIPT), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain") / "alone"
    return folder, trained(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid", "model"])
def test_modules_train_unchanged_and_save_checkpoints_of_one_device(
    plan: str, plain: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = plain
    found = trained(tmp_path / "three", plan, "3,2,1", devices=3)
    for name, logged in expected.items():
        assert found[name] == pytest.approx(logged, rel=1e-9), name
        files = (tmp_path / "three" / f"{name}.ckpt", folder / f"{name}.ckpt")
        ours, theirs = (torch.load(file, weights_only=False)["state_dict"] for file in files)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-9) for key in theirs), name


def fit(module: Any, sampler: Any = None, **options: Any) -> Any:
    """Train a demo module on one device with Convoy."""
    import convoy.lightning

    strategy = convoy.lightning.ConvoyStrategy(plan="data", speeds=[1.0])
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"devices": 1, "max_epochs": 1, "enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(demos.RandomDataset(32, 8), batch_size=4, sampler=sampler))
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_with_an_empty_parameter_group_is_that_of_lightning(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(demos.BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([{"params": list(self.parameters())}, {"params": [], "lr": 0.5}])

    options = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, "during")]}
    fit(Module(), **options).save_checkpoint(tmp_path / "after.ckpt")
    during, after = (torch.load(tmp_path / f"{name}.ckpt")["optimizer_states"][0] for name in ("during", "after"))
    assert during["param_groups"] == after["param_groups"]  # the second is torch's own, after the training
    assert during["state"].keys() == after["state"].keys() == {0, 1}


class Changed(demos.BoringModel):
    """A demo module with another optimizer, changed layers or another call of them."""

    def __init__(self, change: Any = None, optimizer: Any = torch.optim.SGD, call: Any = None) -> None:
        super().__init__()
        self.optimizer, self.call = optimizer, call
        if change:
            change(self)

    def training_step(self, batch: Any, number: int) -> Any:
        return self.call(self, batch).sum() if self.call else super().training_step(batch, number)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


class Plugin(lightning.pytorch.plugins.Precision): ...


class Prompt(nn.Linear):
    def forward(self) -> Any:
        return self.weight


SHARED = {"change": lambda m: setattr(m, "both", nn.Sequential(m.layer)), "call": lambda m, x: m.layer(x) + m.both(x)}
SINGLE = {"change": lambda m: setattr(m, "prompt", Prompt(32, 2)), "call": lambda m, x: m.layer(x) + m.prompt().sum()}
SAMPLER = DistributedSampler(range(8), num_replicas=2, rank=0)
COMPILE = "Changed uses torch.compile, .* leave torch.compile out"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "manual": (demos.ManualOptimBoringModel, {}, "automatic_optimization = False.* let training_step return the loss"),
    "compiled": (lambda: Changed(lambda m: setattr(m, "layer", torch.compile(m.layer))), {}, COMPILE),
    "compiled in place": (lambda: Changed(lambda m: m.layer.compile()), {}, COMPILE),
    "lbfgs": (lambda: Changed(optimizer=torch.optim.LBFGS), {}, "LBFGS computes .* several times .* use one of .*Adam"),
    "shared": (lambda: Changed(**SHARED), {}, "calls layer and both, which have the same parameters: call one of them"),
    "no batch": (
        lambda: Changed(**SINGLE),
        {},
        r"calls prompt\(\), but Convoy splits .* along its first axis: give it a",
    ),
    "sampler": (Changed, {"sampler": SAMPLER}, "has a DistributedSampler, which .* leave it out, with shuffle=True"),
    "precision": (Changed, {"precision": "bf16-true"}, "'bf16-true' of a HalfPrecision .* give the Trainer 32-true or"),
    "plugin": (Changed, {"plugins": Plugin()}, "'32-true' of a Plugin is not exact .* and no plugin"),
    "devices": (Changed, {"devices": 2}, "has 2 devices, but this process is alone.* `convoy run --devices 2`"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(what: str) -> None:
    from convoy.errors import InputError

    module, options, message = REFUSED[what]
    with pytest.raises(InputError, match=message):
        fit(module(), **options)
