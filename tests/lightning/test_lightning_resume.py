"""Lightning: checkpoints continue with and without Convoy, in the middle of an epoch; loader workers; bf16."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the extra 'lightning' is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("lightning_resume.py")
ROOT = Path(__file__).parents[2]


def train(folder: Path, plan: str, *jobs: str) -> None:
    """Run jobs START,STEPS,PRECISION,END alone, or on three devices if there is a plan."""
    run = ["-m", "convoy", "run", "--devices", "3"] if plan else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *run, str(SCRIPT), plan, *jobs]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of all jobs. An epoch has five steps."""
    folder = tmp_path_factory.mktemp("lightning")
    exact = "64-true"
    bf16, float32 = (f",8,{precision},./alone-{precision}" for precision in ("bf16-mixed", "32-true"))
    train(folder, "", f",3,{exact},./alone-3", f"./alone-3,8,{exact},./alone-8", bf16, float32)
    train(
        folder, "hybrid", f",3,{exact},./three-3", f"./alone-3,8,{exact},./three-8", ",8,bf16-mixed,./three-bf16-mixed"
    )
    train(folder, "", f"./three-3,8,{exact},./three-alone-8")
    return folder


def difference(folder: Path, one: str, other: str) -> float:
    """Return the largest difference between weights and optimizer states of two checkpoints."""
    first, second = (tensors_in(torch.load(folder / f"{name}.ckpt", weights_only=False)) for name in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def tensors_in(checkpoint: Any) -> dict[str, Any]:
    states = checkpoint["optimizer_states"][0]["state"]
    found = {f"{number} {name}": value for number, state in states.items() for name, value in state.items()}
    assert len(found) == 15  # of Adam: two moments and a counter of five parameters
    return {**checkpoint["state_dict"], **found, "step": torch.tensor(checkpoint["global_step"])}


def test_random_numbers_of_loader_workers_are_those_of_one_device(folder: Path) -> None:
    assert difference(folder, "three-3", "alone-3") < 1e-10


@pytest.mark.parametrize("resumed", ["three-8", "three-alone-8"])
def test_training_resumes_mid_epoch_from_a_checkpoint_of_one_device_and_back(resumed: str, folder: Path) -> None:
    assert difference(folder, resumed, "alone-8") < 1e-10


def test_bf16_differs_from_one_device_only_by_rounding(folder: Path) -> None:
    assert difference(folder, "three-bf16-mixed", "alone-bf16-mixed") < 0.005
    assert difference(folder, "three-bf16-mixed", "alone-32-true") > 0.01


AVERAGED = """
import lightning
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader

import convoy.lightning
from tests.lightning.lightning_resume import Module, RandomImages

strategy = convoy.lightning.ConvoyStrategy(plan="model", speeds=[1.0, 1.0])
callbacks = [StochasticWeightAveraging(0.1)]
trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, callbacks=callbacks)
trainer.fit(Module(), DataLoader(RandomImages(), batch_size=12))
"""


def test_weight_averaging_is_refused_if_the_plan_splits_parameters(tmp_path: Path) -> None:
    (tmp_path / "averaged.py").write_text(AVERAGED)
    command = [sys.executable, "-m", "convoy", "run", "--devices", "2", "averaged.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert "the callback StochasticWeightAveraging works on whole weights, but the plan model splits net" in done.stderr
