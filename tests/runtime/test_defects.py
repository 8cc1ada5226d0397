"""One test for each bug that was found by trying, its story first."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.api import distribute
from convoy.comm.group import Group
from convoy.errors import InputError, PlanError
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.threads import run_on_threads

BATCH = 10


def planned(name: str, model: nn.Module, speeds: tuple[float, ...]) -> Plan:
    dtype = next(model.parameters()).dtype
    graph = trace(model, torch.zeros(2, 3, 8, 8, dtype=dtype)).graph
    return named_plan(name, graph, BATCH, Speeds(speeds))


def part_of(here: Distributed, x: Tensor) -> Tensor:
    """This device's samples of a batch."""
    (layout,) = here.input_layouts(BATCH)
    shares = getattr(layout, "shares", None)
    if shares is None:
        return x if here.group.device in getattr(layout, "devices", (getattr(layout, "device", -1),)) else x[:0]
    start = sum(shares[: here.group.device])
    return x[start : start + shares[here.group.device]]


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.0)], ids=["both", "one without samples"])
@pytest.mark.parametrize(
    ("plan", "dtype"), [("data-by-speed", torch.bfloat16), ("hybrid", torch.bfloat16), ("hybrid", torch.float16)]
)
def test_autocast_of_the_caller_works_on_several_devices(
    plan: str, dtype: torch.dtype, speeds: tuple[float, ...]
) -> None:
    """Forward ran under the caller's autocast, backward did not: "expected m1 and m2 to have the same dtype". And a device
    without samples held float32 where the others sent bfloat16."""
    torch.manual_seed(7)
    model = nets.build("two-conv", dtype=torch.float32)
    x, y = torch.randn(BATCH, 3, 8, 8), torch.randint(0, nets.CLASSES, (BATCH,))
    chosen = planned(plan, model, speeds)

    def work(group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        here = distribute(copy.deepcopy(model), chosen, group, x[:2])
        with torch.autocast(group.torch_device.type, dtype):
            out = here(part_of(here, x), batch=BATCH)
            F.cross_entropy(out, y).backward()
        return out.detach(), {key: p.grad for key, p in here.named_parameters() if p.grad is not None}

    found = run_on_threads(2, work)
    with torch.autocast("cpu", dtype):
        expected = model(x)
        F.cross_entropy(expected, y).backward()
    for out, _ in found:
        torch.testing.assert_close(out, expected.detach().float(), rtol=0.02, atol=0.02)
    for key, parameter in model.named_parameters():
        for whole in (own[key] for _, own in found if key in own and own[key].shape == parameter.shape):
            assert whole.dtype == torch.float32
            torch.testing.assert_close(whole, parameter.grad, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("plan", ["data-by-speed", "model"])
def test_load_state_dict_loads_the_shards(plan: str) -> None:
    """Regression: with strict=False it silently loaded nothing, since its keys had the prefix `module.`."""
    model, other = nets.build("resnet"), nets.build("resnet")
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)

    def work(group: Group) -> tuple[dict[str, Tensor], Any, set[str]]:
        here = distribute(
            copy.deepcopy(model), planned(plan, model, (2.0, 1.0)), group, torch.zeros(2, 3, 8, 8).double()
        )
        reported = here.load_state_dict({**other.state_dict(), "no.such": torch.zeros(1)}, strict=False)
        return here.full_state_dict(), reported, {key for key, _ in here.named_buffers()}

    for loaded, reported, buffers in run_on_threads(2, work):
        assert (reported.missing_keys, reported.unexpected_keys) == ([], ["no.such"])
        assert all(torch.equal(loaded[key], tensor) for key, tensor in other.state_dict().items())
        assert buffers == {key for key, _ in model.named_buffers()}


def test_weights_that_do_not_fit_are_refused() -> None:
    model = nets.build("two-conv")
    whole = model.state_dict()

    def work(group: Group) -> list[str]:
        here = distribute(copy.deepcopy(model), planned("data", model, (1.0,)), group, torch.zeros(2, 3, 8, 8).double())
        said = []
        wrong = {key: tensor[:1] for key, tensor in whole.items()}
        for state in ({f"module.{key}": tensor for key, tensor in whole.items()}, {}, wrong):
            with pytest.raises(InputError) as error:
                here.load_state_dict(state)
            said.append(str(error.value))
        return said

    ((prefixed, missing, shape),) = run_on_threads(1, work)
    assert "without 'module.'" in prefixed
    assert "strict=False" in missing
    assert "the whole parameter has" in shape


def test_a_batch_of_zero_is_refused() -> None:
    """Regression: `batch or plan.batch` silently replaced 0 with the plan's batch."""
    model = nets.build("two-conv", dtype=torch.float32)
    graph = trace(model, torch.zeros(2, 3, 8, 8)).graph
    with pytest.raises(PlanError, match=r"a batch of 0: .* give 1 or more"):
        lower(planned("data", model, (1.0, 1.0)), graph, 0)


def test_directly_built_module_refuses_inexact_optimizers_on_shards() -> None:
    """Regression: only `distribute` marked the shards."""
    model = nets.build("two-conv")

    def work(group: Group) -> str:
        here = Distributed(
            copy.deepcopy(model), planned("model", model, (1.0, 1.0)), group, torch.zeros(2, 3, 8, 8).double()
        )
        optimizer = torch.optim.Adafactor(here.parameters())
        with pytest.raises(InputError) as error:
            optimizer.step()
        return str(error.value)

    assert all("Adafactor is not known" in said for said in run_on_threads(2, work))
