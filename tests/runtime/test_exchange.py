"""Moves on real groups: values, adjoints, bytes sent, bitwise equality, and unchanged inputs.

The inner product of a distributed tensor x with its cotangent y, which lies in the dual layout, is the sum over the
devices of the products of their shards: <x, y> = sum_d <x_d, y_d>. Layout by layout that says:

- Split, OnOne: x and y lie in the same shards, and the sum is the product of the whole tensors.
- x Replicated, y Partial: every x_d is the one vector x, so the sum is <x, sum_d y_d>: copies are one vector, and its
  gradient is the sum of what the copies collected.
- x Partial, y Replicated: x is its tuple of summands, and the sum is <sum_d x_d, y>: every summand has the gradient y.

With this product the adjoint of the move F: src -> dst is the move F*: dual(dst) -> dual(src).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from convoy.comm.group import Group, Message, Pending
from convoy.layout import collectives
from convoy.layout.collectives import Reduce
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Shape, Split, dual
from convoy.runtime.exchange import Slots, StartedMove
from tests.support.device_programs import run_rounds
from tests.support.local_shards import (
    DEVICES,
    Array,
    check_shards,
    every_layout,
    integers,
    local_shards,
    nothing,
)
from tests.support.threads import run_on_threads

REDUCES: tuple[Reduce, ...] = ("ring", "butterfly", "direct", "star")
LIMIT_S = 20.0


@dataclass(frozen=True)
class Case:
    """One move of one tensor."""

    src: Layout
    dst: Layout
    shape: Shape
    reduce: Reduce = "ring"

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst} of {self.shape}, {self.reduce}"

    @property
    def schedule(self) -> collectives.Schedule:
        return collectives.schedule(self.src, self.dst, self.shape, self.reduce)

    @property
    def adjoint(self) -> "Case":
        return Case(dual(self.dst), dual(self.src), self.shape, self.reduce)


@dataclass
class Outcome:
    """One device's result of one move."""

    shard: Tensor
    sent_bytes: list[int]
    unchanged: bool


def every_case(layouts: Sequence[Layout], shape: Shape) -> list[Case]:
    """Yield every ordered pair of layouts; where a pending sum becomes copies, with every collective."""
    cases = []
    for src, dst in itertools.product(layouts, repeat=2):
        sums = isinstance(src, Partial) and isinstance(dst, Replicated)
        cases += [Case(src, dst, shape, reduce) for reduce in (REDUCES if sums else REDUCES[:1])]
    return cases


def as_they_come(shard: Tensor) -> Tensor:
    return shard


def strided(shard: Tensor) -> Tensor:
    """Return the same numbers in non-contiguous memory: reversed axes, gaps and an offset."""
    axes = tuple(reversed(range(shard.dim())))
    room = torch.full([2 * extent + 1 for extent in reversed(shard.shape)], 99, dtype=shard.dtype, device=shard.device)
    spaced = room[tuple(slice(1, None, 2) for _ in axes)].permute(axes)
    assert spaced.shape == shard.shape
    return spaced.copy_(shard)


FORMS = {"as they come": as_they_come, "strided": strided}


def move_all(
    group: Group, cases: Sequence[Case], dtype: str = "float64", form: str = "as they come", wire: CommDtype = "exact"
) -> list[Outcome]:
    """Run the moves in order; every device draws the same numbers and takes its own shards."""
    outcomes = []
    for case in cases:
        whole = integers(case.shape, seed=3)
        shard = FORMS[form](own_shard(group, case.src, whole, np.random.default_rng(4)).to(getattr(torch, dtype)))
        before = shard.clone()
        group.clear_counters()
        try:
            result = StartedMove(group, case.schedule, shard, case.src, case.dst, case.shape, wire).land()
        except Exception as error:
            error.add_note(f"in the move {case}")
            raise
        outcomes.append(Outcome(result.clone(), group.sent_bytes, torch.equal(shard, before)))
    return outcomes


def own_shard(group: Group, layout: Layout, whole: Array, rng: np.random.Generator) -> Tensor:
    """Return this device's shard; an empty tensor if it holds nothing."""
    shard = local_shards(layout, whole, rng).get(group.device, np.empty(nothing(layout, whole.shape)))
    return torch.from_numpy(np.array(shard)).to(group.torch_device)


def check_outcomes(
    cases: Sequence[Case], by_device: Sequence[Sequence[Outcome]], dtype: str = "float64", itemsize: int | None = None
) -> None:
    """`itemsize`: bytes of a number on the wire; None: as in memory."""
    itemsize = itemsize or getattr(torch, dtype).itemsize
    for case, *outcomes in zip(cases, *by_device, strict=True):
        try:
            check_value(case, [outcome.shard for outcome in outcomes], dtype)
            sent = {(s, r): n for s, outcome in enumerate(outcomes) for r, n in enumerate(outcome.sent_bytes) if n}
            assert sent == collectives.traffic(case.schedule, itemsize), "bytes on the wire"
            assert all(outcome.unchanged for outcome in outcomes), "a shard was overwritten"
        except AssertionError as error:
            error.add_note(f"in the move {case}")
            raise


def check_value(case: Case, results: Sequence[Tensor], dtype: str) -> None:
    assert {result.dtype for result in results} == {getattr(torch, dtype)}
    found = {device: result.cpu().double().numpy() for device, result in enumerate(results)}
    whole = integers(case.shape, seed=3)
    members = local_shards(case.dst, whole, np.random.default_rng())
    check_shards(case.dst, whole, {device: shard for device, shard in found.items() if device in members})
    for device, shard in found.items():
        assert device in members or shard.shape == nothing(case.dst, case.shape)


# --- values, bytes, unchanged shards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "form"),
    [
        ((10,), "float64", "as they come"),
        ((10, 6), "float64", "as they come"),
        ((4, 5, 3, 2), "float64", "strided"),
        ((0, 5), "float64", "as they come"),
        ((3, 0), "float64", "as they come"),
        ((), "float64", "as they come"),
        ((10, 3), "int64", "strided"),
        ((10, 3), "bfloat16", "as they come"),
    ],
    ids=str,
)
def test_every_move_on_threads(shape: Shape, dtype: str, form: str) -> None:
    cases = every_case(every_layout(shape), shape)
    outcomes = run_on_threads(DEVICES, lambda group: move_all(group, cases, dtype, form), LIMIT_S)
    check_outcomes(cases, outcomes, dtype)


# --- adjoints --------------------------------------------------------------------------------------------------------


def products(group: Group, cases: Sequence[Case]) -> list[tuple[float, float, float]]:
    """This device's part of <Fx, y> and of <x, F*y>, and of the magnitude that rounding is measured against."""
    result = []
    for number, case in enumerate(cases):
        rng = np.random.default_rng(number)
        adjoint = case.adjoint
        x = own_shard(group, case.src, np.asarray(rng.standard_normal(case.shape)), rng)
        y = own_shard(group, adjoint.src, np.asarray(rng.standard_normal(case.shape)), rng)
        there = StartedMove(group, case.schedule, x, case.src, case.dst, case.shape).land()
        back = StartedMove(group, adjoint.schedule, y, adjoint.src, adjoint.dst, case.shape).land()
        assert (there.shape, x.shape) == (y.shape, back.shape)
        magnitude = float((there * y).abs().sum() + (x * back).abs().sum())
        result.append((float((there * y).sum()), float((x * back).sum()), magnitude))
    return result


@pytest.mark.parametrize("shape", [(10,), (10, 6), (4, 5, 3, 2), ()], ids=str)
def test_move_between_duals_is_the_adjoint(shape: Shape) -> None:
    """<F x, y> = <x, F* y> to 1e-12, with the inner product of the head of this file."""
    cases = every_case(every_layout(shape), shape)
    by_device = run_on_threads(DEVICES, lambda group: products(group, cases), LIMIT_S)
    for case, *parts in zip(cases, *by_device, strict=True):
        there, back, magnitude = (sum(column) for column in zip(*parts, strict=True))
        assert magnitude > 1e-6
        assert abs(there - back) <= 1e-12 * magnitude, str(case)


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("devices", [2, 3, 4, 6, 7])
def test_all_reduce_copies_are_bitwise_equal(devices: int, reduce: Reduce) -> None:
    """Random float32 summands of different sizes, where the order of additions changes the bits; run twice."""
    everyone = tuple(range(devices))
    shapes = [(1,), (2,), (devices,), (7, 5), (20_000,), (1000,)]  # 20,000: a direct sum takes two rounds

    def work(group: Group) -> list[Tensor]:
        results = []
        for shape in shapes + shapes:
            generator = torch.Generator().manual_seed(group.device)
            summand = torch.randn(shape, generator=generator) * 10.0 ** float(group.device % 3)
            case = Case(Partial(everyone), Replicated(everyone), shape, reduce)
            results.append(
                StartedMove(group, case.schedule, summand.to(group.torch_device), case.src, case.dst, shape).land()
            )
        return results

    by_device = run_on_threads(devices, work, LIMIT_S)
    for copies in zip(*by_device, strict=True):
        assert all(torch.equal(copy, copies[0]) for copy in copies)
    for results in by_device:
        assert all(torch.equal(a, b) for a, b in zip(results[: len(shapes)], results[len(shapes) :], strict=True))
    exact = sum(
        torch.randn(1000, generator=torch.Generator().manual_seed(d)).double() * 10.0 ** float(d % 3) for d in everyone
    )
    torch.testing.assert_close(by_device[0][-1].cpu().double(), exact, rtol=1e-5, atol=1e-3)


def test_a_sum_at_one_device_adds_in_the_order_of_the_devices() -> None:
    """1e8 + 1 - 1e8 in float32 is 0 in this order, 1 in others: the arrival order must not matter."""

    def work(group: Group) -> list[Tensor]:
        summand = torch.tensor([[1e8, 1.0, -1e8][group.device]], device=group.torch_device)
        cases = [Case(Partial((0, 1, 2)), OnOne(owner), (1,)) for owner in range(3)]
        cases.append(Case(Partial((0, 1, 2)), Split(0, (0, 1, 0)), (1,)))
        cases.append(Case(Partial((0, 1, 2)), Replicated((0, 1, 2)), (1,), "star"))
        return [StartedMove(group, case.schedule, summand, case.src, case.dst, case.shape).land() for case in cases]

    first, second, third = run_on_threads(3, work, LIMIT_S)
    found = [first[0], second[1], third[2], second[3], first[4], second[4], third[4]]
    assert [shard.tolist() for shard in found] == [[0.0]] * len(found)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_expanded_tensors_can_be_copied() -> None:
    """The gradient of a mean is one expanded number: all entries share one memory location."""
    shape = (6, 4)

    def work(group: Group) -> list[Tensor]:
        shard = torch.tensor(float(group.device + 1), device=group.torch_device).expand(shape)
        cases = [Case(Partial((0, 1)), Replicated((0, 1)), shape, reduce) for reduce in REDUCES]
        cases.append(Case(Partial((0, 1)), Split(0, (2, 4)), shape))
        return [StartedMove(group, case.schedule, shard, case.src, case.dst, shape).land() for case in cases]

    for device, results in enumerate(run_on_threads(2, work, LIMIT_S)):
        for result in results[:-1]:
            assert torch.equal(result, torch.full(shape, 3.0))
        assert torch.equal(results[-1], torch.full(((2, 4)[device], 4), 3.0))


# --- rounds on a buffer of one's own ---------------------------------------------------------------------------------


def test_run_rounds_works_in_place() -> None:
    """Gradients are summed in place: the buffer holds the sum afterwards."""

    def work(group: Group) -> tuple[Tensor, bool]:
        flat = torch.arange(10, dtype=torch.float64, device=group.torch_device) * 10**group.device
        where = flat.data_ptr()
        run_rounds(group, collectives.schedule(Partial((0, 1, 2)), Replicated((0, 1, 2)), (10,), "ring"), flat)
        return flat, flat.data_ptr() == where

    for flat, stayed in run_on_threads(3, work, LIMIT_S):
        assert torch.equal(flat, torch.arange(10, dtype=torch.float64) * 111)
        assert stayed


@pytest.mark.parametrize("reduce", ["ring", "butterfly", "direct", "star"])
@pytest.mark.parametrize("n", [2, 3, 10, 31])
def test_all_reduce_in_segments(reduce: Reduce, n: int) -> None:
    """Two concurrent rounds have separate receive buffers, so sums cannot mix."""
    devices, landing = (0, 1, 2), [Slots() for _ in range(3)]

    def work(group: Group) -> list[Tensor]:
        sums = []
        for lane in (0, 1, 1):  # and again, in the memory of the time before
            flat = torch.arange(n, dtype=torch.float64, device=group.torch_device) * 10**group.device
            run_rounds(
                group, collectives.sum_in_segments(devices, n, reduce, 2), flat, lane, landing=landing[group.device]
            )
            sums.append(flat)
        return sums

    for sums in run_on_threads(3, work, LIMIT_S):
        assert all(torch.equal(flat, torch.arange(n, dtype=torch.float64) * 111) for flat in sums)


class _Watched(Group):
    """A group that sends nothing and records receive buffers."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"), LIMIT_S)
        self.open: set[int] = set()

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:  # noqa: ARG002
        where = {message.tensor.data_ptr() for message in receives}
        assert not where & self.open, "two messages under way land in the same memory"
        self.open |= where
        return _Landed(self.open, where)

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        return text, topic

    def close(self, error: BaseException | None = None) -> None:
        pass


@dataclass
class _Landed:
    open: set[int]
    where: set[int]

    def wait(self) -> None:
        self.open -= self.where


def test_concurrent_segments_have_separate_buffers() -> None:
    group, landing = _Watched(), Slots()
    run_rounds(group, collectives.sum_in_segments((0, 1), 8, "ring", 2), torch.zeros(8), landing=landing)
    assert group.open == set()
