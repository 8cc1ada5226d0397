"""Norms that share an exchange: which ones, the resulting layer order, and the numbers of one device."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import trace
from convoy.plan.compile import compile_all, without_gradients
from convoy.plan.device_program import ExchangeRound
from convoy.plan.lower import lower, rows_of
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, GatherStatistics
from convoy.plan.strategy import Batch, One
from convoy.runtime.module import Distributed
from tests.support.one_device import part
from tests.support.program_check import check_programs
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed


def net(**inputs: str) -> Graph:
    """Return a graph of layers by name, each with its inputs' names; names that begin with "n" are norms."""
    rows = {name: tuple(text.split()) for name, text in inputs.items()}
    layers = {n: Layer(n, "batch_norm" if n[0] == "n" else "elementwise", some, (4,)) for n, some in rows.items()}
    return Graph("net", layers, (list(layers)[-1],))


def norms(graph: Graph, **kinds: str) -> Mapping[str, str]:
    return {name: kinds.get(name, "") for name in graph.layers if name.startswith("n")}


BRANCHES = net(x="", a="x", na="a", b="na", nb="b", c="x", nc="c", d="nb nc", e="d")


def names(rows: Sequence[tuple[str, ...]]) -> str:
    return " ".join("+".join(row) for row in rows)


def test_parallel_norms_are_ordered_together_after_their_inputs() -> None:
    assert names(rows_of(BRANCHES, norms(BRANCHES))) == "x a c na+nc b nb d e"


def test_norms_on_different_devices_exchange_separately() -> None:
    assert names(rows_of(BRANCHES, norms(BRANCHES, nc="others"))) == "x a na b nb c nc d e"
    assert names(rows_of(BRANCHES, {})) == "x a na b nb c nc d e"


def test_stateful_calls_keep_their_order() -> None:
    """A norm module is called twice: its running statistics depend on the order."""
    layers = {n: Layer(**{**vars(each), "shared": n in ("na", "nc")}) for n, each in BRANCHES.layers.items()}
    assert names(rows_of(Graph("net", layers, ("e",)), norms(BRANCHES))) == "x a na b c nb+nc d e"
    layers = {n: Layer(**{**vars(each), "random": n in ("b", "c")}) for n, each in BRANCHES.layers.items()}
    assert names(rows_of(Graph("net", layers, ("e",)), norms(BRANCHES))) == "x a na b c nb+nc d e"


@pytest.mark.parametrize("seed", range(20))
def test_order_minimises_exchanges_and_respects_inputs(seed: int) -> None:
    rng = random.Random(seed)
    inputs: dict[str, str] = {"x": ""}
    for number in range(30):
        some = rng.sample(list(inputs), min(len(inputs), rng.choice((1, 1, 2))))
        inputs[rng.choice("na") + str(number)] = " ".join(some)
    graph = net(**inputs)
    rows = rows_of(graph, norms(graph))
    order = [name for row in rows for name in row]
    assert sorted(order) == sorted(inputs)
    seen: set[str] = set()
    for row in rows:
        assert all(seen.issuperset(graph[name].inputs) for name in row)
        seen.update(row)
    # Along a way through the net one exchange waits for the other.
    longest: dict[str, int] = {}
    for layer in graph.layers.values():
        longest[layer.name] = max((longest[i] for i in layer.inputs), default=0) + layer.name.startswith("n")
    assert sum(row[0].startswith("n") for row in rows) == max(longest.values())


# --- of a real net, in lists, programs and training ------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two parallel branches of different widths, each with a norm and an output, and a norm after both."""

    def __init__(self) -> None:
        super().__init__()
        flat = nn.Flatten()
        self.left = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), flat, nn.Linear(144, 4))
        self.right = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU(), flat, nn.Linear(216, 4)
        )
        self.both = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x), self.right(x)
        return self.both(left + right), right


def test_two_heads_share_one_exchange_each_direction() -> None:
    graph = trace(TwoHeads(), torch.zeros(2, 3, 8, 8)).graph
    steps = lower(Plan("mine", graph.fingerprint, 3, 8, {}, Batch((4, 3, 1))), graph)
    told = [(s.phase, s.layers, s.sizes) for s in steps.steps if isinstance(s, GatherStatistics)]
    beside, behind = (("left.1", "right.1"), (8, 12)), (("both",), (8,))
    assert told == [("forward", *beside), ("forward", *behind), ("backward", *behind), ("backward", *beside)]
    assert all(before < s.id for s in steps.steps for before in s.after)
    programs = compile_all(steps, graph)
    check_programs(programs)
    step = next(s.id for s in steps.steps if isinstance(s, GatherStatistics))
    (started,) = [op for op in programs[0].forward if isinstance(op, ExchangeRound) and op.step == step]
    assert [message.size for message in started.sends] == [20, 20]
    alone = lower(Plan("mine", graph.fingerprint, 3, 8, {}, One(1)), graph)
    assert [s.layer for s in alone.phase("forward") if isinstance(s, ComputeStep)] == list(graph.layers)[1:]


def test_unused_head_sends_no_norm_gradients() -> None:
    graph = trace(TwoHeads(), torch.zeros(2, 3, 8, 8)).graph
    steps = lower(Plan("mine", graph.fingerprint, 3, 8, {}, Batch((4, 3, 1))), graph)
    left = without_gradients(steps, graph, frozenset({0}))
    assert [s.layers for s in left.phase("backward") if isinstance(s, GatherStatistics)] == [("right.1",)]


@pytest.mark.parametrize("heads", [(0,), (0, 1)])
def test_joint_norms_train_as_one_device(heads: tuple[int, ...]) -> None:
    with torch_seed(3):
        whole = TwoHeads().double()
        x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    graph = trace(whole, x[:2]).graph
    plan = Plan("mine", graph.fingerprint, 3, 8, {}, Batch((5, 3, 0)))

    def train(model: nn.Module, forward: Callable[[], tuple[Tensor, Tensor]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            outputs = forward()
            torch.stack([outputs[head].square().mean() * (head + 1) for head in heads]).sum().backward()
            optimizer.step()

    def work(group: Group) -> dict[str, Tensor]:
        here = Distributed(copy.deepcopy(whole), plan, group, x[:2])
        train(here, lambda: here(part(here, x), batch=len(x)))
        return here.full_state_dict()

    found = run_on_threads(3, work)
    train(whole, lambda: whole(x))
    for each in found:
        for key, value in whole.state_dict().items():
            assert torch.allclose(each[key], value, rtol=0, atol=1e-10), key
