"""What it costs that devices compute while they exchange: from pieces alone, with exchanges, after rests, beside rings."""

from dataclasses import dataclass, replace

import pytest
import torch

from convoy.comm.group import AloneGroup, Group
from convoy.errors import DeviceLostError
from convoy.measure import meetings
from convoy.measure.meetings import Meetings, Pieces, Prices, beside_of, jitter_of, measure_meetings
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


def prices(exchange_s: float = 0.0, ring_s: float = 0.0) -> Prices:
    return Prices(lambda _: exchange_s, lambda _: ring_s, ring_bytes=64)


def test_a_round_that_fails_on_its_thread_is_told():
    def lost() -> None:
        raise DeviceLostError(1, "device 1 was lost")

    for compute in (None, lambda: None):
        with pytest.raises(DeviceLostError, match="device 1 was lost"):
            meetings._rings_s(lost, compute)


def test_one_device_waits_for_nobody():
    assert measure_meetings(AloneGroup(CPU), Clock(CPU), prices(), stretch_s=1e-6) == Meetings(
        (0.0,), (0.0,), (1.0,), (0.0,)
    )


def test_calls_after_computing_are_dearer_than_at_rest():
    """2 ms of processor for an exchange, where one at rest takes 0.5; a disturbed block does not count."""
    found = replace(pieces(0.04, 0.05, (0.04,)), calls_s=(0.002, 0.002, 9.0), rest_calls_s=(0.0005, 0.0005, 0.7))
    assert found.dearer == pytest.approx(4.0)
    assert replace(found, calls_s=(0.0001,) * 3).dearer == 1.0
    assert pieces(0.04, 0.05, (0.04,)).dearer == 1.0


def test_a_device_that_rested_is_done_sooner():
    found = replace(pieces(0.04, 0.05, (0.04,)), rested_s=(0.032,) * 5)
    assert found.sooner_s == pytest.approx(0.008)
    assert replace(found, rested_s=(0.041,) * 5).sooner_s == 0.0


def test_a_round_beside_computing_is_late_beyond_its_price():
    """30 ms beside computing where one at rest takes 10 and a busy device 13: 17 late, by the device that varies most."""
    first = replace(pieces(0.04, 0.05, (0.03, 0.05)), ring_s=(0.010,) * 5, beside_s=(0.030,) * 5)
    second = replace(first, own_s=(0.035, 0.045), beside_s=(0.028,) * 5)
    assert beside_of([first, second], 0.013) == pytest.approx((0.017, 0.0085))
    assert beside_of([first, second], 0.002) == pytest.approx((0.020, 0.010))
    assert beside_of([first, pieces(0.04, 0.05, (0.04,))], 0.0) == (0.0, 0.0)  # a group of one lane


@dataclass
class Turns:
    """A clock that goes on by a hundredth of a second at each look."""

    at_s: float = 0.0

    def __call__(self) -> float:
        self.at_s += 0.01
        return self.at_s


def test_all_devices_meet_as_often_and_hear_the_same():
    def work(group: Group) -> tuple[Meetings, list[int]]:
        found = measure_meetings(group, Clock(CPU), prices(), stretch_s=1e-6, now=Turns())
        return found, group.sent_bytes

    rows = run_on_threads(3, work, timeout_s=30.0)
    assert {found for found, _ in rows} == {rows[0][0]}
    # One message to each of the others after each piece and in each exchange at rest, and two rows of rings to the next.
    met, rings = 2 * meetings.BLOCKS * meetings.PIECES, 2 * meetings.BLOCKS * meetings.RINGS
    assert [sent for _, sent in rows] == [
        [0 if to == device else 256 * met + 64 * rings * (to == (device + 1) % 3) for to in range(3)]
        for device in range(3)
    ]


def test_a_device_that_is_last_now_and_then_is_seen():
    """Device 1 takes 100 ms more before every fifth exchange and nowhere else, so all wait 20 ms more in the mean.

    Not timed: its clock, like that of the others, is told how much time passes.
    """

    def work(group: Group) -> tuple[float, ...]:
        looks = 0

        def now() -> float:
            # Two looks frame the pieces alone; with exchanges two frame the block, and two each piece; two each rested one.
            nonlocal looks
            looks += 1
            return times[group.device][looks - 1]

        return measure_meetings(group, Clock(CPU), prices(0.001), stretch_s=1e-6, now=now).jitter_s

    times = [told(late=()), told(late=(4,))]
    first, second = run_on_threads(2, work, timeout_s=30.0)
    assert first == second
    assert first[1] == pytest.approx(0.1 / meetings.PIECES - 0.001)
    assert first[0] == pytest.approx(0.0, abs=1e-12)  # its own pieces never vary


def told(late: tuple[int, ...], piece_s: float = 0.04) -> list[float]:
    """The looks at the clock of a device whose pieces numbered in `late`, of each block with exchanges, take 100 ms more; the
    other device waits for it."""
    at, looks = 0.0, []

    def look(passed_s: float = 0.0) -> None:
        nonlocal at
        at += passed_s
        looks.append(at)

    for _ in range(1 + meetings.CALIBRATIONS):
        look()
        look(piece_s)
    for _ in range(meetings.BLOCKS):
        look()
        look(piece_s * meetings.PIECES)
        look()
        waited_s = 0.0
        for number in range(meetings.PIECES):
            look(waited_s)
            own_s = piece_s + (0.1 if number in late else 0.0)
            look(own_s)
            waited_s = 0.1 if number == 4 and not late else 0.0
        look(waited_s)
        for _ in range(meetings.RESTED_PIECES):
            look()
            look(piece_s)
    return looks
