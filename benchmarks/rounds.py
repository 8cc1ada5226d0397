"""Run rounds in which every configuration has one turn; all devices agree on the time of a turn."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.reference import Reference
from benchmarks.results import Row, Where
from benchmarks.runners import Runner, Spent
from benchmarks.score import ratio_of_pairs
from convoy.comm.group import Group

FEWEST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """A set of rows that run at the same time, and this device's runner.

    Attributes:
        rows: one row for all devices together; or a row for each device, which trains alone beside the others.
        most_s: counted seconds after which it gets no further round, once it has had two; None: it gets all.
    """

    rows: tuple[Row, ...]
    runner: Runner
    most_s: float | None = None

    def steps(self, device: int) -> int:
        """Return the steps a device takes in a round."""
        return self.rows[device if len(self.rows) > 1 else 0].steps


@dataclass(frozen=True, slots=True)
class Pair:
    """Two turns, by index, that repeat rounds until the ratio of their times is known.

    Attributes:
        known_to: its standard error at most, as a part of it.
        most: rounds after which they have enough.
    """

    first: int
    second: int
    known_to: float
    most: int


@dataclass(frozen=True, slots=True)
class Timed:
    """The agreed time of one turn.

    Attributes:
        rows_s: seconds of a step, of each row.
        losses: of the first step, of each row, as the first device that knows it saw it.
        where: None where a runner keeps no clock.
    """

    rows_s: tuple[float, ...]
    losses: tuple[float | None, ...]
    where: Where | None
    took_s: float


@dataclass(slots=True)
class _Found:
    turns: list[Timed] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)

    def wants_more(self, most_s: float | None) -> bool:
        """Return whether another round is due. All devices have the same times, so they agree."""
        if most_s is None or len(self.turns) < FEWEST_ROUNDS:
            return True
        return sum(turn.took_s for turn in self.turns) < most_s


def run_rounds(
    group: Group,
    turns: Sequence[Turn],
    rounds: int,
    say: Callable[[str], None],
    reference: Reference | None = None,
    limit_s: float | None = None,
    pair: Pair | None = None,
) -> tuple[Row, ...]:
    """Run all rounds. Every device calls it with the same turns and gets the same rows.

    Args:
        pair: of the turns; has more rounds than the others where it needs them.
        reference: asked before every turn how fast the machine is; None: that is not known.
        limit_s: no further round begins after so many seconds, once there were two.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    found = [_Found() for _ in turns]
    start_s = time.perf_counter()
    for number in range(max(rounds, pair.most if pair else 0)):
        playing = [index for index in range(len(turns)) if number < rounds or _due(pair, index, found)]
        if not playing:
            break
        passed_s = float(group.agree("a round begins", json.dumps(time.perf_counter() - start_s))[0])
        if limit_s is not None and number >= FEWEST_ROUNDS and passed_s > limit_s:
            say(f"{passed_s:.0f} s have passed, the limit is {limit_s:.0f} s: {number} rounds of {rounds}")
            break
        say(f"round {number + 1} of {rounds}" if number < rounds else f"round {number + 1}, of the pair alone")
        for index in playing:
            turn, each = turns[index], found[index]
            if each.wants_more(turn.most_s):
                if reference is not None:
                    each.drifts.append(reference.drift())
                each.turns.append(timed(group, turn))
    return tuple(row for turn, each in zip(turns, found, strict=True) for row in _measured(turn, each))


def _due(pair: Pair | None, index: int, found: Sequence[_Found]) -> bool:
    """Return whether a turn of a pair needs another round. All devices have the same times."""
    if pair is None or index not in (pair.first, pair.second):
        return False
    a_s, b_s = ([max(turn.rows_s) for turn in found[each].turns] for each in (pair.first, pair.second))
    ratio, noise = ratio_of_pairs(a_s, b_s)
    return noise > pair.known_to * ratio


def _measured(turn: Turn, found: _Found) -> list[Row]:
    places = [each.where for each in found.turns if each.where is not None]
    seen = None
    if places:
        compute_s = zip(*(place.compute_s for place in places), strict=True)
        exchange_s = zip(*(place.exchange_s for place in places), strict=True)
        seen = Where(tuple(map(statistics.median, compute_s)), tuple(map(statistics.median, exchange_s)))
    return [
        replace(
            row, rounds_s=tuple(each.rows_s[index] for each in found.turns), drifts=tuple(found.drifts),
            loss=found.turns[-1].losses[index], seen=seen,
        )
        for index, row in enumerate(turn.rows)
    ]  # fmt: skip


def timed(group: Group, turn: Turn, *, rest: bool = True) -> Timed:
    """Run one turn.

    Args:
        rest: whether the runner gives its memory back afterwards.
    """
    gc.collect()
    first_loss, steps = turn.runner.wake(), turn.steps(group.device)
    group.agree("a turn begins", "")
    start_s = time.perf_counter()
    spent = turn.runner.train(steps)
    took_s = time.perf_counter() - start_s
    own = [took_s / steps, first_loss, spent and (spent[0] / steps, spent[1] / steps), took_s]
    answers = [json.loads(text) for text in group.agree("a turn ends", json.dumps(own))]
    if rest:
        turn.runner.rest()
    return _agreed(answers, apart=len(turn.rows) > 1)


def _agreed(answers: Sequence[tuple[float, float | None, Spent, float]], *, apart: bool) -> Timed:
    steps_s, losses, spent, took_s = zip(*answers, strict=True)
    if apart:
        return Timed(steps_s, losses, None, max(took_s))
    where = Where(*zip(*spent, strict=True)) if None not in spent else None
    loss = next((each for each in losses if each is not None), None)
    return Timed((max(steps_s),), (loss,), where, max(took_s))
