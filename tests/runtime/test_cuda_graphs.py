"""`cuda_graphs=True`: a training has the numbers of one device.

Without a GPU, a stand-in repeats the work instead of its kernels. As a CUDA graph does, it overwrites its results in fixed
memory, and forgets the activations of the previous forward.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.comm.group import AloneGroup, Group
from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Form
from convoy.runtime import cuda_graphs
from convoy.runtime.cuda_graphs import MOST_GRAPHS, WARM_UP, CudaGraphs, GraphRegion
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from convoy.train.controller import Rebalancer
from tests.support import nets, one_device
from tests.support.nets import Dropouts
from tests.support.one_device import EXACT, Training, by_name, check, in_shares
from tests.support.slow import most_slow
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

Record = Callable[[Callable[[], list[Any]]], tuple[Callable[[], None], list[Any]]]


def repeating_recorder() -> Record:
    def record(work: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        results = [None if x is None else x.clone() for x in work()]

        def repeat() -> None:
            for own, value in zip(results, work(), strict=True):
                if own is not None:
                    own.copy_(value)

        return repeat, results

    return record


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraphs]:
    """Capture on CPUs. Return the graphs of all models of a test."""
    found: list[CudaGraphs] = []

    def graphs() -> CudaGraphs:
        found.append(CudaGraphs())
        return found[-1]

    monkeypatch.setattr(cuda_graphs, "recorder", repeating_recorder)
    monkeypatch.setattr("convoy.runtime.module.can_capture", lambda _device: True)
    monkeypatch.setattr("convoy.runtime.module.CudaGraphs", graphs)
    monkeypatch.setattr(one_device, "Distributed", functools.partial(Distributed, cuda_graphs=True))
    return found


def assert_used(made: list[CudaGraphs]) -> None:
    assert any(each.captured for each in made)
    assert not any(each.refused for each in made)


@pytest.mark.parametrize("plan", most_slow(1, ["hybrid", "data-by-speed"]))
def test_uneven_shares_and_changing_batches_match_one_device(plan: str, made: list[CudaGraphs]) -> None:
    """Batches of 10 and of 3 alternate; a device without samples has no rows."""
    check(Training("two-conv", sizes=(10, 3) * 6, optimizer="adam"), by_name(plan, "two-conv"), EXACT)
    assert_used(made)


@pytest.mark.parametrize("form", most_slow(1, ["free", "keep"]))
def test_sharded_weights_match_one_device(form: Form, made: list[CudaGraphs]) -> None:
    plan = in_shares(by_name("data-by-speed", "two-conv"), "two-conv", (4, 3, 2, 1), form)
    assert plan.sharded
    check(Training("two-conv", sizes=(10,) * 6), plan, EXACT)
    assert_used(made)


def test_batch_norm_statistics_match_pytorch(made: list[CudaGraphs]) -> None:
    """The capture runs the layers several times: that must not remain in the running means."""
    plan = named_plan("data", one_device.graph_of("resnet"), 10, Speeds((1.0,)))
    check(Training("resnet", sizes=(10,) * 6), plan, EXACT)
    assert_used(made)


def train(part: Distributed, sizes: list[int], *, autocast: bool = False) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    dtype = next(iter(part.parameters())).dtype
    device = part.group.torch_device
    own = torch.Generator().manual_seed(3)
    for n in sizes:
        x = torch.randn(n, 3, 8, 8, dtype=dtype, generator=own).to(device)
        y = torch.randint(0, nets.CLASSES, (n,), generator=own).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(part(x, whole=True), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(model: nn.Module, *, cuda_graphs: bool = True, device: str = "cpu") -> Distributed:
    group, x = AloneGroup(torch.device(device)), torch.zeros(2, 3, 8, 8, dtype=next(model.parameters()).dtype)
    plan = convoy.make_plan("data", model, x, 8, group, speeds=[1])
    return Distributed(model, plan, group, x, cuda_graphs=cuda_graphs)


def test_dropout_draws_the_same_numbers(made: list[CudaGraphs]) -> None:
    losses = []
    for graphs in (False, True):
        with torch_seed(1):
            part = alone(Dropouts().double(), cuda_graphs=graphs)
            losses.append(train(part, [8] * 6))
    assert losses[1] == losses[0]
    assert_used(made)
    captured = [op.layer for region in regions_in(part) for op in region.layers]
    assert captured
    assert not any(part.traced[True].graph[name].random for name in captured)


def regions_in(part: Distributed) -> list[GraphRegion]:
    programs = [p for variant in part._variants.values() for p in variant.programs.values()]
    return [region for program in programs for each in program.regions.values() for region in each.values()]


def test_training_follows_the_callers_autocast(made: list[CudaGraphs]) -> None:
    losses = [
        train(alone(nets.build("two-conv", dtype=torch.float32), cuda_graphs=graphs), [8] * 6, autocast=True)
        for graphs in (False, True)
    ]
    assert losses[1] == losses[0]
    assert_used(made)


def test_changed_shares_capture_again(made: list[CudaGraphs]) -> None:
    plans = [by_name("data-by-speed", "two-conv", speeds=Speeds(s)) for s in ((7, 3), (4, 6))]
    model = nets.build("two-conv")

    def work(group: Group, *, graphs: bool) -> list[float]:
        x = torch.zeros(2, *nets.shape_of(model)).double()
        here = Distributed(model, plans[0], group, x, cuda_graphs=graphs)
        losses = train(here, [10] * 5)
        reshard(here, plans[1])
        return losses + train(here, [10] * 5)

    one, other = (run_on_threads(2, functools.partial(work, graphs=g), timeout_s=60) for g in (False, True))
    assert other[0] == one[0]
    assert_used(made)


def test_rare_batch_sizes_are_not_captured(made: list[CudaGraphs]) -> None:
    train(alone(nets.build("two-conv")), [8] * WARM_UP + [5] * WARM_UP)
    assert made[0].captured == 0


def test_number_of_graphs_is_bounded(made: list[CudaGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    part = alone(nets.build("two-conv"))
    train(part, [n for n in range(1, 6) for _ in range(WARM_UP + 2)])
    assert made[0].captured == len([r for r in regions_in(part) if r.graph is not None]) == 2 < MOST_GRAPHS


def test_nothing_is_captured_while_plans_are_tried(made: list[CudaGraphs]) -> None:
    part = alone(nets.build("two-conv"))
    Rebalancer(part, others=[part.plan])
    train(part, [8] * (WARM_UP + 2))
    assert made[0].captured == 0
    Rebalancer(part)
    train(part, [8] * (WARM_UP + 1))
    assert_used(made)


def wrong_recorder() -> Record:
    def record(work: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        return (lambda: None), [None if x is None else x + 0.1 for x in work()]

    return record


def failing_recorder() -> Record:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [(wrong_recorder, "computed other values than the layers"), (failing_recorder, "operation not permitted")],
)
def test_refused_region_runs_its_layers_and_is_reported(
    recorder: Callable[[], Record], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(alone(nets.build("two-conv"), cuda_graphs=False), [8] * (WARM_UP + 3))
    part = alone(nets.build("two-conv"))
    monkeypatch.setattr(cuda_graphs, "recorder", recorder)
    with pytest.warns(UserWarning, match=reason):
        assert train(part, [8] * (WARM_UP + 3)) == plain
    assert part.cuda_graphs is not None
    assert reason in part.cuda_graphs.summary()


def captured(net: str = "resnet") -> tuple[Distributed, nn.Module, Tensor]:
    """Return a captured model, a plain one with the same weights, and a batch."""
    part = alone(nets.build(net))
    train(part, [8] * (WARM_UP + 1))
    assert all(region.graph is not None for region in regions_in(part))
    plain = nets.build(net)
    plain.load_state_dict(part.full_state_dict())
    return part, plain, torch.randn(8, 3, 8, 8).double()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_two_forwards_before_a_backward_give_both_gradients() -> None:
    """The second forward must not overwrite the activations of the first."""
    part, plain, x = captured()
    for model, options in ((part, {"whole": True}), (plain, {})):
        model.zero_grad()
        first, second = model(x, **options), model(2 * x, **options)
        (first.square().sum() + second.sum()).backward()
    torch.testing.assert_close(gradients(part), gradients(plain), rtol=1e-10, atol=1e-10)


def test_a_second_backward_is_refused() -> None:
    """The first one may have overwritten activations, as memory of its own intermediate results."""
    part, _, x = captured()
    y = part(x, whole=True)
    y.sum().backward(retain_graph=True)
    with pytest.raises(InputError, match=r"retain_graph=True\): leave out cuda_graphs"):
        y.square().sum().backward()


def test_forward_without_backward_leaves_later_steps_right() -> None:
    part, plain, x = captured()
    for model, options in ((part, {"whole": True}), (plain, {})):
        model.zero_grad()
        model(x, **options)
        model(2 * x, **options).square().sum().backward()
    torch.testing.assert_close(gradients(part), gradients(plain), rtol=1e-10, atol=1e-10)


def test_gradients_of_two_steps_add_up() -> None:
    """`.grad` must not lie in the memory that the next backward overwrites."""
    part, plain, x = captured()
    for model, options in ((part, {"whole": True}), (plain, {})):
        model.zero_grad()
        for factor in (1, 2):
            model(factor * x, **options).square().sum().backward()
    torch.testing.assert_close(gradients(part), gradients(plain), rtol=1e-10, atol=1e-10)


def test_kept_outputs_are_not_overwritten() -> None:
    part, _, x = captured("two-conv")
    first = part(x, whole=True)
    value = first.detach().clone()
    first.sum().backward()
    part(2 * x, whole=True).sum().backward()
    assert torch.equal(first, value)


def test_weights_in_other_memory_run_the_layers() -> None:
    part, plain, x = captured()
    for p in part.parameters():
        p.data = p.data.clone() * 2
    for p in plain.parameters():
        p.data *= 2
    torch.testing.assert_close(part(x, whole=True), plain(x), rtol=1e-10, atol=1e-10)


def test_hooks_on_parameters_run_once_per_backward() -> None:
    part = alone(nets.build("two-conv"))
    calls: list[int] = []
    next(iter(part.parameters())).register_hook(lambda _gradient: calls.append(1))
    train(part, [8] * (WARM_UP + 3))
    assert len(calls) == WARM_UP + 3


def test_region_ends_where_a_gradient_sum_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph returns all gradients at its end, so a sum in its middle would begin late."""
    monkeypatch.setattr("convoy.plan.lower.BUCKET_ENTRIES", 4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Tanh(), nn.ReLU(), nn.PReLU(4), nn.Tanh())
    x = torch.zeros(2, 3, 8, 8)

    def modules(group: Group) -> list[list[str]]:
        plan = named_plan("data", trace(model, x).graph, 8, Speeds((1.0, 1.0)))
        here = Distributed(model, plan, group, x)
        variant = here.first_variant()
        found = cuda_graphs.regions_of(variant.executor, variant.program(8), (None, True))
        return [[op.layer for op in region.layers] for region in found.values()]

    assert run_on_threads(2, modules) == [[["1", "2", "3"], ["4", "5"]]] * 2


def test_composite_layers_are_not_captured() -> None:
    for net in ("average", "own-norm", "hooked", "own-backward", "in-place"):
        part = alone(nets.build(net), cuda_graphs=False)
        for name, layer in part.traced[True].graph.layers.items():
            operation = part.traced[True].operations.get(name)
            if operation is None or layer.kind == "input":
                continue
            plain = cuda_graphs.is_plain_call(layer, operation, part.module)
            module = part.module.get_submodule(operation.modules[0]) if operation.modules else None
            if plain and module is not None:
                assert type(module).__module__.startswith("torch.nn"), (net, name)
                assert not module._forward_hooks, (net, name)
            if plain and operation.call == "function":
                assert not getattr(operation.target, "__name__", "").startswith("i"), (net, name)


# --- changes that a graph would not see -------------------------------------------------------------------------------


def test_tied_weights_get_the_gradient_of_all_uses(made: list[CudaGraphs]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh(), nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(192, nets.CLASSES))
    net = net.double()
    net[2].weight = net[0].weight
    losses = [train(alone(copy.deepcopy(net), cuda_graphs=graphs), [8] * 6) for graphs in (False, True)]
    assert losses[1] == losses[0]
    assert_used(made)


def test_inputs_of_another_dtype_run_the_layers() -> None:
    """Under autocast a batch may come in bfloat16: a graph for such batches would round those in float32."""
    net = nn.Sequential(nn.Tanh(), nn.PReLU(3), nn.Flatten(), nn.Linear(192, nets.CLASSES))
    x = torch.randn(8, 3, 8, 8)
    found = []
    for graphs in (False, True):
        part = alone(copy.deepcopy(net), cuda_graphs=graphs)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(WARM_UP + 1):
                part(x.bfloat16(), whole=True).sum().backward()
            found.append(part(x, whole=True))
    assert torch.equal(*found)


def test_changed_attributes_of_layers_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts lower the momentum of batch norm during training. A graph has the number of its capture."""
    part, plain, x = captured()
    monkeypatch.setattr(cuda_graphs.CapturedGraph, "replay", lambda *_: pytest.fail("a graph was replayed"))
    for model, options in ((part, {"whole": True}), (plain, {})):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.5
        model(x, **options).sum().backward()
    state = part.full_state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("moved", [False, True])
def test_weights_changed_before_backward_are_refused(moved: bool) -> None:
    part, _, x = captured()
    loss = part(x, whole=True).sum()
    with torch.no_grad():
        for p in part.parameters():
            if moved:
                p.data = 2 * p
            else:
                p.mul_(2)
    with pytest.raises(InputError, match="changed between forward and backward"):
        loss.backward()


def test_capture_between_a_forward_and_its_backward() -> None:
    part = alone(nets.build("resnet"))
    train(part, [8] * (WARM_UP - 1))
    plain, x = nets.build("resnet"), torch.randn(8, 3, 8, 8).double()
    plain.load_state_dict(part.full_state_dict())
    for model, options in ((part, {"whole": True}), (plain, {})):
        model.zero_grad()
        first, second = model(x, **options), model(2 * x, **options)
        (first.square().sum() + second.sum()).backward()
    assert all(region.graph is not None for region in regions_in(part))
    torch.testing.assert_close(gradients(part), gradients(plain), rtol=1e-10, atol=1e-10)


def test_capture_in_inference_mode_serves_other_modes() -> None:
    part, plain, x = captured()
    part.eval()
    plain.eval()
    with torch.inference_mode():
        for _ in range(WARM_UP + 1):
            part(x, whole=True)
    with torch.no_grad():
        torch.testing.assert_close(part(2 * x, whole=True), plain(2 * x), rtol=1e-10, atol=1e-10)


def test_copies_count_their_own_graphs(made: list[CudaGraphs]) -> None:
    part, _, _ = captured()
    count = made[0].captured
    other = copy.deepcopy(part)
    assert other.cuda_graphs is not None
    assert (made[0].captured, other.cuda_graphs.captured) == (count, 0)
    assert count


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.cuda
@gpu
@pytest.mark.parametrize("net", ["two-conv", "resnet"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gpu_replays_the_same_numbers(net: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    dtype = torch.float32 if autocast else torch.float64
    parts = [alone(nets.build(net, dtype=dtype), cuda_graphs=graphs, device="cuda") for graphs in (False, True)]
    plain, replayed = (train(part, [8] * 8, autocast=autocast) for part in parts)
    assert replayed == pytest.approx(plain, rel=1e-3 if autocast else 1e-12)
    graphs = parts[1].cuda_graphs
    assert graphs is not None
    assert graphs.captured
    assert not graphs.refused


@pytest.mark.cuda
@gpu
def test_failed_capture_leaves_the_gpu_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.cuda.manual_seed(5)
    wanted = torch.rand(4, device="cuda").tolist()
    torch.cuda.manual_seed(5)
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        cuda_graphs.recorder()(lambda: [x.sum().item()])
    assert torch.rand(4, device="cuda").tolist() == wanted
    work, results = cuda_graphs.recorder()(lambda: [x * 2])
    work()
    assert results[0].tolist() == [2.0] * 4
