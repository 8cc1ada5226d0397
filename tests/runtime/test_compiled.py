"""`compile=True`: a training has the numbers of one device, and compiles a limited number of programs.

torch's backend `aot_eager` takes the same way as its usual one, but for the C++ at the end, which takes seconds for each row.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.comm.group import AloneGroup, Group
from convoy.errors import MismatchError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Form
from convoy.runtime import compiled
from convoy.runtime.compiled import MOST_PROGRAMS, WARM_UP, Compiler
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from convoy.train.controller import Rebalancer
from tests.support import nets, one_device
from tests.support.compiler import compiler_imported  # noqa: F401 - a fixture
from tests.support.nets import Dropouts
from tests.support.one_device import EXACT, Training, by_name, check, in_shares
from tests.support.slow import most_slow
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Compiler]:
    """Return all compilers of a test."""
    found: list[Compiler] = []

    def compiler(group: Group) -> Compiler:
        found.append(Compiler(group))
        return found[-1]

    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr("convoy.runtime.module.Compiler", compiler)
    monkeypatch.setattr(one_device, "Distributed", functools.partial(Distributed, compile=True))
    return found


def assert_used(made: list[Compiler]) -> None:
    assert any(each.used for each in made)
    assert not any(each.refused for each in made)


@pytest.mark.parametrize("plan", most_slow(1, ["hybrid", "data-by-speed"]))
def test_uneven_shares_and_changing_batches_match_one_device(plan: str, made: list[Compiler]) -> None:
    """Batches of 10 and of 3 in turn; the device without samples has no rows."""
    check(Training("two-conv", sizes=(10, 3) * 6, optimizer="adam"), by_name(plan, "two-conv"), EXACT)
    assert_used(made)


@pytest.mark.parametrize("form", most_slow(1, ["free", "keep"]))
def test_sharded_weights_match_one_device(form: Form, made: list[Compiler]) -> None:
    plan = in_shares(by_name("data-by-speed", "two-conv"), "two-conv", (4, 3, 2, 1), form)
    assert plan.sharded
    check(Training("two-conv", sizes=(10,) * 6), plan, EXACT)
    assert_used(made)


def test_batch_norm_statistics_match_pytorch(made: list[Compiler]) -> None:
    """The trial computes on random numbers: they must not remain in the running means."""
    plan = named_plan("data", one_device.graph_of("resnet"), 10, Speeds((1.0,)))
    check(Training("resnet", sizes=(10,) * 6), plan, EXACT)
    assert_used(made)


def train(part: Distributed, sizes: list[int], *, autocast: bool = False) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    dtype = next(iter(part.parameters())).dtype
    own = torch.Generator().manual_seed(3)
    for n in sizes:
        x = torch.randn(n, 3, 8, 8, dtype=dtype, generator=own)
        y = torch.randint(0, nets.CLASSES, (n,), generator=own)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(part(x, whole=True), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(model: nn.Module, *, compile: bool, batch: int = 8) -> Distributed:
    group, x = AloneGroup(torch.device("cpu")), torch.zeros(2, 3, 8, 8, dtype=next(model.parameters()).dtype)
    plan = convoy.make_plan("data", model, x, batch, group, speeds=[1])
    return Distributed(model, plan, group, x, compile=compile)


def test_compiled_dropout_draws_the_same_numbers(made: list[Compiler]) -> None:
    losses = []
    for compile in (False, True):
        with torch_seed(1):
            part = alone(Dropouts().double(), compile=compile)
            losses.append(train(part, [8] * 6))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert_used(made)
    graphs = [str(row.plain.code) for row in rows_in(part)]
    assert graphs
    assert not any("dropout" in text for text in graphs)


def rows_in(part: Distributed) -> list[compiled.CompiledRegion]:
    programs = part._programs.programs.values()
    return [row for program in programs for each in program.compiled.values() for row in each[0].values()]


def test_compiled_training_follows_the_callers_autocast(made: list[Compiler]) -> None:
    losses = [
        train(alone(nets.build("two-conv", dtype=torch.float32), compile=compile), [8] * 6, autocast=True)
        for compile in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert_used(made)


def test_changed_shares_recompile_segments(made: list[Compiler]) -> None:
    """New shapes are new rows; those of the old shares are gone."""
    plans = [by_name("data-by-speed", "two-conv", speeds=Speeds(s)) for s in ((7, 3), (4, 6))]
    model = nets.build("two-conv")

    def work(group: Group, *, compile: bool) -> list[float]:
        here = Distributed(model, plans[0], group, torch.zeros(2, *nets.shape_of(model)).double(), compile=compile)
        losses = train(here, [10] * 5)
        reshard(here, plans[1])
        return losses + train(here, [10] * 5)

    one, other = (run_on_threads(2, functools.partial(work, compile=c), timeout_s=60) for c in (False, True))
    assert other[0] == pytest.approx(one[0], rel=1e-12)
    assert all(each.left == MOST_PROGRAMS - 2 for each in made)
    assert_used(made)


def test_many_batch_sizes_compile_a_few_times_only(made: list[Compiler], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a size that comes now and then not at once."""
    count = counted(monkeypatch)
    part = alone(nets.build("two-conv"), compile=True)
    tried = len(count)
    train(part, [8] * WARM_UP + [5] * WARM_UP)
    assert len(count) == tried, "within the warm-up"
    train(part, [n for n in range(1, MOST_PROGRAMS + 5) for _ in range(WARM_UP + 2)])
    rows = len([row for row in rows_in(part) if row.function is not None])
    assert made[0].left == 0
    assert len(count) - tried == rows == made[0].used
    train(part, [30] * (WARM_UP + 2))
    assert len(count) - tried == rows


def test_nothing_is_compiled_while_plans_are_tried(made: list[Compiler]) -> None:
    part = alone(nets.build("two-conv"), compile=True)
    Rebalancer(part, others=[part.plan])
    train(part, [8] * (WARM_UP + 2))
    assert (made[0].tried, made[0].left) == (0, MOST_PROGRAMS)
    Rebalancer(part)
    train(part, [8] * (WARM_UP + 1))
    assert made[0].tried
    assert_used(made)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    count: list[str] = []
    compile_row = compiled.compiled_by_torch

    def counting(module: nn.Module) -> Any:
        count.append(type(module).__name__)
        return compile_row(module)

    monkeypatch.setattr(compiled, "compiled_by_torch", counting)
    return count


def wrong(module: nn.Module) -> Any:
    """A compiler with a fault: one entry is another."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        first, *others = module(*inputs)
        return first + torch.eye(*first.shape[-2:], dtype=first.dtype).mul(0.1), *others

    return run


def failing(_module: nn.Module) -> Any:
    raise RuntimeError("no such thing\nand more")


@pytest.mark.parametrize(
    ("maker", "reason"), [(wrong, "torch.compile computed other values than the layers"), (failing, "no such thing")]
)
def test_refused_region_runs_uncompiled_and_is_reported(
    maker: Callable[[nn.Module], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(alone(nets.build("two-conv"), compile=False), [8] * (WARM_UP + 3))
    part = alone(nets.build("two-conv"), compile=True)
    monkeypatch.setattr(compiled, "compiled_by_torch", maker)
    with pytest.warns(UserWarning, match=reason):
        assert train(part, [8] * (WARM_UP + 3)) == plain
    assert part.compiler is not None
    assert part.compiler.summary().endswith(f"run compiled; {reason}")


def test_region_starts_at_a_gradient_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function gives all its gradients at its end: a sum in its middle would begin late."""
    monkeypatch.setattr("convoy.plan.lower.BUCKET_ENTRIES", 4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Tanh(), nn.ReLU(), nn.PReLU(4), nn.Tanh())
    x = torch.zeros(2, 3, 8, 8)

    def modules(group: Group) -> list[list[str]]:
        plan = named_plan("data", trace(model, x).graph, 8, Speeds((1.0, 1.0)))
        here = Distributed(model, plan, group, x)
        rows = compiled.regions_of(here._programs.get(True, 8), here.traced[True], here.module)
        return [[str(n.target) for n in row.plain.graph.nodes if n.op == "call_module"] for row in rows.values()]

    assert run_on_threads(2, modules) == [[["1", "2", "3"], ["4", "5"]]] * 2


def test_composite_layers_are_not_compiled() -> None:
    for net in ("average", "own-norm", "hooked", "own-backward", "in-place"):
        part = alone(nets.build(net), compile=False)
        for name, layer in part.traced[True].graph.layers.items():
            operation = part.traced[True].operations.get(name)
            if operation is None or layer.kind == "input":
                continue
            plain = compiled.is_plain_call(layer, operation, part.module, whole=True)
            module = part.module.get_submodule(operation.modules[0]) if operation.modules else None
            if plain and module is not None:
                assert type(module).__module__.startswith("torch.nn"), (net, name)
                assert not module._forward_hooks, (net, name)
            if plain and operation.call == "function":
                assert not getattr(operation.target, "__name__", "").startswith("i"), (net, name)


def test_differing_compile_options_are_refused() -> None:
    model, plan = nets.build("two-conv"), by_name("data", "two-conv")

    def work(group: Group) -> None:
        Distributed(model, plan, group, torch.zeros(2, 3, 8, 8).double(), compile=group.device == 1)

    with pytest.raises(MismatchError, match="device 1 started with another value of compile"):
        run_on_threads(plan.devices, work)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_default_backend_matches_one_device(
    dtype: torch.dtype, tolerance: float, made: list[Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    plain, with_rows = (
        train(alone(nets.build("resnet", dtype=dtype), compile=compile), [8] * (WARM_UP + 3))
        for compile in (False, True)
    )
    assert with_rows == pytest.approx(plain, rel=tolerance)
    assert_used(made)
