"""The training record when devices return to an earlier step or continue from a checkpoint."""

import json

import pytest

from convoy.train.record import EpochResult, Place, StepResult, TrainingRecord


def trained(steps: int = 7, per_epoch: int = 2, record: TrainingRecord | None = None) -> TrainingRecord:
    """Train epochs of two steps, each tested; the loss of a step is its number."""
    record = record or TrainingRecord()
    for step in range(record.begun + len(record.history.losses), steps):
        record.step(float(step), step // per_epoch, 8)
        if (step + 1) % per_epoch == 0:
            epoch = step // per_epoch
            record.test(epoch, step + 1, accuracy=step / 10, ends_epoch=True)
            record.epoch(EpochResult(epoch, 0.0, step / 10, 1.0, 8.0, 0.1))
    return record


def shown(record: TrainingRecord) -> tuple[list[float], list[int], list[int]]:
    history = record.history
    assert len(record.samples) == len(history.losses)
    return history.losses, [each.step for each in history.evaluations], [each.epoch for each in history.epochs]


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (Place(7, 3, 1), ([0, 1, 2, 3, 4, 5, 6], [2, 4, 6], [0, 1, 2])),
        (Place(5, 2, 1), ([0, 1, 2, 3, 4], [2, 4], [0, 1])),
        (Place(4, 2, 0), ([0, 1, 2, 3], [2, 4], [0, 1])),  # a checkpoint behind the test of an epoch
        (Place(4, 1, 2), ([0, 1, 2, 3], [2], [0])),  # a step that was kept before it
        (Place(0, 0, 0), ([], [], [])),
    ],
)
def test_history_ends_at_the_restored_step(place: Place, wanted: tuple[list[float], list[int], list[int]]) -> None:
    record = trained()
    record.go_back(place)
    assert shown(record) == wanted
    best = record.history.best
    assert (best and best.step) == (wanted[1][-1] if wanted[1] else None)
    if place.batch < 2:
        assert shown(trained(record=record)) == shown(trained()), "what is done again stands there once"


def test_older_checkpoint_restores_its_losses_and_tests() -> None:
    record = trained()
    record.go_back(Place(5, 2, 1))
    record.go_back(Place(1, 0, 1))
    record.go_back(Place(6, 3, 0))
    assert shown(record) == ([0, 1, 2, 3, 4, 5], [2, 4, 6], [0, 1, 2])


def test_joined_device_has_the_same_tests() -> None:
    record = trained()
    record.go_back(Place(3, 1, 1))
    late = TrainingRecord()
    late.take_over(json.loads(json.dumps(record.run_state([]))))
    for each in record, late:
        each.go_back(Place(3, 1, 1))
    assert (late.begun, late.history.losses, late.history.evaluations) == (2, [2], record.history.evaluations)
    for each in record, late:
        each.go_back(Place(6, 3, 0))
    assert late.history.evaluations == record.history.evaluations
    assert len(late.history.evaluations) == 3
    assert late.history.losses == record.history.losses[2:]


def test_divergence_is_undone_and_repeated() -> None:
    record = trained()
    record.diverge(4)
    record.go_back(Place(3, 1, 1))
    assert record.history.diverged is None
    record.go_back(Place(6, 3, 0))
    assert record.history.diverged == 4


def test_replay_state_holds_the_current_epoch_only() -> None:
    record = trained(steps=6)
    unread = [StepResult(6, 3, 6.0, 8, 0.1), StepResult(7, 3, 7.0, 8, 0.1), StepResult(8, 4, 8.0, 5, 0.1)]
    for count, begun, losses in [(0, 4, [4, 5]), (2, 6, [6, 7]), (3, 8, [8])]:
        told = record.run_state(unread[:count])
        assert (told["begun"], told["losses"]) == (begun, losses), count
    assert TrainingRecord().run_state([])["losses"] == []
