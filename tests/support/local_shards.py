"""Each device's shard of a tensor, cut with NumPy from the definition of layouts: the oracle of transfers and moves.

Nothing here asks the code under test where a shard lies.
"""

import numpy as np
from numpy.typing import NDArray

from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Shape, Split

Array = NDArray[np.float64]
Shards = dict[int, Array]
"""The shard of each device that holds something; the others are not named."""

DEVICES = 4

SHARES = {
    0: ((0, 0, 0, 0),),
    2: ((1, 0, 1, 0), (0, 0, 0, 2)),
    3: ((1, 1, 0, 1), (0, 3, 0, 0)),
    4: ((1, 0, 2, 1),),
    5: ((3, 0, 1, 1), (0, 0, 5, 0)),
    6: ((1, 2, 0, 3), (6, 0, 0, 0)),
    10: ((7, 0, 2, 1), (1, 2, 3, 4), (0, 5, 0, 5), (0, 0, 10, 0)),
}
"""Shares of an extent among four devices: uneven, with idle devices, and one device for everything."""

DEVICE_SETS = ((0, 1, 2, 3), (0, 2, 3), (1, 3), (0, 2), (3, 0), (2, 0, 1), (1,))


def every_layout(shape: Shape) -> list[Layout]:
    """Return the layouts of a tensor of `shape` on four devices that the tests pair."""
    splits = [Split(axis, shares) for axis, extent in enumerate(shape) for shares in SHARES[extent]]
    copies = [Replicated(devices) for devices in DEVICE_SETS]
    sums = [Partial(devices) for devices in DEVICE_SETS]
    return [*splits, *copies, *sums, OnOne(0), OnOne(3)]


def layouts_of_one_device(shape: Shape) -> list[Layout]:
    """Return the layouts that remain on a fleet of one device."""
    return [*(Split(axis, (extent,)) for axis, extent in enumerate(shape)), Replicated((0,)), Partial((0,)), OnOne(0)]


def local_shards(layout: Layout, whole: Array, rng: np.random.Generator) -> Shards:
    """Return the shards of the tensor `whole`. Summands of a pending sum are random; the first corrects the total."""
    match layout:
        case Split(axis, shares):
            cuts = np.split(whole, np.cumsum(shares)[:-1], axis)
            return {device: cut for device, (cut, share) in enumerate(zip(cuts, shares, strict=True)) if share}
        case Replicated(devices):
            return {device: whole.copy() for device in devices}
        case OnOne(device):
            return {device: whole.copy()}
        case Partial((first, *others)):
            drawn = {device: _like(whole, rng) for device in others}
            return {first: np.asarray(whole - sum(drawn.values())), **drawn}
    raise AssertionError(layout)


def nothing(layout: Layout, shape: Shape) -> Shape:
    """Return the shape on a device without entries: zero along the split axis, or along the first."""
    axis = layout.axis if isinstance(layout, Split) else 0
    return (*shape[:axis], 0, *shape[axis + 1 :])


def integers(shape: Shape, seed: int) -> Array:
    """Return small whole numbers, whose sums are exact in every dtype and order."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float64)


def _like(whole: Array, rng: np.random.Generator) -> Array:
    if np.array_equal(whole, np.round(whole)):
        return rng.integers(-9, 10, whole.shape).astype(np.float64)
    return rng.standard_normal(whole.shape)


def check_shards(layout: Layout, whole: Array, found: Shards) -> None:
    """Assert that `found` holds the tensor `whole` in `layout` bit for bit, and nothing else."""
    if isinstance(layout, Partial):
        assert sorted(found) == sorted(layout.devices)
        assert {shard.shape for shard in found.values()} == {whole.shape}
        np.testing.assert_array_equal(sum(found.values()), whole)
        return
    wanted = local_shards(layout, whole, np.random.default_rng())
    assert sorted(found) == sorted(wanted)
    for device, shard in wanted.items():
        assert found[device].shape == shard.shape
        np.testing.assert_array_equal(found[device], shard, err_msg=f"on device {device}")
