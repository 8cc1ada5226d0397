"""Layouts: hand-written tables, and the properties of boxes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.layout.layout import (
    Box,
    Layout,
    OnOne,
    Partial,
    Replicated,
    Shape,
    Split,
    box,
    dual,
    entries,
    holders,
    intersection,
    local_shape,
    whole,
)

BOXES: list[tuple[Layout, Shape, list[Box | None]]] = [
    # layout, shape, box of device 0, 1, ...
    (Split(0, (7, 0, 2, 1)), (10,), [((0, 7),), None, ((7, 9),), ((9, 10),)]),
    (Split(0, (2, 1)), (3, 4), [((0, 2), (0, 4)), ((2, 3), (0, 4))]),
    (Split(1, (0, 3, 1)), (2, 4), [None, ((0, 2), (0, 3)), ((0, 2), (3, 4))]),
    (Split(1, (2, 3)), (4, 5, 6, 7), [((0, 4), (0, 2), (0, 6), (0, 7)), ((0, 4), (2, 5), (0, 6), (0, 7))]),
    (Split(3, (1, 0, 1)), (3, 4, 5, 2), [((0, 3), (0, 4), (0, 5), (0, 1)), None, ((0, 3), (0, 4), (0, 5), (1, 2))]),
    (Split(0, (0, 0)), (0, 3), [None, None]),
    (Split(1, (1, 2)), (0, 3), [((0, 0), (0, 1)), ((0, 0), (1, 3))]),
    (Replicated((0, 2)), (3, 4), [((0, 3), (0, 4)), None, ((0, 3), (0, 4))]),
    (Replicated((1,)), (), [None, (), None]),
    (Partial((1, 2)), (5,), [None, ((0, 5),), ((0, 5),)]),
    (OnOne(1), (3, 4), [None, ((0, 3), (0, 4)), None]),
]

LOCAL_SHAPES: list[tuple[Layout, Shape, list[Shape]]] = [
    (Split(0, (7, 0, 2, 1)), (10, 3), [(7, 3), (0, 3), (2, 3), (1, 3)]),
    (Split(1, (0, 3, 1)), (2, 4), [(2, 0), (2, 3), (2, 1)]),
    (Replicated((0, 2)), (3, 4), [(3, 4), (0, 4), (3, 4)]),
    (Partial((1,)), (3, 4), [(0, 4), (3, 4)]),
    (OnOne(1), (3, 4, 5, 6), [(0, 4, 5, 6), (3, 4, 5, 6)]),
    # A number without axes has no axis that could have no entries.
    (OnOne(1), (), [(0,), ()]),
    (Split(1, (1, 2)), (0, 3), [(0, 1), (0, 2)]),
]


@pytest.mark.parametrize(("layout", "shape", "expected"), BOXES)
def test_boxes_by_hand(layout: Layout, shape: Shape, expected: list[Box | None]) -> None:
    assert [box(layout, device, shape) for device in range(len(expected))] == expected


@pytest.mark.parametrize(("layout", "shape", "expected"), LOCAL_SHAPES)
def test_local_shapes_by_hand(layout: Layout, shape: Shape, expected: list[Shape]) -> None:
    assert [local_shape(layout, device, shape) for device in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Split(1, (2, 0, 1)), Split(1, (2, 0, 1))),
        (OnOne(2), OnOne(2)),
        (Replicated((0, 2)), Partial((0, 2))),
        (Partial((1, 0)), Replicated((1, 0))),
    ],
)
def test_dual_by_hand(layout: Layout, expected: Layout) -> None:
    assert dual(layout) == expected
    assert dual(expected) == layout
    for device in range(3):
        assert box(expected, device, (3, 3)) == box(layout, device, (3, 3))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Split(0, (3, 0, 2)), "batch(3,0,2)"),
        (Split(1, (1, 2)), "channel(1,2)"),
        (Split(3, (1, 2)), "axis 3(1,2)"),
        (Replicated((0, 2)), "copies(0,2)"),
        (Partial((1,)), "sum(1)"),
        (OnOne(3), "on(3)"),
    ],
)
def test_layout_text_names_kind_and_shares(layout: Layout, text: str) -> None:
    assert str(layout) == text


def test_whole_and_entries_by_hand() -> None:
    assert whole((3, 4)) == ((0, 3), (0, 4))
    assert whole(()) == ()
    assert entries(((1, 3), (0, 4))) == 8
    assert entries(((1, 1), (0, 4))) == 0
    assert entries(()) == 1


# --- properties ------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def split(draw: st.DrawFn) -> tuple[Split, Shape]:
    shares = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    shape = list(draw(shapes))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = sum(shares)
    return Split(axis, tuple(shares)), tuple(shape)


@st.composite
def any_layout(draw: st.DrawFn) -> tuple[Layout, Shape, int]:
    """Draw a layout, a shape it fits, and the number of devices."""
    if draw(st.booleans()):
        layout, shape = draw(split())
        return layout, shape, len(layout.shares)
    count = draw(st.integers(1, 5))
    members = draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    kind = draw(st.sampled_from([Replicated, Partial, OnOne]))
    return OnOne(members[0]) if kind is OnOne else kind(tuple(members)), draw(shapes), count


@given(split())
@settings(deadline=None)
def test_boxes_of_a_split_cover_every_entry_once(case: tuple[Split, Shape]) -> None:
    layout, shape = case
    times = np.zeros(shape, dtype=int)
    for device in range(len(layout.shares)):
        here = box(layout, device, shape)
        if here is not None:
            times[tuple(slice(*span) for span in here)] += 1
            assert here[layout.axis][1] - here[layout.axis][0] == layout.shares[device]
    assert (times == 1).all()


@given(any_layout())
@settings(deadline=None)
def test_holders_are_those_with_a_box_and_local_shapes_fit_it(case: tuple[Layout, Shape, int]) -> None:
    layout, shape, count = case
    assert set(holders(layout)) == {d for d in range(count) if box(layout, d, shape) is not None}
    for device in range(count):
        here = box(layout, device, shape)
        assert math.prod(local_shape(layout, device, shape)) == (0 if here is None else entries(here))
        assert len(local_shape(layout, device, shape)) == len(shape)


spans = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda ends: (min(ends), max(ends)))
plane_boxes = st.tuples(spans, spans)


@given(plane_boxes, plane_boxes)
@settings(deadline=None)
def test_intersection_contains_the_common_entries(a: Box, b: Box) -> None:
    def points(one: Box) -> set[tuple[int, int]]:
        return {(y, x) for y in range(*one[0]) for x in range(*one[1])}

    common = intersection(a, b)
    assert points(a) & points(b) == (points(common) if common else set())
