"""Common mistakes with a distributed model: they work anyway, or are refused with a remedy."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.runtime.module import Distributed
from convoy.train import Rebalancer, full_optimizer_state, reshard
from tests.support.one_device import OPTIMIZERS
from tests.support.processes import on_processes
from tests.support.small_script import ALONE, SPEEDS, images, net, shuffled
from tests.support.threads import run_on_threads


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def by_plan(group: Group, plan: str = "master", model: nn.Module | None = None, batch: int = 5) -> Distributed:
    """Return the model after the first three of the four lines."""
    model, x = net() if model is None else model, images()[:2][0]
    made = convoy.make_plan(plan, model, x, batch, group, speeds=SPEEDS[: group.devices])
    return convoy.distribute(model, made, group, x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def on_three(work: Callable[[Group], Any]) -> list[Any]:
    return run_on_threads(3, work, timeout_s=20)


def refused_on_three(work: Callable[[Group], Any], error: type[Exception], told: str) -> None:
    """Raise the first error of a device."""
    with pytest.raises(error, match=told):
        on_three(work)


# --- the example -------------------------------------------------------------------------------------------------------


def test_example_without_a_batch_axis_is_refused() -> None:
    x = images()[0][0]
    with pytest.raises(InputError, match=r"does not run on the example.* Give one batch.*x\[None\]"):
        convoy.make_plan("data", net(), x, 5, ALONE, speeds=(1.0,))


def test_sync_batch_norm_trains_alone_and_is_refused_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _losses(net(), lambda *given: given)
    made = _losses(
        nn.SyncBatchNorm.convert_sync_batchnorm(net()),
        lambda *given: convoy.prepare(*given, plan="data", speeds=(1.0,), group=ALONE),
    )
    assert made == pytest.approx(expected, abs=1e-10)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    model = nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(net()), nn.ReLU())
    with pytest.raises(InputError, match=r"'0.1' is a SyncBatchNorm.*leave convert_sync_batchnorm out"):
        convoy.make_plan("data", model, images()[:2][0], 5, ALONE, speeds=(1.0,))


# --- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (lambda d: {"seed": d}, "seed is 0 on device 0, but 1 on device 1, 2 on device 2"),
        (lambda d: {"batch_size": 5 + d // 2}, "batch_size is 5 on device 0, but 6 on device 2"),
        (lambda d: {"dataset": images(23 - d // 2)}, "the number of samples is 23 on device 0, but 22 on device 2"),
    ],
)
def test_differing_loaders_are_refused(options: Callable[[int], dict[str, Any]], told: str) -> None:
    def work(group: Group) -> None:
        given: dict[str, Any] = {"dataset": images(), "batch_size": 5, **options(group.device)}
        next(iter(convoy.loader(model=by_plan(group), **given)))

    refused_on_three(work, MismatchError, told)


def test_a_loader_that_only_device_0_iterates_over_is_refused() -> None:
    def work(group: Group) -> None:
        model = net()
        part, _, train, test = convoy.prepare(
            model, sgd(model), shuffled(), DataLoader(images(8), 4), plan="data", speeds=SPEEDS, group=group
        )
        part.train(group.device != 0)
        next(iter(test if group.device == 0 else train))

    refused_on_three(
        work, MismatchError, "loaders that differ: the number of samples is 8 on device 0, but 23 on device 1"
    )


# --- weights -----------------------------------------------------------------------------------------------------------


def test_copies_that_differ_are_refused_at_the_next_epoch() -> None:
    def work(group: Group) -> None:
        part = by_plan(group, "data")
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1 if group.device == 1 else 0.05)
        loader = convoy.loader(images(), 5, part)
        for _ in range(2):
            for x, y in loader:
                F.cross_entropy(part(x), y).backward()
                optimizer.step()

    refused_on_three(work, MismatchError, "the copies of .* on device 0 and device 1 are no longer the same")


def test_calls_that_would_see_shards_are_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.conv(x).flatten(1))  # type: ignore[no-any-return]

    model = Net().double()

    def work(group: Group) -> None:
        part = by_plan(group, "model", model)
        assert part.to("cpu") is part
        with pytest.raises(InputError, match=r"only local shards: call full_state_dict\(\)"):
            part.module.state_dict()
        assert part.full_state_dict().keys() == model.state_dict().keys()
        copies = by_plan(group, "data", model)
        assert copies.module.state_dict().keys() == model.state_dict().keys()
        with pytest.raises(
            InputError, match=r"no longer torch.float64 on cpu: change the model before it is distributed"
        ):
            copies.float()(torch.zeros(6, 1, 6, 6).double(), whole=True)

    on_three(work)


def test_undistributed_model_is_refused() -> None:
    model: Any = net()
    for use in (
        lambda: convoy.loader(images(), 5, model),
        lambda: Rebalancer(model, sgd(model)),
        lambda: full_optimizer_state(model, sgd(model)),
        lambda: reshard(model, by_plan(ALONE).plan),
    ):
        with pytest.raises(InputError, match=r"was given a Sequential, which is not distributed: give the model that"):
            use()


# --- wrappers ----------------------------------------------------------------------------------------------------------


def test_data_parallel_wrapper_is_refused() -> None:
    part, x = by_plan(ALONE), images()[:5][0]
    with pytest.raises(InputError, match=r"remove DataParallel"):
        part._replicate_for_data_parallel()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        # No first broadcast: gloo's thread needs the GIL to free its tensors, while the end of the group waits for the thread.
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(part), init_sync=False)
        with pytest.raises(InputError, match=r"DistributedDataParallel around .* remove that wrapper"):
            wrapped(x)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_torch_compile_leaves_a_distributed_model_unchanged() -> None:
    part, (x, y) = by_plan(ALONE), images()[:5]
    compiled = torch.compile(part, backend="eager")
    torch.testing.assert_close(compiled(x, batch=5), net()(x), rtol=1e-10, atol=1e-10)

    @torch.compile(backend="eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(part(x, batch=5), y)

    assert loss_of(x, y).item() == pytest.approx(F.cross_entropy(net()(x), y).item(), abs=1e-12)
    plain = torch.compile(lambda x: x + 1, backend="eager")  # others are compiled as ever
    assert plain(torch.zeros(1)).item() == 1


# --- optimizers --------------------------------------------------------------------------------------------------------


def _losses(model: nn.Module, change: Callable[[Any, Any, Any], Any], **options: Any) -> list[float]:
    """Return the losses of two epochs; `change` may replace model, optimizer and loader."""
    optimizer = options.get("optimizer", sgd)(model)
    schedule = options.get("schedule", lambda _: None)(optimizer)
    for x, y in list(shuffled())[: options.get("before", 0)]:
        step(model, optimizer, x, y)
    model, optimizer, loader = change(model, optimizer, shuffled())
    losses = []
    for _ in range(2):
        for x, y in loader:
            losses.append(step(model, optimizer, x, y))
            if schedule is not None:
                schedule.step(*([losses[-1]] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    return losses


def assert_as_alone(plan: str = "master", **options: Any) -> None:
    expected = _losses(net(), lambda *given: given, **options)

    def work(group: Group) -> list[float]:
        return _losses(net(), lambda *given: convoy.prepare(*given, plan=plan, speeds=SPEEDS, group=group), **options)

    for found in on_three(work):
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.ASGD(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, momentum=0.5),
        OPTIMIZERS["adagrad"],
    ],
    ids=["asgd", "rmsprop", "adagrad"],
)
def test_prepare_keeps_the_state_of_every_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    assert_as_alone(plan="hybrid", before=3, optimizer=lambda model: make(model.parameters()))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.3, 3), schedules.ExponentialLR(o, 0.8)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_continue_after_prepare(name: str) -> None:
    assert_as_alone(schedule=SCHEDULES[name])


def test_optimizer_state_dict_of_shards_is_refused() -> None:
    def work(group: Group) -> None:
        for plan in ("model", "data"):
            model = net()
            part, optimizer, loader = convoy.prepare(
                model, sgd(model), shuffled(), plan=plan, speeds=(1.0,) * 3, group=group
            )
            for x, y in loader:
                step(part, optimizer, x, y)
            if plan == "data":
                optimizer.load_state_dict(optimizer.state_dict())
                continue
            with pytest.raises(InputError, match=r"the state of local shards only: save model and optimizer"):
                optimizer.state_dict()
            with pytest.raises(InputError, match=r"load it before convoy.prepare"):
                optimizer.load_state_dict({"state": {}, "param_groups": []})

    on_three(work)


# --- prepare -----------------------------------------------------------------------------------------------------------


class Wrapped:
    """A loader around a loader, as timm's PrefetchLoader."""

    def __init__(self) -> None:
        self.loader = shuffled()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda m, o: (m, o, Wrapped()), "a Wrapped as a loader: .*give DataLoaders, not what wraps them"),
        (lambda m, o: (o, m, shuffled()), "in this order; its model is a SGD"),
        (lambda m, o: (m, shuffled(), o), "in this order; its optimizer is a DataLoader"),
        (
            lambda m, o: (m, o, shuffled(), schedules.StepLR(o, 1)),
            "a StepLR as a loader: leave it out; it continues to work",
        ),
        (lambda m, o: (m, o, shuffled(), images()), "a TensorDataset as a loader: give DataLoaders"),
        (lambda m, o: convoy.prepare(m, o, shuffled(), plan="data", speeds=(1.0,), group=ALONE), "distributed already"),
        (
            lambda m, o: (m, o, convoy.loader(images(), 5)),
            "a Loader as a loader: it is prepared already",
        ),
    ],
)
def test_wrong_arguments_of_prepare_are_refused(given: Callable[[Any, Any], Any], told: str) -> None:
    model = net()
    with pytest.raises(InputError, match=told):
        convoy.prepare(*given(model, sgd(model)), plan="data", speeds=(1.0,), group=ALONE)


# --- what one device does alone ------------------------------------------------------------------------------------------


def alone_at(group: Group, mistake: str) -> str:
    """Return the final message to this device."""
    part = by_plan(group)
    optimizer, loader = sgd(part), convoy.loader(images(), 5, part)
    x, y = images()[:5]
    first = group.device == 0
    try:
        for k, (x, y) in enumerate(loader):
            step(part, optimizer, x, y)
            if mistake == "raise" and first and k == 1:
                raise ValueError("a bug of device 0")
            if mistake == "state" and first:
                part.full_state_dict()
            if mistake == "forward" and first:
                part(x)
        if mistake == "evaluate" and first:
            part.eval()
            for x, _ in loader:
                part(x)
    except convoy.ConvoyError as error:
        return str(error)
    except ValueError as error:
        group.close(error)
        return "left"
    return "no error"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("state", "`part.full_state_dict()`"),
        ("forward", "`part(x)`"),
        ("evaluate", "`for x, _ in loader:`"),
    ],
)
def test_collective_call_on_one_device_is_named(mistake: str, told: str) -> None:
    first, second = on_processes(2, "tests.train.test_mistakes:alone_at", mistake, timeout_s=3.0)
    assert "test_mistakes.py line " in first
    assert told in first
    assert "move such a line out of `if rank == 0:`" in first
    assert second == "no error" or "test_mistakes.py line " in second


def test_an_error_on_one_device_reaches_the_others() -> None:
    first, second = on_processes(2, "tests.train.test_mistakes:alone_at", "raise", timeout_s=3.0)
    assert first == "left"
    assert "device 0 (host" in second
    assert "ValueError: a bug of device 0" in second
