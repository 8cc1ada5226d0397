"""How long the steps of a training really take, beside what was predicted."""

import statistics
import time

from convoy.execute.train import EpochResult, Evaluation


class Pace:
    """Times each step of a whole batch, from the end of the one before. The first after a test does not count.

    Args:
        batch: samples of a whole batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.seconds: list[float] = []
        self.last_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None where there were too few."""
        return statistics.median(self.seconds) if self.seconds else None

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        if self.last_s is not None and samples == self.batch:
            self.seconds.append(now_s - self.last_s)
        self.last_s = now_s

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
            f"Predicted: {predicted_s:.4g} s a step; measured: {self.step_s:.4g} s, the median of {len(self.seconds)} steps; "
            f"the prediction is {off:+.1%} off."
        )
