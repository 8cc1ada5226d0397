"""The places of a layer by one device's share, with the NIC traffic and the waiting between two places.

A place is: all of the layer is the others' (share 0) or the device's own (1); it is shared by samples, by features (filters,
or any axis but that of samples), or by input channels, each with the device's share; or both sides have copies. Shares are
multiples of 1 / STEPS. That no other shares take less follows from rounding them at random: one number U, even in 0 to 1,
rounds all shares by samples, another one all of features and channels, x to floor(STEPS x + U) / STEPS. In the mean a share
stays what it is, and so do |x - y| of two by one U and x y of two by different ones. So whatever is linear in these is, in the
mean of the rounded plans, what it is in the plan, and one of them takes no more. Of squares see `square`.

**Bytes.** Between two layers the card passes, of the tensor that the second reads of the first, and of its gradient: |x - y| at
least where both are by samples, or both by features; x (1 - y) + y (1 - x) from samples to features or back, since of each
sample here the features of the others go there, and the other way round; all of it where filters read it, if not from copies,
and to make copies; all of it where summands of channels come together, and twice where both sides want the sums. Two pairs of
layers of a path have two tensors: nothing is counted twice.

**Waiting.** What computes on a device waits for all that it reads from another one, which sends it when it has computed. An
entry that is made on f and read on e, with a chance of s, goes on when s of the tensor has passed a card: s^2 of the tensor in
the mean. The others are n; with s for all of them together that is s^2 / n at least. Of summands that channels make here with a
chance of z, all that the other device has of the sums must go there, with its chance y: z y^2, by n where the others are who
have it, since what they wait for comes from here alone; and z y^2 of all where it is the device that waits. In backward it
is the same, the other way, unless a layer computes the gradient of its weights meanwhile (`Waits` has that). Filters read all
that another device has: s of the tensor, with the chance s times their own share. They may begin with the first rows, so
either that counts or what they compute forward. Other layers with weights wait for all: what comes from samples, or goes to
samples, comes in no pieces, since pieces span the batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STEPS = 16
"""From nothing to all; even, see `square`."""


def square(share: Floats, steps: int) -> Floats:
    """For each share, a number whose mean is at most the square of a share that is rounded to these at random.

    With m = steps x share it is m^2 for even m, m^2 - 1 for odd ones, over steps^2: the line from one to the next is a tangent
    of the square. It grows with the share; so the mean of its product with what falls with a share by the same U is no larger
    than the product of the means.
    """
    m = np.rint(share * steps)
    found: Floats = (m**2 - m % 2) / steps**2
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """All places, and what is between them: `[before, after]`, in times of the tensor.

    Attributes:
        share: what the device has.
        samples, features, channels: those places; copies: that one.
        plain, following, weighted: what passes the card where the second layer has no weights; has none, and reads this first;
            has weights. Infinite where there is no such place.
        waits, waits_of_each: of a chain, without weights; the second is divided by the number of the others.
        waits_weighted: divided as well, with weights.
        reads, reads_of_each: where filters read it.
    """

    share: Floats
    samples: slice
    features: slice
    channels: slice
    copies: int
    plain: Floats
    following: Floats
    weighted: Floats
    waits: Floats
    waits_of_each: Floats
    waits_weighted: Floats
    reads: Floats
    reads_of_each: Floats

    @classmethod
    def of(cls, steps: int) -> "Places":
        inner, count = np.arange(steps + 1) / steps, steps + 1
        share = np.concatenate([[0.0, 1.0], inner, inner, inner, [1.0]])
        one, samples, features, channels = (
            slice(0, 2), slice(2, 2 + count), slice(2 + count, 2 + 2 * count), slice(2 + 2 * count, -1),
        )  # fmt: skip
        places = (one, samples, features, channels)
        return cls(
            share, samples, features, channels, len(share) - 1, *_bytes(share, *places[1:]), *_waits(share, steps, *places),
            *_reads(share, steps, *places),
        )  # fmt: skip


def _bytes(share: Floats, samples: slice, features: slice, channels: slice) -> tuple[Floats, Floats, Floats]:
    x, y = share[:, None], share[None, :]
    plain, crossed = np.abs(x - y), x + y - 2 * x * y
    for before, after in ((samples, features), (features, samples), (samples, channels)):
        plain[before, after] = crossed[before, after]
    weighted = plain.copy()
    weighted[:, features] = 1.0
    for passed in (plain, weighted):
        passed[:, -1], passed[channels, :] = 1.0, 1.0
    weighted[channels, features], plain[channels, -1] = 2.0, 2.0
    plain[-1, :], weighted[-1, :] = 0.0, 0.0
    plain[:, channels], weighted[:, -1] = np.inf, np.inf
    following = plain.copy()
    following[:-1, -1] = np.inf
    return plain, following, weighted


def _waits(
    share: Floats, steps: int, one: slice, samples: slice, features: slice, channels: slice
) -> tuple[Floats, Floats, Floats]:
    x, y = share[:, None], share[None, :]
    here, there = square(share, steps), square(1 - share, steps)
    moved = square(np.abs(x - y), steps)
    crossed = here[:, None] * there[None, :] + there[:, None] * here[None, :]
    waits, of_each, weighted = np.zeros_like(moved), np.zeros_like(moved), np.zeros_like(moved)
    uncut = slice(0, features.stop)
    of_each[uncut, uncut] = moved[uncut, uncut]
    for before, after in ((samples, features), (features, samples)):
        of_each[before, after] = crossed[before, after]
    weighted[uncut, samples], weighted[samples, one] = of_each[uncut, samples], of_each[samples, one]
    waits[channels, uncut] = ((1 - x) * here[None, :])[channels, uncut]
    of_each[channels, uncut] = (x * there[None, :])[channels, uncut]
    return waits, of_each, weighted


def _reads(
    share: Floats, steps: int, one: slice, samples: slice, features: slice, channels: slice
) -> tuple[Floats, Floats]:
    x, y = share[:, None], share[None, :]
    reads, of_each = np.zeros((len(share), len(share))), np.zeros((len(share), len(share)))
    for before in (one, samples, features):
        reads[before, features] = (square(x, steps) * (1 - y))[before, features]
        of_each[before, features] = (square(1 - x, steps) * y)[before, features]
    reads[channels, features] = (x * (1 - y) + y * (1 - x))[channels, features]
    return reads, of_each
