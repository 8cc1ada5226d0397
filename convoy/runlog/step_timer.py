"""How long the steps of a training really take, beside what was predicted."""

import statistics
import time

from convoy.runlog.metrics import LEAST_STEPS
from convoy.train.loop import EpochResult, Evaluation


class Pace:
    """Times each step of a whole batch, from the end of the one before. The first after a test does not count.

    Args:
        batch: samples of a whole batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.seconds: list[float] = []
        self.last_s: float | None = None
        self._since = 0

    @property
    def counted_s(self) -> list[float]:
        """Seconds of the steps since the plan last changed, where enough came after that; else of all."""
        late = self.seconds[self._since :]
        return late if len(late) >= LEAST_STEPS else self.seconds

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None where there were too few."""
        return statistics.median(self.counted_s) if self.seconds else None

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        if self.last_s is not None and samples == self.batch:
            self.seconds.append(now_s - self.last_s)
        self.last_s = now_s

    def restart(self) -> None:
        """From here on it is another plan, or other shares; the step in which they arrive does not count."""
        self._since = len(self.seconds)
        self.last_s = None

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:  # noqa: ARG002
        self.last_s = None

    def epoch(self, epoch: int, result: EpochResult) -> None:  # noqa: ARG002
        self.last_s = None

    def beside(self, predicted_s: float) -> str:
        """Predicted and measured, in words."""
        if self.step_s is None:
            return f"Predicted: {predicted_s:.4g} s a step; too few steps of {self.batch} samples to compare."
        off = predicted_s / self.step_s - 1
        return (
            f"Predicted: {predicted_s:.4g} s a step; measured: {self.step_s:.4g} s, the median of {len(self.counted_s)} steps; "
            f"the prediction is {off:+.1%} off."
        )
