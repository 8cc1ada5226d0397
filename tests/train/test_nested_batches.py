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


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, UserDict, lambda d: defaultdict(list, d), lambda d: Sample(d["x"])]
)
def test_inputs_are_found_in_dicts_and_dataclasses(kind: Callable[[dict[str, Any]], Any]) -> None:
    def collate(rows: list[tuple[Tensor, Any]]) -> Any:
        return kind({"names": ["a"] * len(rows), "x": torch.stack([x for x, _ in rows])})

    source = DataLoader(images(), 5, collate_fn=collate)
    model, _, loader = convoy.prepare(nn.Identity(), None, source, plan="data", speeds=(1.0,), group=ALONE)
    for batch, plain in zip(loader, source, strict=True):
        assert isinstance(batch, type(plain) if not isinstance(plain, defaultdict) else dict)
        x = plain.x if isinstance(plain, Sample) else plain["x"]
        assert torch.equal(model(batch.x if isinstance(batch, Sample) else batch["x"]), x)


def test_a_prepared_loader_keeps_what_is_no_tensor() -> None:
    batch = next(iter(AdoptedLoader(DataLoader([(1, "a", None)] * 4, 2, collate_fn=list), None)))
    assert batch == [(1, "a", None)] * 2
