"""Benchmarks of rebalancing, overhead and accuracy: their conclusions from invented runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy_fleet, rebalance
from benchmarks.overhead import in_turns, steps_of
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


def test_machine_slowdown_affects_all_four_runs_alike() -> None:
    """The four trainings alternate step by step. One after the other, machine load changed their ratio by a sixth."""
    runs = four_runs([2, 6])
    for run in runs.values():
        run.step_s = [each * (1.5 if 15 <= step < 45 else 1.0) for step, each in enumerate(run.step_s)]
    moody = summarise(runs, slow_at=10)
    assert (moody.back_after, moody.of_best) == (4, pytest.approx(1.0))


def test_command_names_the_emulated_fleet_without_local_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the page showed a command without its fleet, which ran a different experiment."""
    monkeypatch.setattr("sys.argv", ["it", "--batch", "16", "-o", "/some/where.json", "--slowdown", "1,1"])
    monkeypatch.delenv("CONVOY_FLEET", raising=False)
    assert rebalance._command() == "python -m benchmarks.rebalance --batch 16 --slowdown 1,1"
    monkeypatch.setenv("CONVOY_FLEET", "/some/where/mixed4.toml")
    assert rebalance._command() == (
        "convoy emulate benchmarks/fleets/mixed4.toml -- python -m benchmarks.rebalance --batch 16 --slowdown 1,1"
    )


def test_runs_with_different_training_are_not_compared() -> None:
    steps = steps_of("two-conv:4:6", (1, 8, 8), 4)
    times = in_turns(steps, 2, 0.0)
    assert {way: len(each) for way, each in times.items()} == {"plain": 2, "alone": 2, "shared": 2, "layer by layer": 2}
    with pytest.raises(AssertionError):
        in_turns(steps | {"alone": lambda: 0.0}, 1, 0.0)


# --- accuracy on a fleet ---------------------------------------------------------------------------------------------


def trained(where: str, seed: int, accuracy: float, **other: Any) -> dict[str, Any]:
    return {
        "where": where, "seed": seed, "accuracy": accuracy, "loss": 1.0, "train_s": 10.0, "whole_s": 40.0, "wall_s": 60.0,
        "date": "2026-01-01T0", "command": "convoy train", "predicted_step_s": None, "measured_step_s": None, "reshares": 0,
        **other,
    }  # fmt: skip


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


def test_accuracies_are_compared_within_seed_noise() -> None:
    """Deviations of 1 point over three seeds: standard errors of 0.58 points, of their difference 0.82."""
    within = accuracy_fleet.verdict([0.71, 0.70, 0.69], [0.72, 0.71, 0.70])
    assert "-1.00 points from that of one device, within twice the standard error" in within
    assert "(0.82 points)" in within
    assert "more than twice" in accuracy_fleet.verdict([0.69, 0.68, 0.67], [0.72, 0.71, 0.70])


def test_epochs_fit_the_minutes_and_interrupted_runs_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch of 10,240 images takes ten times the 2 s of the pilot; start and tests take 10 s a run."""
    commands: list[list[str]] = []

    def trains(command: list[str]) -> dict[str, Any]:
        commands.append(command)
        pace = {"predicted_step_s": 0.5, "measured_step_s": 0.4} if "emulate" in command else {}
        if len(commands) == 5:
            raise KeyboardInterrupt
        return {
            key: value
            for key, value in trained("", 0, 0.7, train_s=2.0, **pace).items()
            if key not in ("where", "seed")
        }

    ticks = iter(range(0, 10_000, 12))
    monkeypatch.setattr(accuracy_fleet, "trained", trains)
    monkeypatch.setattr(accuracy_fleet.time, "monotonic", lambda: float(next(ticks)))
    results, page = tmp_path / "it.json", tmp_path / "page.md"

    def go() -> None:
        accuracy_fleet.main(tmp_path, limit=10_240, seeds="0,1", minutes=6.0, results=results, page=page)

    with pytest.raises(KeyboardInterrupt):
        go()
    # 180 s for each of two seeds, less 2 x 10 s, over 2 x 20 s an epoch.
    assert json.loads(results.read_text())["epochs"] == 4
    go()
    seeds = [command[command.index("--seed") + 1] for command in commands[2:]]
    assert seeds == ["0", "0", "1", "1", "1"], "the fifth was cut off, and begun again"
    assert all(command[command.index("--epochs") + 1] == "4" for command in commands[2:])
    text = page.read_text()
    assert "| fleet | 2 | 70.00%, 70.00% | 70.00% ± 0.00 points | 1.0000 | 40 s | 12 s |" in text
    assert "| 0 | 256 | 320 | +25.0% | 0 |" in text
    assert str(tmp_path) not in text, "whose images they are is nobody's business"
    with pytest.raises(accuracy_fleet.typer.Exit):
        accuracy_fleet.main(tmp_path, net="resnet:14:16", results=results, page=page)
    assert "other settings or code" in capsys.readouterr().err
