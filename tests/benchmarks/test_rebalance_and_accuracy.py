"""Benchmarks of rebalancing, overhead and accuracy: their conclusions from invented runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy_fleet, rebalance
from benchmarks.rebalance_score import Run, summarise

# --- rebalancing -----------------------------------------------------------------------------------------------------


def a_run(steps_s: list[float], split: list[list[int]], losses: float = 0.0, reshards: Any = ()) -> Run:
    noisy = [each * (1.02 if n % 2 else 0.98) for n, each in enumerate(steps_s)]
    shares = [{"b": each} for each in split]
    return Run(steps_s, noisy, [losses] * len(steps_s), shares, list(reshards))


def four_runs(after: list[int], answer_at: int = 4, steps: int = 60, slow_at: int = 10) -> dict[str, Run]:
    """Return four runs: slowed at step 10 from 1 s to 2 s, and 1.3 s from `answer_at` steps later, as the best
    split."""
    before, late = [[4, 4]] * (slow_at + answer_at), [[2, 6]] * (steps - slow_at - answer_at - 10)
    moved = a_run(
        [1.0] * slow_at + [2.0] * answer_at + [1.3] * (steps - slow_at - answer_at), [*before, *late, *[after] * 10], 2e-6,
        [(slow_at + answer_at - 1, "why")],
    )  # fmt: skip
    return {
        "undisturbed": a_run([1.0] * steps, [[4, 4]] * steps),
        "left alone": a_run([1.0] * slow_at + [2.0] * (steps - slow_at), [[4, 4]] * steps),
        "rebalanced": moved,
        "best split": a_run([1.3] * steps, [[2, 6]] * steps, 1.5e-6),
    }


def test_rebalancing_score_covers_response_stability_and_loss() -> None:
    good = summarise(four_runs([2, 6]), slow_at=10)
    assert (good.back_after, good.last_change, good.of_best) == (4, 4, pytest.approx(1.0)), "not before shares changed"
    assert good.left_alone == pytest.approx(1.3 / 2)
    assert (good.is_back, good.is_calm, good.is_same_curve) == (True, True, True)
    assert (good.swing, good.later_steps) == (0.0, 40)
    assert good.noise == pytest.approx(0.04 * 6 / 8, rel=0.05), "of times, as far as it moves the largest share"
    swings = summarise(four_runs([3, 5]), slow_at=10)
    assert (swings.swing, swings.is_calm) == (pytest.approx(1 / 8), False)
    late = summarise(four_runs([2, 6], answer_at=15), slow_at=10)
    assert (late.back_after, late.is_back) == (15, False)
    # Where shares that stay do as well, an answer says nothing: it was called met when nothing had changed yet.
    runs = four_runs([2, 6])
    runs["left alone"] = a_run([1.0] * 10 + [1.33] * 50, [[4, 4]] * 60)
    assert (summarise(runs, 10).of_best, summarise(runs, 10).is_back) == (pytest.approx(1.0), False)
    runs = four_runs([2, 6])
    runs["rebalanced"].reshards = []
    assert summarise(runs, 10).back_after is None
    runs = four_runs([2, 6])
    runs["best split"].losses = [0.5e-6] * 60
    assert not summarise(runs, 10).is_same_curve


def test_command_names_the_emulated_fleet_without_local_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the page showed a command without its fleet, which ran a different experiment."""
    monkeypatch.setattr("sys.argv", ["it", "--batch", "16", "-o", "/some/where.json", "--slowdown", "1,1"])
    monkeypatch.delenv("CONVOY_FLEET", raising=False)
    assert rebalance._command() == "python -m benchmarks.rebalance --batch 16 --slowdown 1,1"
    monkeypatch.setenv("CONVOY_FLEET", "/some/where/mixed4.toml")
    assert rebalance._command() == (
        "convoy emulate benchmarks/fleets/mixed4.toml -- python -m benchmarks.rebalance --batch 16 --slowdown 1,1"
    )


# --- accuracy on a fleet ---------------------------------------------------------------------------------------------


def test_training_log_is_summarised(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = {"what": "epoch", "loss": 2.0, "accuracy": None, "train_s": 3.0}
    lines = [
        {"what": "run", "date": "2026-01-01", "torch": "2", "convoy": "0.1"}, {"what": "prediction", "step_s": 0.5},
        {"what": "step", "loss": 2.3}, epoch, {"what": "reshare"}, {"what": "prediction", "step_s": 0.7, "shares_only": True},
        {"what": "step", "loss": 2.1},
        epoch | {"accuracy": 0.6, "loss": 1.5, "train_s": 4.0}, {"what": "device", "sent_bytes": 10},
        {"what": "device", "sent_bytes": 5}, {"what": "end", "step_s": 0.4},
    ]  # fmt: skip

    def writes(command: list[str], **_: Any) -> None:
        Path(command[-1]).write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr("benchmarks.accuracy.subprocess.run", writes)
    found = accuracy_fleet.trained(["train"])
    assert (found["accuracy"], found["loss"], found["train_s"], found["whole_s"]) == (0.6, 1.5, 4.0, 7.0)
    assert (found["predicted_step_s"], found["measured_step_s"]) == (0.5, 0.4)
    assert (found["sent_bytes"], found["reshares"], found["losses"]) == (15, 1, [2.3])
