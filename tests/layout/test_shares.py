"""Whole shares: hand-calculated tables, and properties for any speeds and limits."""

import re
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from convoy.errors import PlanError
from convoy.layout.shares import Shares, apportion, check, even, holders, ranges, rescale

BY_HAND = [
    # total, weights, shares
    (10, (1, 1), (5, 5)),
    (10, (1, 1, 1), (4, 3, 3)),
    (7, (0.8, 0.5, 0.3, 0.2), (3, 2, 1, 1)),  # 3.11 1.94 1.17 0.78
    (1500, (0.8, 0.5, 0.3, 0.2), (667, 416, 250, 167)),  # 666.67 416.67 250.00 166.67: ties but for the last bits
    (2, (1, 2, 3, 4), (0, 0, 1, 1)),  # 0.2 0.4 0.6 0.8
    (1, (1, 1), (1, 0)),  # a tie goes to the lower index
    (2, (1, 1, 2), (1, 0, 1)),
    (2, (1, 1, 1, 1), (1, 1, 0, 0)),
    (3, (0, 1, 1), (0, 2, 1)),
    (9, (7,), (9,)),
    (0, (0, 0), (0, 0)),
]

BY_HAND_WITH_LIMITS = [
    # total, weights, limits, shares
    (12, (1, 1), {"quantum": 4}, (8, 4)),
    (96, (3, 1), {"quantum": 32}, (64, 32)),  # 2.25 and 0.75 portions
    (10, (4, 1), {"at_most": (5, 10)}, (5, 5)),
    (12, (6, 3, 1), {"at_most": (4, 12, 12)}, (4, 6, 2)),  # the other 8 in the proportion 3 to 1
    (10, (8, 1, 1), {"at_least": (0, 2, 2)}, (6, 2, 2)),
    (10, (9, 1, 0), {"at_least": (0, 3, 1)}, (6, 3, 1)),
    (20, (10, 5, 4, 1), {"at_least": (0, 0, 0, 2), "at_most": (7, 20, 20, 20)}, (7, 6, 5, 2)),  # 11 in 5 to 4
    (10, (9, 1), {"quantum": 2, "at_least": (0, 3)}, (6, 4)),  # 3 entries need two multiples of 2
    (10, (9, 1), {"quantum": 2, "at_most": (5, 10)}, (4, 6)),  # 5 entries are room for two multiples of 2
    (5, (1, 0), {"at_most": (3, 5)}, (3, 2)),  # weight zero, but nobody else has room
    (7, (1, 0, 0), {"at_most": (3, 9, 9)}, (3, 2, 2)),
    (5, (0, 1, 0), {"at_least": (1, 0, 0), "at_most": (9, 2, 9)}, (2, 2, 1)),
    (0, (0, 0), {"at_most": (3, 3)}, (0, 0)),
]

FAR_APART = [
    (10, (1e300, 1e-300), {"at_least": (0, 3)}, (7, 3)),
    (10, (5e-324, 5e-324), {}, (5, 5)),
    (10, (1e308, 1e308), {}, (5, 5)),  # their sum is no float
    (3, (1e-300, 1e300, 1), {"at_least": (1, 0, 1)}, (1, 1, 1)),
    (8, (1e-300, 2e-300, 1), {"at_most": (10, 10, 2)}, (2, 4, 2)),
    (10**18, (1, 1, 1), {}, (333333333333333334, 333333333333333333, 333333333333333333)),
]


@pytest.mark.parametrize(("total", "weights", "shares"), BY_HAND)
def test_shares_by_hand(total: int, weights: tuple[float, ...], shares: Shares) -> None:
    assert apportion(total, weights) == shares


@pytest.mark.parametrize(("total", "weights", "limits", "shares"), BY_HAND_WITH_LIMITS)
def test_shares_under_limits_by_hand(total: int, weights: tuple[float, ...], limits: dict, shares: Shares) -> None:
    assert apportion(total, weights, **limits) == shares


@pytest.mark.parametrize(("total", "weights", "limits", "shares"), FAR_APART)
def test_speeds_may_be_as_far_apart_as_floats(
    total: int, weights: tuple[float, ...], limits: dict, shares: Shares
) -> None:
    """Two speeds of 1e308 overflowed their sum. Under a limit, speeds of 1e-300 and 2e-300 beside one of 1 were treated
    alike, because the search for the level in floats stopped before it got there."""
    assert apportion(total, weights, **limits) == shares


@pytest.mark.parametrize(
    ("total", "weights", "limits", "message"),
    [
        (5, (), {}, r"split 5 by the weights \(\): .*not all zero; give at least one positive speed"),
        (5, (0.0, 0.0), {}, r"split 5 by the weights \(0\.0, 0\.0\): .*not all zero; give at least one positive speed"),
        (5, (1.0, float("nan")), {}, r"weights \(1\.0, nan\): weights must be finite.*give"),
        (0, (1.0, float("inf")), {}, r"weights \(1\.0, inf\): weights must be finite.*give"),
        (-1, (1,), {}, r"split -1 into multiples of 1: .* not negative; change the layer"),
        (10, (1, 1), {"quantum": 4}, r"split 10 into multiples of 4: .* multiple, .* change the layer"),
        (5, (1, 1), {"at_most": (2, 2)}, r"shares of 5 .*at most \(2, 2\).*loosen the limits or add a device"),
        (5, (1, 1), {"at_least": (3, 3)}, r"shares of 5 .*at least \(3, 3\).*loosen the limits or add a device"),
        (5, (1, 1), {"at_least": (3, 0), "at_most": (2, 9)}, r"at least \(3, 0\) and at most \(2, 9\).*loosen"),
    ],
)
def test_impossible_shares_are_refused(total: int, weights: tuple[float, ...], limits: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        apportion(total, weights, **limits)


# --- what holds for any speeds and limits ----------------------------------------------------------------------------

ordinary = st.floats(min_value=0.01, max_value=100)
any_weight = st.one_of(st.just(0.0), ordinary, st.sampled_from([5e-324, 1e-300, 1e-9, 1.0, 1e9, 1e300, 1.7e308]))
some_weights = st.lists(any_weight, min_size=1, max_size=6).filter(any)


@st.composite
def limited(draw: st.DrawFn) -> tuple[int, list[float], int, list[int], list[int]]:
    """Draw total, weights, quantum and feasible limits: shares first, then limits around them."""
    weights = draw(some_weights)
    quantum = draw(st.sampled_from([1, 1, 2, 5]))
    shares = [quantum * draw(st.integers(0, 30)) for _ in weights]
    low = [draw(st.integers(0, share)) for share in shares]
    high = [share + draw(st.integers(0, 40)) for share in shares]
    return sum(shares), weights, quantum, low, high


@given(limited())
@settings(deadline=None)
def test_shares_sum_and_keep_within_limits(case: tuple[int, list[float], int, list[int], list[int]]) -> None:
    total, weights, quantum, low, high = case
    shares = apportion(total, weights, quantum=quantum, at_least=low, at_most=high)
    assert sum(shares) == total
    assert all(share % quantum == 0 for share in shares)
    assert all(lo <= share <= hi for lo, share, hi in zip(low, shares, high, strict=True))


@given(st.integers(0, 3000), some_weights, st.sampled_from([1, 2, 7]))
@settings(deadline=None)
def test_each_share_is_within_a_quantum_of_its_quota(portions: int, weights: list[float], quantum: int) -> None:
    total = portions * quantum
    shares = apportion(total, weights, quantum=quantum)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        quota = total * Fraction(weight) / sum(map(Fraction, weights))
        assert abs(share - quota) < quantum
        assert weight or share == 0


@given(st.integers(0, 500), some_weights)
@settings(deadline=None)
def test_faster_device_gets_no_smaller_share(total: int, weights: list[float]) -> None:
    shares = apportion(total, weights)
    for i, j in product(range(len(weights)), repeat=2):
        if weights[i] > weights[j] or (weights[i] == weights[j] and i < j):
            assert shares[i] >= shares[j]


@given(st.integers(0, 500), st.lists(any_weight, min_size=1, max_size=6, unique=True).filter(any), st.randoms())
@settings(deadline=None)
def test_shares_do_not_depend_on_device_order(total: int, weights: list[float], random) -> None:  # type: ignore[no-untyped-def]
    """Where remainders tie the order decides, so speeds whose quotas tie are left out."""
    remainders = [total * Fraction(w) / sum(map(Fraction, weights)) % 1 for w in weights]
    assume(len(set(remainders)) == len(remainders))
    order = list(range(len(weights)))
    random.shuffle(order)
    shares = apportion(total, weights)
    assert apportion(total, [weights[i] for i in order]) == tuple(shares[i] for i in order)


# --- even, rescale, ranges, holders, check ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "devices", "quantum", "shares"),
    [(7, 3, 1, (3, 2, 2)), (2, 4, 1, (1, 1, 0, 0)), (0, 2, 1, (0, 0)), (12, 2, 4, (8, 4)), (5, 1, 1, (5,))],
)
def test_even_shares_by_hand(total: int, devices: int, quantum: int, shares: Shares) -> None:
    assert even(total, devices, quantum=quantum) == shares


@pytest.mark.parametrize(
    ("shares", "total", "rescaled"),
    [
        ((8, 4, 2, 2), 16, (8, 4, 2, 2)),
        ((8, 4, 2, 2), 5, (2, 1, 1, 1)),  # 2.5 1.25 0.625 0.625
        ((8, 4, 2, 2), 1, (1, 0, 0, 0)),
        ((8, 0, 4), 6, (4, 0, 2)),
        ((8, 0, 4), 0, (0, 0, 0)),
        ((0, 0), 0, (0, 0)),
    ],
)
def test_rescale_by_hand(shares: Shares, total: int, rescaled: Shares) -> None:
    assert rescale(shares, total) == rescaled


@pytest.mark.parametrize(
    ("shares", "where", "who"),
    [
        ((3, 0, 2), ((0, 3), (3, 3), (3, 5)), (0, 2)),
        ((0, 0), ((0, 0), (0, 0)), ()),
        ((), (), ()),
    ],
)
def test_ranges_and_holders_by_hand(shares: Shares, where: tuple[tuple[int, int], ...], who: tuple[int, ...]) -> None:
    assert ranges(shares) == where
    assert holders(shares) == who


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((5, 5), "conv1: shares (5, 5) name 2 devices, the fleet has 3: give one share per device"),
        ((11, -1, 0), "conv1: shares (11, -1, 0) include a negative one: a share is zero (idle) or more"),
        ((5, 4, 0), "conv1: shares (5, 4, 0) sum to 9, the axis has 10: make them sum to 10"),
    ],
)
def test_check_refuses_shares_that_do_not_fit(shares: Shares, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        check(shares, 10, 3, "conv1")
