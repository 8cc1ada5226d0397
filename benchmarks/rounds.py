"""Rounds: every configuration has a turn in each, one after the other, and all devices agree on what a turn took."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.reference import Reference
from benchmarks.results import Row
from benchmarks.runners import Runner
from convoy.execute.group import Group

FEWEST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One configuration and who runs it here.

    Attributes:
        most_s: counted seconds after which it gets no further round, once it has had two; None: it gets all.
    """

    row: Row
    runner: Runner
    most_s: float | None = None

    def wants_more(self, rounds_s: Sequence[float]) -> bool:
        """Whether another round is due. All devices have the same times, so they answer alike."""
        if self.most_s is None or len(rounds_s) < FEWEST_ROUNDS:
            return True
        return sum(rounds_s) * self.row.steps < self.most_s


def run_rounds(
    group: Group, turns: Sequence[Turn], rounds: int, say: Callable[[str], None], reference: Reference | None = None
) -> tuple[Row, ...]:
    """Play all rounds. Every device calls it with the same turns; all get the same rows.

    Args:
        reference: asked before every turn how fast the machine is; None: that is not known.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    found_s: list[list[float]] = [[] for _ in turns]
    drifts: list[list[float]] = [[] for _ in turns]
    losses: list[float | None] = [None] * len(turns)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for index, turn in enumerate(turns):
            if turn.wants_more(found_s[index]):
                if reference is not None:
                    drifts[index].append(reference.drift())
                step_s, losses[index] = timed(group, turn)
                found_s[index].append(step_s)
    return tuple(
        replace(turn.row, rounds_s=tuple(seconds), drifts=tuple(drift), loss=loss)
        for turn, seconds, drift, loss in zip(turns, found_s, drifts, losses, strict=True)
    )


def timed(group: Group, turn: Turn, *, rest: bool = True) -> tuple[float, float | None]:
    """Seconds of a step in one turn, and the first loss as the first device that knows it saw it.

    Args:
        rest: whether the runner gives its memory back afterwards.
    """
    gc.collect()
    first_loss = turn.runner.wake()
    group.agree("a turn begins", "")
    start_s = time.perf_counter()
    turn.runner.train(turn.row.steps)
    took_s = time.perf_counter() - start_s
    texts = group.agree("a turn ends", json.dumps([took_s, first_loss]))
    if rest:
        turn.runner.rest()
    answers = [json.loads(text) for text in texts]
    loss = next((each for _, each in answers if each is not None), None)
    return max(each_s for each_s, _ in answers) / turn.row.steps, loss
