"""A distributed model supports torch's module API (outputs, copies, clipping, scaling, loading), or refuses it."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.train import GradScaler
from tests.support import nets
from tests.support.one_device import EXACT, Training, by_name, loss_of, mixed, one_trace, part
from tests.support.small_script import SPEEDS, images, net, shuffled
from tests.support.threads import run_on_threads

EVEN = Speeds((4.0, 3.0, 2.0, 1.0))


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data-by-speed", "model", "mixed"])
@pytest.mark.parametrize("net", ["two-conv", "resnet", "auxiliary", "in-place"])
def test_outputs_may_be_changed_in_place(net: str, plan: str) -> None:
    """Regression: `logits += bias` failed with "A view was created inside a custom Function"."""
    model, chosen = nets.build(net), mixed(net) if plan == "mixed" else by_name(plan, net)
    (x, y), *_ = Training(net, (10,)).batches(model)
    reference = copy.deepcopy(model)

    def step(net: Any, given: Tensor, **size: int) -> Tensor:
        outputs = net(given, **size)
        for out in outputs if isinstance(outputs, tuple) else (outputs,):
            out += 1
            out.mul_(torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype))
        loss = loss_of(outputs, y)
        loss.backward()
        return loss.detach()

    expected = step(reference, x)

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        assert_equal(step(here, part(here, x), batch=10), expected)
        for key, parameter in reference.named_parameters():
            shard = here.module.get_parameter(key)
            if parameter.grad is not None:
                grad = shard.grad if shard.grad is not None else torch.empty_like(shard)
                assert_equal(here.gather(key, grad), parameter.grad)

    with one_trace(net, torch.float64):
        run_on_threads(4, work, timeout_s=30)


class Features(nn.Module):
    """A net that returns a later layer's input, and a dictionary that the caller may extend."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.conv(x).mean((2, 3))
        return {"features": features, "all": [self.fc(features), x.mean((1, 2, 3))]}


def test_an_output_that_backward_reads_may_be_changed_and_containers_may_grow() -> None:
    """fx's immutable_dict and immutable_list came back; and a change of `features` would have changed fc's gradient."""
    torch.manual_seed(5)
    model, x = Features().double(), torch.randn(10, 3, 8, 8).double()
    reference = copy.deepcopy(model)
    out = reference(x)
    (out["all"][0].square().sum() + (out["features"] + 1).square().sum()).backward()

    def work(group: Group) -> None:
        here = Distributed(model, _planned(model, x), group, x[:2])
        out = here(part(here, x), batch=10)
        assert type(out) is dict
        assert type(out["all"]) is list
        assert not out["all"][1].requires_grad
        out["loss"] = out["all"][0].square().sum()
        out["all"].append(out["features"].add_(1))
        (out["loss"] + out["all"][2].square().sum()).backward()
        for key, p in reference.named_parameters():
            shard = here.module.get_parameter(key)
            assert_equal(here.gather(key, shard.grad if shard.grad is not None else shard.detach()), p.grad)

    run_on_threads(4, work, timeout_s=30)


def _planned(model: nn.Module, x: Tensor) -> Any:
    return named_plan("hybrid", trace(model, x[:2]).graph, 10, EVEN)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Answer:
    logits: Any
    rows: list[Any]


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data-by-speed", "mixed"])
def test_deep_copies_and_averaged_models_train_as_on_one_device(plan: str) -> None:
    """A teacher that follows the student, by hand and by torch's AveragedModel: both crashed."""
    model, chosen = nets.build("resnet"), mixed("resnet") if plan == "mixed" else by_name(plan, "resnet")
    batches = Training("resnet", (10, 10, 10)).batches(model)

    def train(student: Any, given: Any) -> tuple[list[Tensor], Any, Any]:
        teacher = copy.deepcopy(student)
        average = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)  # type: ignore[no-untyped-call]
        optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            with torch.no_grad():
                aim = teacher(given(x)).softmax(1)
            loss = loss_of(student(given(x)), y) + F.mse_loss(student(given(x)).softmax(1), aim)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                    t.lerp_(s, 0.1)
            average.update_parameters(student)
            losses.append(loss.detach())
        average.eval()
        return [*losses, average(given(batches[0][0])).detach()], teacher, average.module

    reference = copy.deepcopy(model)
    expected, *others = train(reference, lambda x: x)

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, batches[0][0][:2])
        here.announce(10)
        found, *copies = train(here, lambda x: part(here, x))
        assert_equal(found, expected)
        for mine, theirs in zip(copies, others, strict=True):
            assert_equal(mine.full_state_dict(), theirs.state_dict())

    with one_trace("resnet", torch.float64):
        run_on_threads(4, work, timeout_s=60)


def test_unsupported_module_calls_are_refused_with_a_remedy() -> None:
    model = nets.build("two-conv")
    x = torch.zeros(2, 3, 8, 8, dtype=torch.float64)

    def work(group: Group) -> None:
        here = Distributed(model, by_name("model", "two-conv"), group, x)
        for attempt in (lambda: torch.save(here, io.BytesIO()), lambda: pickle.dumps(here)):
            with pytest.raises(InputError, match=r"cannot be pickled.*full_state_dict"):
                attempt()
        with pytest.raises(InputError, match="full_state_dict"):
            here.state_dict()
        with pytest.raises(InputError, match=r"without 'module\.'"):
            here.load_state_dict({f"module.{k}": v for k, v in model.state_dict().items()}, strict=False)
        here.module.get_submodule("conv1").weight = nn.Parameter(torch.zeros(1).double())
        with pytest.raises(InputError, match=r"'conv1.weight' was replaced"):
            here(part(here, x), batch=2)

    run_on_threads(4, work)


# --- clipping and scaling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data-by-speed", "mixed"])
def test_reported_gradient_changes_are_exact_on_shards(plan: str) -> None:
    """Also on a device that holds nothing, and has no gradient. Without the report the optimizer's step refuses it."""
    model, chosen = nets.build("two-conv"), mixed("two-conv") if plan == "mixed" else by_name(plan, "two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)
    reference = copy.deepcopy(model)
    loss_of(reference(x), y).backward()
    nn.utils.clip_grad_value_(reference.parameters(), 0.01)

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        loss_of(here(part(here, x), batch=10), y).backward()
        nn.utils.clip_grad_value_(here.parameters(), 0.01)
        here.gradients_changed()
        for key, p in reference.named_parameters():
            assert_equal(here.gather(key, here.module.get_parameter(key).grad), p.grad)
        torch.optim.SGD(here.parameters(), lr=0.1).step()

    run_on_threads(4, work)


def replace_gradients(here: Distributed) -> None:
    for p in here.parameters():
        p.grad = None if p.grad is None else p.grad * 2


@pytest.mark.parametrize(
    "change",
    [lambda here: nn.utils.clip_grad_norm_(here.parameters(), 0.1), replace_gradients],
    ids=["clip", "replace"],
)
def test_unreported_gradient_changes_of_shards_are_refused(change: Callable[[Distributed], object]) -> None:
    """With torch's clip_grad_norm_ each device scaled by its own norm, and copies drifted apart."""
    model, chosen = nets.build("two-conv"), by_name("model", "two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
        loss_of(here(part(here, x), batch=10), y).backward()
        change(here)
        uses = (optimizer.step, lambda: here.clip_grad_norm_(0.1), lambda: GradScaler(here).unscale_(optimizer))
        for use in uses if any(p.numel() for p in here.parameters()) else ():
            with pytest.raises(
                InputError, match=r"have changed since .*use convoy.train.clip_grad_norm_.*gradients_changed"
            ):
                use()
        optimizer.zero_grad(set_to_none=False)
        loss_of(here(part(here, x), batch=10), y).backward()
        optimizer.step()

    run_on_threads(4, work)


def penalty(here: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in here.parameters()]).sum()


def ascend(here: Distributed) -> None:
    with torch.no_grad():
        for p in here.parameters():
            p.add_(p / (p.norm() + 1))


def test_penalties_and_norms_of_shards_are_refused() -> None:
    """Each device used the norm of its own shards: a penalty, max-norm, and SAM were wrong without an error."""
    model, chosen = nets.build("two-conv"), by_name("model", "two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        held = any(p.numel() for p in here.parameters())
        for _ in range(2):
            with pytest.raises(InputError, match=r"the loss uses .* parameters directly") if held else nullcontext():
                (loss_of(here(part(here, x), batch=10), y) + penalty(here)).backward()
            here.zero_grad()
        ascend(here)
        with (
            pytest.raises(InputError, match=r"sharded parameters have changed.*weights_changed")
            if held
            else nullcontext()
        ):
            loss_of(here(part(here, x), batch=10), y).backward()
        here.zero_grad()
        here.weights_changed()
        first, second = (loss_of(here(part(here, x), batch=10), y) for _ in range(2))
        (first + second).backward()
        torch.optim.SGD(here.parameters(), lr=0.1).step()
        here(part(here, x), batch=10)

    run_on_threads(4, work)


def test_penalties_are_exact_on_copies() -> None:
    model, chosen = nets.build("two-conv"), by_name("data", "two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)
    reference = copy.deepcopy(model)
    (loss_of(reference(x), y) + penalty(reference)).backward()

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        (loss_of(here(part(here, x), batch=10), y) + penalty(here)).backward()
        for one, other in zip(here.parameters(), reference.parameters(), strict=True):
            assert_equal(one.grad, other.grad)

    run_on_threads(4, work)


def test_clip_grad_norm_of_torch_is_exact_on_copies() -> None:
    model, chosen = nets.build("two-conv"), by_name("data", "two-conv", speeds=EVEN)
    (x, y), *_ = Training("two-conv", (10,)).batches(model)
    reference = copy.deepcopy(model)
    loss_of(reference(x), y).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        loss_of(here(part(here, x), batch=10), y).backward()
        assert_equal(nn.utils.clip_grad_norm_(here.parameters(), 0.01), expected)
        for key, p in reference.named_parameters():
            assert_equal(here.module.get_parameter(key).grad, p.grad)

    run_on_threads(4, work)


def test_sharded_fp16_requires_convoys_scaler() -> None:
    """With torch's, one device that alone finds an overflow would skip a step that the others make."""
    model = nets.build("two-conv", dtype=torch.float32)
    chosen, x = mixed("two-conv"), torch.randn(10, *nets.shape_of(model))
    y = torch.arange(10) % nets.CLASSES

    def train(net: Any, given: Tensor, scaler: Any, **size: int) -> list[float]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scales = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(net(given, **size), y)
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    reference = copy.deepcopy(model)
    expected = train(reference, x, torch.amp.GradScaler("cpu", init_scale=1024.0))

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        given, optimizer = part(here, x), torch.optim.SGD(here.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.float16):
            loss_of(here(given, batch=10), y).backward()
        if any(p.numel() for p in here.parameters()):
            with pytest.raises(InputError, match=r"sees only the local shards.*convoy\.train\.GradScaler\(model\)"):
                optimizer.step()
        assert train(here, given, GradScaler(here, init_scale=1024.0), batch=10) == expected
        torch.testing.assert_close(here.full_state_dict(), dict(reference.state_dict()), rtol=1e-2, atol=1e-3)

    with one_trace("two-conv", torch.float32):
        run_on_threads(4, work, timeout_s=30)


def test_gradients_are_stored_without_a_copy() -> None:
    """Autograd takes a gradient that nobody else holds as .grad; one that somebody holds, it copies, at every step."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 50)).double()
    x = torch.randn(4, 3, 8, 8).double()
    made: list[int] = []

    def work(group: Group) -> None:
        here = Distributed(model, named_plan("data", trace(model, x).graph, 4, Speeds((1.0,))), group, x)
        original = here.first_variant().executor.backward

        def noting(*args: Any) -> Any:
            found, inputs = original(*args)
            made.append(found["2.weight"].data_ptr())
            return found, inputs

        here.first_variant().executor.backward = noting  # type: ignore[method-assign]
        here(x, batch=4).sum().backward()
        assert here.module.get_parameter("2.weight").grad.data_ptr() == made[0]

    run_on_threads(1, work)


# --- saving shards ---------------------------------------------------------------------------------------------------


def after_a_step(plan: str, work: Callable[[Distributed, torch.optim.Optimizer], object]) -> None:
    """Run an action on a model and its optimizer on each device, after a training step."""
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def train(group: Group) -> None:
        here = Distributed(model, by_name(plan, "two-conv"), group, x[:2])
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
        loss_of(here(part(here, x), batch=10), y).backward()
        optimizer.step()
        work(here, optimizer)

    run_on_threads(4, train, timeout_s=30)


def test_saving_inner_module_or_optimizer_never_saves_shards() -> None:
    """Regression: `model.module.state_dict()` (DDP, timm's saver) silently gave shards under the usual keys."""
    keys = nets.build("two-conv").state_dict().keys()

    def save(here: Distributed, optimizer: torch.optim.Optimizer) -> None:
        for saved in (here.module, here.module.get_submodule("conv1")):
            with pytest.raises(InputError, match=r"call full_state_dict\(\) of the distributed model on every device"):
                saved.state_dict()
        with pytest.raises(InputError, match=r"save model and optimizer with convoy.save_checkpoint"):
            optimizer.state_dict()
        assert here.full_state_dict().keys() == keys

    after_a_step("model", save)


def test_replicated_models_save_as_usual() -> None:
    def save(here: Distributed, optimizer: torch.optim.Optimizer) -> None:
        torch.save({"optimizer": optimizer.state_dict(), "model": here.module.state_dict()}, io.BytesIO())

    after_a_step("data", save)


# --- batch norm -------------------------------------------------------------------------------------------------------


def averaged(group: Group | None, plan: str, buffers: bool) -> Tensor:
    """The outputs of averaged weights, with batch norm's statistics averaged (`buffers`) or computed again."""
    model: Any = net()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), shuffled()
    if group is not None:
        model, optimizer, loader = convoy.prepare(model, optimizer, loader, plan=plan, speeds=SPEEDS, group=group)
    ours = group is not None and not buffers
    average = convoy.WeightAverage(optimizer, 0.5) if ours else None
    copied = None if ours else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if copied is not None:
            copied.update_parameters(model)
    with nullcontext() if average is None else average.as_weights(), torch.no_grad():
        tested = model if copied is None else copied
        if not buffers:
            update_bn(DataLoader(images(), 5), tested)
        return tested.eval()(images()[:][0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["data", "model"])
@pytest.mark.parametrize("buffers", [False, True])
def test_averaged_models_get_torchs_batch_norm_statistics(plan: str, buffers: bool) -> None:
    expected = averaged(None, plan, buffers)
    for found in run_on_threads(3, lambda group: averaged(group, plan, buffers)):
        assert_equal(found, expected)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("plan", ["data", "data-by-speed", "model"])
def test_a_last_batch_of_one_before_batch_norm_raises_as_with_torch(plan: str, devices: int) -> None:
    data = TensorDataset(torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3)

    def train(group: Group) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        part, _, loader = convoy.prepare(
            model, None, DataLoader(data, 4), plan=plan, speeds=SPEEDS[:devices], group=group
        )
        for x, y in loader:
            F.cross_entropy(part(x), y).backward()

    with pytest.raises((ValueError, InputError), match=r"more than 1 value per channel|one value per channel"):
        run_on_threads(devices, train)
