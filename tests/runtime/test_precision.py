"""Reduced precision: what is rounded, what is not, and agreement of devices on it.

The oracle is torch.autocast on one device.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.runtime.module import Distributed
from convoy.runtime.precision import PRECISIONS, GradScaler, UnderAutocast, compute_in
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from tests.support import nets
from tests.support.one_device import by_name, mixed, one_trace
from tests.support.threads import run_on_threads

X = torch.zeros(2, 3, 8, 8)


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        own = torch.Generator().manual_seed(5)
        self.x = torch.randn(30, 3, 8, 8, generator=own)
        self.targets = torch.randint(0, nets.CLASSES, (30,), generator=own)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.targets[index])


def train(model: nn.Module, epochs: int = 4) -> list[float]:
    """Train on batches of 10 samples and return the losses."""
    part = model if isinstance(model, Distributed) else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loaders = Loader(Samples(), 10, part), Loader(Samples(), 10, part, shuffle=False)
    return fit(Training(model, optimizer), *loaders, epochs).losses


class Kernels(TorchDispatchMode):
    """A recorder of the dtypes of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("convolution", "convolution_backward", "addmm", "mm"):
            self.dtypes.setdefault(name, set()).update(a.dtype for a in args if isinstance(a, Tensor))
        return func(*args, **(kwargs or {}))


def alone(net: str, precision: str) -> Distributed:
    model = nets.build(net, dtype=torch.float32)
    group = convoy.join()
    plan = convoy.make_plan("data", model, X, 10, group, speeds=[1])
    return convoy.distribute(model, plan, group, X, precision=precision)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_only_matrix_products_use_the_precision(precision: str, dtype: torch.dtype) -> None:
    """torch.autocast around the whole would leave every backward of a convolution in float32, without a word."""
    part = alone("two-conv", precision)
    with part.group, Kernels() as kernels:
        (x, y), *_ = Loader(Samples(), 10, part)
        F.cross_entropy(part(x), y).backward()
    assert kernels.dtypes == {name: {dtype} for name in ("convolution", "convolution_backward", "addmm", "mm")}
    assert {p.dtype for p in part.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in part.parameters() if p.grad is not None} == {torch.float32}


def test_default_precision_is_the_models_dtype() -> None:
    model = nets.build("two-conv")
    with convoy.join() as group:
        plan = convoy.make_plan("data", model, X.double(), 10, group, speeds=[1])
        part = convoy.distribute(model, plan, group, X.double())
        with Kernels() as kernels:
            F.cross_entropy(part(X.double(), batch=2), torch.tensor([0, 1])).backward()
    assert set().union(*kernels.dtypes.values()) == {torch.float64}


@pytest.mark.parametrize("net", ["two-conv", "resnet", "opaque-per-sample", "concatenation"])
def test_one_device_trains_as_under_autocast(net: str) -> None:
    """In two-conv every rounding is the same one. Batch norm takes float32 here, where autocast hands it bf16."""
    expected = train(UnderAutocast(nets.build(net, dtype=torch.float32), "bf16"))
    in_float32 = train(nets.build(net, dtype=torch.float32))
    part = alone(net, "bf16")
    with part.group:
        found = train(part)
    assert expected != in_float32
    assert found == pytest.approx(expected, abs=1e-6 if net == "two-conv" else 0.05)
    assert found != in_float32


@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid", "master", "model", "mixed"])
def test_devices_train_as_one_under_autocast(plan: str) -> None:
    """As near as bf16 can tell: sums over devices add numbers that were rounded on each of them."""
    expected = train(UnderAutocast(nets.build("two-conv", dtype=torch.float32), "bf16"))
    model = nets.build("two-conv", dtype=torch.float32)
    chosen = mixed("two-conv") if plan == "mixed" else by_name(plan, "two-conv")

    def work(group: Group) -> list[float]:
        part = convoy.distribute(model, chosen, group, X, precision="bf16")
        return train(part)

    with one_trace("two-conv", torch.float32):
        rows = run_on_threads(4, work)
    assert rows[1:] == rows[:1] * 3, "the same on every device, to the last bit"
    assert rows[0] == pytest.approx(expected, abs=0.02)


def test_gathered_weights_stay_float32() -> None:
    model = nets.build("two-conv", dtype=torch.float32)

    def work(group: Group) -> bool:
        part = convoy.distribute(model, by_name("model", "two-conv"), group, X, precision="bf16")
        return all(torch.equal(v, model.state_dict()[k]) for k, v in part.full_state_dict().items())

    with one_trace("two-conv", torch.float32):
        assert run_on_threads(4, work) == [True] * 4


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("precisions", "dtype", "error", "words"),
    [
        (["half"] * 2, torch.float32, InputError, "unknown precision 'half': choose one of bf16, float32, fp16"),
        (["fp16"] * 2, torch.float32, InputError, "precision fp16, but device 0, 1 is a CPU.* use bf16"),
        (["bf16"] * 2, torch.float64, InputError, "layer 'conv1' is float64.* use model.float\\(\\)"),
        (
            ["float32", "bf16"],
            torch.float32,
            MismatchError,
            "float32 on device 0, but bf16 on device 1; give all the same",
        ),
    ],
)
def test_invalid_precisions_are_refused(
    precisions: list[str], dtype: torch.dtype, error: type[Exception], words: str
) -> None:
    model = nets.build("two-conv", dtype=dtype)

    def work(group: Group) -> None:
        plan = by_name("data", "two-conv", speeds=convoy.plan.presets.Speeds((1.0, 1.0)))
        convoy.distribute(model, plan, group, X.to(dtype), precision=precisions[group.device])

    with pytest.raises(error, match=words):
        run_on_threads(2, work)


def test_every_precision_is_known_to_autocast() -> None:
    assert list(PRECISIONS) == ["float32", "bf16", "fp16"]
    for dtype in PRECISIONS.values():
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = nn.Linear(2, 2)(torch.ones(1, 2))
        assert y.dtype == (dtype or torch.float32)


# ------------------------------------------------------------------------------------------------- loss scaling


def test_overflow_on_one_device_skips_the_step_on_all() -> None:
    """torch's own scaler looks at the local shards: device 2 would leave out a step that the others make, and from then on
    the copies of the weights would differ."""
    model = nets.build("two-conv", dtype=torch.float32)

    def work(group: Group) -> list[Any]:
        part = convoy.distribute(model, by_name("master", "two-conv"), group, X)
        optimizer, rows = torch.optim.SGD(part.parameters(), lr=0.1), []
        scaler = GradScaler(part, init_scale=8.0)
        for step in range(3):
            before = [p.detach().clone() for p in part.parameters()]
            for x, y in Loader(Samples(), 30, part):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(part(x), y)).backward()
            if step == 1 and group.device == 2:
                part.module.get_parameter("conv1.weight").grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
                part.gradients_changed()
            scaler.unscale_(optimizer)
            norm = float(convoy.train.clip_grad_norm_(part, 1e9)) if step != 1 else 0.0
            scaler.step(optimizer)
            scaler.update()
            changed = any(not torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
            rows.append((changed, scaler.skips, scaler.get_scale(), round(norm, 4)))
        return [any(p.numel() for p in part.parameters()), rows]

    with one_trace("two-conv", torch.float32):
        devices = run_on_threads(4, work)
    assert not devices[1][0], "a device without work, and without gradients, takes part all the same"
    for held, rows in devices:
        assert [row[:3] for row in rows] == [(held, False, 8.0), (False, True, 4.0), (held, False, 4.0)]
        assert [row[3] for row in rows] == [row[3] for row in devices[0][1]], "the norm of unscaled gradients"
    reference = nets.build("two-conv", dtype=torch.float32)
    samples = Samples()
    F.cross_entropy(reference(samples.x), samples.targets).backward()
    assert devices[0][1][0][3] == pytest.approx(float(convoy.train.clip_grad_norm_(reference, 1e9)), abs=1e-3)


def test_skipped_step_skips_schedule_and_average() -> None:
    model = nets.build("two-conv", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    average = convoy.WeightAverage(optimizer, 0.5)
    training = Training(model, optimizer, schedule=schedule, average=average, scaler=GradScaler(model, init_scale=4.0))
    samples = Samples()
    training.backward(samples.x, samples.targets, 1.0)
    next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    training.update()
    assert (optimizer.param_groups[0]["lr"], dict(optimizer.state)) == (0.1, {})
    optimizer.zero_grad()
    training.backward(samples.x, samples.targets, 1.0)
    training.update()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert len(optimizer.state) == 6, "averages"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gpu_trains_as_under_autocast(precision: str) -> None:
    model = nets.build("two-conv", dtype=torch.float32)
    expected = train(nets.build("two-conv", dtype=torch.float32))
    with convoy.join("cuda:0") as group:
        plan = convoy.make_plan("data", model, X, 10, group, speeds=[1])
        part = convoy.distribute(model, plan, group, X, precision=precision)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
        scaler = convoy.GradScaler(part, init_scale=1024.0) if precision == "fp16" else None
        loaders = Loader(Samples(), 10, part), Loader(Samples(), 10, part, shuffle=False)
        found = fit(Training(part, optimizer, scaler=scaler), *loaders, 4).losses
    assert found == pytest.approx(expected, abs=0.05)


def test_compute_in_matches_distribute() -> None:
    part = alone("two-conv", "float32")
    with part.group:
        compute_in(part, "bf16")
        with Kernels() as kernels:
            (x, y), *_ = Loader(Samples(), 10, part)
            F.cross_entropy(part(x), y).backward()
    assert set().union(*kernels.dtypes.values()) == {torch.bfloat16}
