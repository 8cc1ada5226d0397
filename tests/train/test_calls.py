"""A prepared model takes every call that its forward takes: by name, nested, with constants, another one in each step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import convoy
from convoy.errors import InputError
from tests.support.small_script import ALONE, SPEEDS, images, net
from tests.support.threads import run_on_threads


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return scale * (x if mask is None else x * mask)


def prepared(call: Any, model: nn.Module | None = None) -> Any:
    loader = DataLoader(images(), 5)
    return convoy.prepare(model or Masked(), None, loader, plan="data", speeds=(1.0,), group=ALONE, call=call)[0]


def test_all_ways_to_write_the_same_call_are_one() -> None:
    x = images().tensors[0][:5]
    model = prepared(lambda model, batch: model(batch[0], mask=batch[0]))
    assert torch.equal(model(x, x), x * x)
    assert torch.equal(model(mask=x, x=x, scale=1.0), x * x)
    assert torch.equal(prepared(None)(x, None), x)


class Optional(nn.Module):
    """A model whose arguments choose what it computes, and with which parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = net(), net()

    def forward(self, x: Tensor, mask: Tensor | None = None, other: bool = False) -> Any:
        y = self.inner(x if mask is None else x * mask)
        return (y, self.other(x)) if other else y


@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid"])
def test_calls_may_change_from_step_to_step(plan: str) -> None:
    def losses(make: Callable[[nn.Module, Any, Any], Any]) -> list[float]:
        model: Any = Optional()
        model, optimizer, loader = make(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), 5))
        found = []
        for step, (x, y) in enumerate(loader):
            if step % 3 == 0:
                outputs = [model(x)]
            elif step % 3 == 1:
                outputs = [*model(x, x > 0, other=True)]
            else:
                outputs = [model(x, mask=x.cos())]
            loss = sum(F.cross_entropy(out, y) for out in outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(lambda *given: given)
    for found in run_on_threads(
        3, lambda group: losses(lambda *given: convoy.prepare(*given, plan=plan, speeds=SPEEDS, group=group))
    ):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda model, x: model(x, scale=x.numpy()), "a ndarray: give it tensors, numbers"),
        (lambda model, x: model(x, size=2), "forward does not take: got an unexpected keyword argument 'size'"),
        (lambda model, x: model(x, torch.ones(6)), r"mask of \(6,\): .* the 5 samples of the batch"),
    ],
)
def test_a_call_that_cannot_be_split_is_refused(call: Callable[[Any, Tensor], Any], says: str) -> None:
    model = prepared(None)
    with pytest.raises(InputError, match=says):
        call(model, images().tensors[0][:5])


def test_a_forward_with_tensors_without_the_axis_of_the_batch_runs_on_every_device() -> None:
    model = prepared(lambda model, batch: model(batch[0], torch.ones(6)))
    assert "because its arguments are not tensors whose first axis is the batch" in model.traced[True].note
    assert "(x of (2, 1, 6, 6), mask of (6,))" in model.traced[True].note


class OfBatch(nn.Module):
    def forward(self, batch: Any) -> Any:
        return {"out": batch[0]}


def test_an_argument_may_be_named_batch_and_call_may_use_the_result() -> None:
    batch = next(iter(DataLoader(images(), 5)))
    model = prepared(lambda model, batch: model(batch=batch)["out"].sum(), OfBatch())
    assert torch.equal(model(batch=batch)["out"], batch[0])


def test_a_call_that_leaves_the_model_out_is_refused() -> None:
    with pytest.raises(InputError, match="does not call its first argument"):
        prepared(lambda _model, batch: batch[0])
