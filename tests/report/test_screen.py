"""Terminal output during training and while the user waits."""

import io

import pytest
from rich.console import Console

from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch
from convoy.plan.text import LayerRow
from convoy.report.screen import LINE_EVERY_S, Screen, Wait
from convoy.train.record import EpochResult, Evaluation, History, StepResult


def history(loss: float, samples_per_s: float = 1234567.8) -> History:
    return History([loss] * 3, [EpochResult(0, loss, 0.5, 1e6 / samples_per_s, samples_per_s, 0.01)])


FOUR = [("cpu (1 thread)", "attic", slowdown) for slowdown in (6.0, 4.0, 16.0, 8.0)]


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_printed_unchanged_and_uncut(terminal: bool) -> None:
    """A bracket in a plan's name is not markup; the widest numbers fit into 80 columns."""
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.console._force_terminal = terminal
    if terminal:
        screen.console.width = 80
    name = "[b]mine[/] :cat: [/]"
    with screen.progress(name, 2, 100) as bar:
        bar.on_step(StepResult(0, 0, 2.5, 50, 0.01))
        bar.on_evaluation(Evaluation(0, 1, 0.25, ends_epoch=False, is_best=True))
        bar.on_epoch(EpochResult(0, 2.5, 0.5, 1.0, 50.0, 0.01))
        bar.on_epoch(EpochResult(1, 2.5, None, 1.0, 50.0, 0.01))
    screen.plan(
        Plan(name, "x", 2, 4, {}, Batch((2, 2))),
        [LayerRow("0", "conv", "batch", ("2", "2"), 5, "[/] note")],
        (0.5, 0.5),
    )
    screen.comparison(history(2.5), history(0.5), FOUR, "INEXACT: wire inexact-bf16 rounds")
    text = file.getvalue()
    assert text.count(name) >= 2
    assert "* 0: [/] note" in text
    assert "…" not in text
    assert "1,234,568" in text
    assert "at most 2 apart (INEXACT: wire inexact-bf16 rounds)" in text
    assert "step 1: test accuracy 25.00%, the best so far" in text
    assert "epoch 2/2: loss 2.5000, 50 samples/s" in text, "not tested"


@pytest.mark.parametrize(
    ("devices", "samples_per_s", "says"),
    [
        # Solo speeds of 4/6, 1, 1/4 and 1/2 of the fastest: 2.4 times as fast is possible.
        (FOUR, 2000.0, "4 devices trained 2.0 times as fast as the fastest of them alone: 83% of the 2.4 that their "),
        ([("cuda:0", "attic", 1.0)] * 2, 1500.0, "2 devices trained 1.5 times as fast as one CPU alone, with the same"),
        (FOUR, 900.0, "One device alone was faster."),
    ],
)
def test_a_comparison_ends_with_how_many_times_faster(
    devices: list[tuple[str, str, float]], samples_per_s: float, says: str
) -> None:
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.comparison(history(1.0, samples_per_s), history(1.0, 1000.0), devices, "rounding")
    last = file.getvalue().splitlines()[-1]
    assert says in last
    assert last.endswith(".")


def test_without_a_terminal_a_wait_prints_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [100.0], io.StringIO()
    monkeypatch.setattr("convoy.report.screen.time.monotonic", lambda: now[0])
    with Wait(Console(file=file), "measuring", 60.0) as report:
        assert file.getvalue() == "measuring, about 1 min 0 s ...\n"
        for second in range(25):
            report(f"layer [conv1] ({second} of 25)")
            now[0] += 1.0
    lines = file.getvalue().splitlines()[1:]
    assert lines == ["  10 s: layer [conv1] (10 of 25)", "  20 s: layer [conv1] (20 of 25)"]
    assert LINE_EVERY_S == 10


def test_a_short_wait_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr("convoy.report.screen.time.monotonic", lambda: now[0])
    with Wait(Console(file=file), "planning", first_s=1.0) as report:
        for second in (0.1, 0.9, 2.0, 3.0, 12.5):
            now[0] = second
            report(f"part {second}")
    assert file.getvalue().splitlines() == ["planning: part 2.0 ...", "  12.5 s: part 12.5"]
