"""No device holds more weights than needed while a model is distributed, and some models are whole nowhere."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.api import distribute, make_plan
from convoy.comm.group import AloneGroup, Group
from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

X = torch.linspace(-1, 1, 6 * 2 * 8 * 8, dtype=torch.float64).view(6, 2, 8, 8)
Y = torch.arange(6) % 4


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 4)),
    ).double()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return net()


def sharded() -> Plan:
    return named_plan("sharded", trace(net(), X[:2]).graph, len(X), Speeds((2.0, 1.0)))


def trained(model: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(call(X), Y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize("first_has_weights", [True, False])
def test_meta_device_model_trains_as_a_materialised_one(first_has_weights: bool, tmp_path: Path) -> None:
    """Weights come from device 0, or from a file of which each device reads its shards."""
    plan = sharded()
    with torch_seed(4):
        alone = net()
    torch.save(alone.state_dict(), tmp_path / "weights.pt")

    def work(group: Group) -> dict[str, Tensor]:
        whole = first_has_weights and group.device == 0
        part = distribute(net() if whole else on_meta(), plan, group, X[:2])
        if not first_has_weights:
            with pytest.raises(InputError, match=r"call load_state_dict\(\)"):
                part(X, whole=True)
            with pytest.raises(InputError, match="have no values yet"):
                part.full_state_dict()
        part.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True))
        trained(part, lambda x: part(x, whole=True))
        return part.full_state_dict()

    found = run_on_threads(2, work)
    trained(alone, alone)
    for each in found:
        for key, tensor in alone.state_dict().items():
            assert torch.allclose(each[key], tensor, rtol=0, atol=1e-10)


def test_meta_device_models_get_weights_of_device_0() -> None:
    plan = sharded()
    with torch_seed(4):
        first = net()

    def work(group: Group) -> dict[str, Tensor]:
        return distribute(first if group.device == 0 else on_meta(), plan, group, X[:2]).full_state_dict()

    for each in run_on_threads(2, work):
        assert all(torch.equal(each[key], t) for key, t in first.state_dict().items())


def test_deep_copy_and_original_load_weights_separately() -> None:
    """Regression: both shared the list of pending weights, and the original trained on uninitialised memory."""
    plan = named_plan("data", trace(net(), X[:2]).graph, len(X), Speeds((1.0,)))
    part = distribute(on_meta(), plan, AloneGroup(torch.device("cpu")), X[:2])
    taught = copy.deepcopy(part)
    taught.load_state_dict(net().state_dict())
    taught(X, whole=True)
    with pytest.raises(InputError, match="have no values yet"):
        part(X, whole=True)


@pytest.mark.parametrize("name", ["auto", "data-by-speed"])
def test_meta_device_model_is_not_timed(name: str) -> None:
    """Regression: layers on the meta device took no time, and a plan was based on that."""

    def work(group: Group) -> None:
        make_plan(name, on_meta(), X[:2], len(X), group)

    with pytest.raises(InputError, match="on the meta device cannot be timed"):
        run_on_threads(2, work)


def freed(group: Group) -> float:
    """Return the largest difference from one device for weights freed after use, after some steps."""
    lower.BUCKET_ENTRIES = 100  # of this process
    plan = sharded()
    plan = replace(plan, sharded={name: replace(kept, form="free") for name, kept in plan.sharded.items()})
    torch.manual_seed(4)
    model = net()
    part = distribute(model, plan, group, X[:2])
    trained(part, lambda x: part(x, whole=True))
    trained(model, model)
    found = part.full_state_dict()
    return max(float((found[key] - t).abs().max()) for key, t in model.state_dict().items())


def test_original_model_is_freed() -> None:
    """Its weights are freed when the script drops its reference."""
    plan = sharded()

    def work(group: Group) -> bool:
        model = net()
        part = distribute(model, plan, group, X[:2])
        weight = weakref.ref(model[4].weight)
        del model
        assert part is not None
        return weight() is None

    assert all(run_on_threads(2, work))
