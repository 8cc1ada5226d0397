"""Jitter: what an exchange costs devices that were computing, from pieces with and without exchanges."""

from dataclasses import dataclass

import pytest
import torch

from convoy.comm.group import AloneGroup, Group
from convoy.profile import overheads
from convoy.profile.overheads import Pieces, jitter_of, measure_jitter
from convoy.runtime.clock import Clock
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


def pieces(alone_s: float, meeting_s: float, own_s: tuple[float, ...]) -> Pieces:
    return Pieces((alone_s,) * 5, (meeting_s,) * 5, own_s)


def test_what_is_beyond_the_slowest_and_the_price_at_rest_is_jitter():
    """Pieces of 40 and 42 ms meet each 50 ms; an exchange at rest takes 3: 5 ms. The second varies half as much as the first
    (standard deviations 2 and 1), and is charged with half."""
    first, second = pieces(0.040, 0.050, (0.038, 0.042)), pieces(0.042, 0.049, (0.041, 0.043))
    assert jitter_of([first, second], 0.003) == pytest.approx((0.005, 0.0025))


def test_devices_that_always_come_in_time_have_none():
    steady = pieces(0.040, 0.043, (0.040, 0.040))
    assert jitter_of([steady, steady], 0.003) == (0.0, 0.0)
    # A measurement below the price at rest is noise.
    assert jitter_of([pieces(0.040, 0.041, (0.03, 0.05))] * 2, 0.003) == (0.0, 0.0)


def test_one_interrupted_block_does_not_count():
    """Of six blocks the lowest and the highest do not: typical values, here 40 and 46 ms."""
    alone = (0.040, 0.040, 0.040, 0.040, 0.040, 4.0)
    meeting = (9.0, 0.046, 0.046, 0.046, 0.046, 0.046)
    device = Pieces(alone, meeting, (0.039, 0.041))
    assert jitter_of([device] * 2, 0.0) == pytest.approx((0.006, 0.006))


def test_one_device_waits_for_nobody():
    assert measure_jitter(AloneGroup(CPU), Clock(CPU), 0.0, stretch_s=1e-6) == (0.0,)


@dataclass
class Turns:
    """A clock that goes on by a hundredth of a second at each look."""

    at_s: float = 0.0

    def __call__(self) -> float:
        self.at_s += 0.01
        return self.at_s


def test_all_devices_meet_as_often_and_hear_the_same():
    def work(group: Group) -> tuple[tuple[float, ...], list[int]]:
        found = measure_jitter(group, Clock(CPU), 0.0, stretch_s=1e-6, now=Turns())
        return found, group.sent_bytes

    rows = run_on_threads(3, work, timeout_s=30.0)
    assert {found for found, _ in rows} == {rows[0][0]}
    # One message to each of the others after each piece, and no tensors else.
    meetings = overheads.BLOCKS * overheads.PIECES
    assert [sent for _, sent in rows] == [
        [0 if to == device else 256 * meetings for to in range(3)] for device in range(3)
    ]


def test_a_device_that_is_last_now_and_then_is_seen():
    """Device 1 takes 100 ms more before every fifth exchange and nowhere else, so all wait 20 ms more in the mean.

    Not timed: its clock, like that of the others, is told how much time passes.
    """

    def work(group: Group) -> tuple[float, ...]:
        looks = 0

        def now() -> float:
            # Two looks frame the pieces alone; with exchanges two frame the block, and two each piece.
            nonlocal looks
            looks += 1
            return times[group.device][looks - 1]

        return measure_jitter(group, Clock(CPU), 0.001, stretch_s=1e-6, now=now)

    times = [told(late=()), told(late=(4,))]
    first, second = run_on_threads(2, work, timeout_s=30.0)
    assert first == second
    assert first[1] == pytest.approx(0.1 / overheads.PIECES - 0.001)
    assert first[0] == pytest.approx(0.0, abs=1e-12)  # its own pieces never vary


def told(late: tuple[int, ...], piece_s: float = 0.04) -> list[float]:
    """The looks at the clock of a device whose pieces numbered in `late`, of each block with exchanges, take 100 ms more; the
    other device waits for it."""
    at, looks = 0.0, []

    def look(passed_s: float = 0.0) -> None:
        nonlocal at
        at += passed_s
        looks.append(at)

    for _ in range(1 + overheads.CALIBRATIONS):
        look()
        look(piece_s)
    for _ in range(overheads.BLOCKS):
        look()
        look(piece_s * overheads.PIECES)
        look()
        waited_s = 0.0
        for number in range(overheads.PIECES):
            look(waited_s)
            own_s = piece_s + (0.1 if number in late else 0.0)
            look(own_s)
            waited_s = 0.1 if number == 4 and not late else 0.0
        look(waited_s)
    return looks
