"""Batches of any structure, and models with keyword arguments and nested arguments, train as on one device."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.train.adopt import AdoptedLoader
from tests.support.small_script import ALONE, SPEEDS, images, net
from tests.support.threads import run_on_threads


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "one"


class Pair(NamedTuple):
    left: Any
    right: Any


class Odd(nn.Module):
    """A model with an argument of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(
        self, first: Any, *more: Tensor, mask: Tensor | None = None, flip: bool = False, **named: Tensor
    ) -> Any:
        x = first.left.x + 0.5 * first.right["x"][0]
        for each in (*more, *named.values()):
            x = x * each.cos()
        if mask is not None:
            x = x * mask
        return {"out": self.inner(x.flip(-1) if flip else x)}


def odd_call(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    nested = Pair(Sample(x), {"x": [2 * x]})
    result = model(nested, x, x + 1, extra=x - 1, mask=(x > 0).double(), flip=True)
    return result["out"]  # type: ignore[no-any-return]


def losses(make: Callable[[nn.Module, Any, Any], Any]) -> list[float]:
    torch.manual_seed(0)
    model: Any = Odd()
    model, optimizer, loader = make(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), 5))
    found = []
    for batch in loader:
        loss = F.cross_entropy(odd_call(model, batch), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid"])
def test_nested_and_named_arguments_train_as_on_one_device(plan: str) -> None:
    def call(model: Any, batch: Any) -> None:
        x, _ = batch
        model(Pair(Sample(x), {"x": [x]}), x, x, mask=x, flip=True, extra=x)

    def work(group: Group) -> list[float]:
        return losses(lambda *given: convoy.prepare(*given, plan=plan, speeds=SPEEDS, group=group, call=call))

    expected = losses(lambda *given: given)
    for found in run_on_threads(3, work):
        assert found == pytest.approx(expected, abs=1e-10)


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


def test_tensors_without_the_axis_of_the_batch_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"not x of \(2, 1, 6, 6\), mask of \(6,\); .*buffers of the model"):
        prepared(lambda model, batch: model(batch[0], torch.ones(6)))


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


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, UserDict, lambda d: defaultdict(list, d), lambda d: Sample(d["x"])]
)
def test_inputs_are_found_in_dicts_and_dataclasses(kind: Callable[[dict[str, Any]], Any]) -> None:
    def collate(rows: list[tuple[Tensor, Any]]) -> Any:
        return kind({"names": ["a"] * len(rows), "x": torch.stack([x for x, _ in rows])})

    source = DataLoader(images(), 5, collate_fn=collate)
    model, _, loader = convoy.prepare(Masked(), None, source, plan="data", speeds=(1.0,), group=ALONE)
    for batch, plain in zip(loader, source, strict=True):
        assert isinstance(batch, type(plain) if not isinstance(plain, defaultdict) else dict)
        x = plain.x if isinstance(plain, Sample) else plain["x"]
        assert torch.equal(model(batch.x if isinstance(batch, Sample) else batch["x"]), x)


def test_a_prepared_loader_keeps_what_is_no_tensor() -> None:
    batch = next(iter(AdoptedLoader(DataLoader([(1, "a", None)] * 4, 2, collate_fn=list), None)))
    assert batch == [(1, "a", None)] * 2
