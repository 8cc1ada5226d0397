"""What synchronisation costs devices that compute: from pieces alone, with exchanges, and exchanges at rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from convoy.comm.group import AloneGroup, Group
from convoy.measure import sync_overhead
from convoy.measure.sync_overhead import Pieces, SyncOverhead, jitter_of, measure_sync_overhead
from convoy.runtime.clock import Clock
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


def pieces(alone_s: float, together_s: float, own_s: tuple[float, ...]) -> Pieces:
    return Pieces((alone_s,) * 5, (together_s,) * 5, own_s)


def free(_factors: Sequence[float]) -> float:
    return 0.0


def test_time_beyond_the_slowest_device_and_the_price_is_jitter() -> None:
    """Pieces of 40 and 42 ms, together 50 ms; an exchange costs 3, so 5 ms are left. The second device varies half as much as
    the first (standard deviations 1 and 2) and is charged with half."""
    first, second = pieces(0.040, 0.050, (0.038, 0.042)), pieces(0.042, 0.049, (0.041, 0.043))
    assert jitter_of([first, second], 0.003) == pytest.approx((0.005, 0.0025))


def test_steady_devices_have_no_jitter() -> None:
    steady = pieces(0.040, 0.043, (0.040, 0.040))
    assert jitter_of([steady, steady], 0.003) == (0.0, 0.0)
    assert jitter_of([pieces(0.040, 0.041, (0.03, 0.05))] * 2, 0.003) == (0.0, 0.0), "below the price it is noise"


def test_one_interrupted_block_does_not_count() -> None:
    """Of six blocks the lowest and the highest do not count: typical values are 40 and 46 ms."""
    alone = (0.040, 0.040, 0.040, 0.040, 0.040, 4.0)
    together = (9.0, 0.046, 0.046, 0.046, 0.046, 0.046)
    assert jitter_of([Pieces(alone, together, (0.039, 0.041))] * 2, 0.0) == pytest.approx((0.006, 0.006))


def test_one_device_waits_for_nobody() -> None:
    assert measure_sync_overhead(AloneGroup(CPU), Clock(CPU), free, stretch_s=1e-6) == SyncOverhead((0.0,), (1.0,))


def test_the_call_factor_compares_exchanges_after_computing_with_those_at_rest() -> None:
    """2 ms of processor after computing, 0.5 at rest; a disturbed block does not count."""
    found = replace(pieces(0.04, 0.05, (0.04,)), calls_s=(0.002, 0.002, 9.0), rest_calls_s=(0.0005, 0.0005, 0.7))
    assert found.call_factor == pytest.approx(4.0)
    assert replace(found, calls_s=(0.0001,) * 3).call_factor == 1.0
    assert pieces(0.04, 0.05, (0.04,)).call_factor == 1.0


@dataclass
class Ticks:
    """A clock that advances by 10 ms at each reading."""

    at_s: float = 0.0

    def __call__(self) -> float:
        self.at_s += 0.01
        return self.at_s


def test_all_devices_exchange_equally_often_and_get_the_same_result() -> None:
    def work(group: Group) -> tuple[SyncOverhead, list[int]]:
        found = measure_sync_overhead(group, Clock(CPU), free, stretch_s=1e-6, now=Ticks())
        return found, group.sent_bytes

    rows = run_on_threads(3, work, timeout_s=30.0)
    assert {found for found, _ in rows} == {rows[0][0]}
    exchanges = 2 * sync_overhead.BLOCKS * sync_overhead.PIECES  # after each piece, and at rest
    assert [sent for _, sent in rows] == [
        [0 if to == device else 256 * exchanges for to in range(3)] for device in range(3)
    ]


def test_a_device_that_is_sometimes_last_is_charged() -> None:
    """Device 1 takes 100 ms more before every fifth exchange and nowhere else, so all wait 20 ms more on average.

    The clocks are scripted.
    """

    def work(group: Group) -> SyncOverhead:
        script = iter(readings(late=(4,) if group.device else ()))
        return measure_sync_overhead(group, Clock(CPU), lambda _: 0.001, stretch_s=1e-6, now=lambda: next(script))

    first, second = run_on_threads(2, work, timeout_s=30.0)
    assert first == second
    assert first.jitter_s[1] == pytest.approx(0.1 / sync_overhead.PIECES - 0.001)
    assert first.jitter_s[0] == pytest.approx(0.0, abs=1e-12), "its own pieces never vary"
    assert first.piece_s == pytest.approx((0.04, 0.04))


def readings(late: tuple[int, ...], piece_s: float = 0.04) -> list[float]:
    """Return the readings of a device's clock. Of each block with exchanges, pieces numbered in `late` take 100 ms more; the
    other device waits for it."""
    at, looks = 0.0, []

    def look(passed_s: float = 0.0) -> None:
        nonlocal at
        at += passed_s
        looks.append(at)

    for _ in range(1 + sync_overhead.CALIBRATIONS):
        look()
        look(piece_s)
    for _ in range(sync_overhead.BLOCKS):
        look()
        look(piece_s * sync_overhead.PIECES)
        look()
        waited_s = 0.0
        for number in range(sync_overhead.PIECES):
            look(waited_s)
            look(piece_s + (0.1 if number in late else 0.0))
            waited_s = 0.1 if number == 4 and not late else 0.0
        look(waited_s)
    return looks
