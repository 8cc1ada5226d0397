"""Lightning: modules train unchanged on three devices, with the checkpoints of one; what cannot be right is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the extra 'lightning' is not installed")

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


def fit(module: Any, **options: Any) -> Any:
    """Train a demo module on one device with Convoy."""
    import lightning
    from lightning.pytorch.demos.boring_classes import RandomDataset

    import convoy.lightning

    strategy = convoy.lightning.ConvoyStrategy(plan="data", speeds=[1.0])
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"devices": 1, "max_epochs": 1, "enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(RandomDataset(32, 8), batch_size=4))
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_with_an_empty_parameter_group_is_that_of_lightning(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos import BoringModel

    class Module(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([{"params": list(self.parameters())}, {"params": [], "lr": 0.5}])

    options = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, "during")]}
    fit(Module(), **options).save_checkpoint(tmp_path / "after.ckpt")
    during, after = (torch.load(tmp_path / f"{name}.ckpt")["optimizer_states"][0] for name in ("during", "after"))
    assert during["param_groups"] == after["param_groups"]  # the second is torch's own, after the training
    assert during["state"].keys() == after["state"].keys() == {0, 1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("manual", "automatic_optimization = False"),
        ("precision", "precision '16-true' of a HalfPrecision is not exact with Convoy"),
        ("plugin", "precision '32-true' of a Plugin is not exact with Convoy"),
        ("devices", "the Trainer has 2 devices, but this process is alone"),
        ("lbfgs", "LBFGS computes the loss several times per step"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(what: str, why: str) -> None:
    from lightning.pytorch.demos import BoringModel
    from lightning.pytorch.plugins import Precision

    from convoy.errors import InputError

    class Plugin(Precision): ...

    class Module(BoringModel):
        def configure_optimizers(self) -> Any:
            kind = torch.optim.LBFGS if what == "lbfgs" else torch.optim.SGD
            return kind(self.parameters(), lr=0.1)

    module = Module()
    module.automatic_optimization = what != "manual"
    options = {"precision": {"precision": "16-true"}, "devices": {"devices": 2}, "plugin": {"plugins": Plugin()}}
    with pytest.raises(InputError, match=why):
        fit(module, **options.get(what, {}))
