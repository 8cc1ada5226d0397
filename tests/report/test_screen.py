"""What a terminal shows of a training, and while the user waits."""

import io
import os

import pytest
from rich.console import Console

from convoy.plan.explain import LayerRow
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch
from convoy.report.screen import LINE_EVERY_S, Screen, Wait
from convoy.runlog.schema import DeviceLine
from convoy.train.observer import EpochResult, Evaluation, StepResult
from convoy.train.record import History


def history(loss: float, samples_per_s: float = 1234567.8) -> History:
    return History([loss] * 3, [EpochResult(0, loss, 0.5, 1e6 / samples_per_s, samples_per_s, 0.01)])


FOUR = [("cpu (1 thread)", "attic", slowdown) for slowdown in (6.0, 4.0, 16.0, 8.0)]


def uses(compute_s: float, exchange_s: float) -> list[DeviceLine]:
    return [
        DeviceLine(device=device, slowdown=slowdown, speed_share=0.25, work_share=0.25, compute_s=compute_s,
                   exchange_s=exchange_s, sent_bytes=0)
        for device, (_, _, slowdown) in enumerate(FOUR)
    ]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_printed_unchanged_and_nothing_is_cut_off(terminal: bool) -> None:
    """A bracket in a plan's name is no markup; the widest numbers fit into 80 columns."""
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
    screen.comparison(history(2.5), history(2.5), FOUR[:1], uses(1, 1)[:1])
    screen.comparison(
        history(2.5), history(0.5), FOUR, uses(1, 1), inexact="wire inexact-bf16 rounds", precision="bf16"
    )
    text = file.getvalue()
    assert text.count(name) >= 2
    assert "* 0: [/] note" in text
    assert "…" not in text
    assert "1,234,568" in text
    assert "at most 0 apart (rounding of float32" in text
    assert "at most 2 apart (INEXACT: wire inexact-bf16 rounds)" in text
    assert "step 1: test accuracy 25.00%, the best so far" in text
    assert "epoch 2/2: loss 2.5000, 50 samples/s" in text, "not tested"


@pytest.mark.parametrize(("devices", "together", "loss", "inexact", "says"), [
    # Solo speeds of 4/6, 1, 1/4 and 1/2 of the fastest: 2.4 times as fast is the possible.
    (FOUR, 2000.0, 1.0, "", "4 devices trained 2.0 times as fast as the fastest of them alone: 83% of the 2.4 that their "
     "speeds add up to, with the same losses (to 0)."),
    (FOUR[:2], 1500.0, 1.00002, "", "2 devices trained 1.5 times as fast as the fastest of them alone: 90% of the 1.7 that "
     "their speeds add up to, with the same losses (to 2e-05)."),
    (FOUR[:2], 1500.0, 1.0, "rounds", "90% of the 1.7 that their speeds add up to."),
    # What one alone would reach there is not known.
    ([*FOUR[:2], ("cpu (1 thread)", "cellar", 1.0)], 1500.0, 1.0, "",
     "3 devices trained 1.5 times as fast as one CPU alone, with the same losses (to 0)."),
    ([("cuda:0", "attic", 1.0)] * 2, 1500.0, 1.0, "", "2 devices trained 1.5 times as fast as one CPU alone, with"),
])  # fmt: skip
def test_a_comparison_ends_with_how_many_times_faster(
    devices: list[tuple[str, str, float]], together: float, loss: float, inexact: str, says: str
) -> None:
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.comparison(history(loss, together), history(1.0, 1000.0), devices, uses(9, 1), inexact=inexact)
    last = file.getvalue().splitlines()[-1]
    assert says in last
    assert last.endswith(".")


@pytest.mark.parametrize(("compute_s", "exchange_s", "why"), [
    (1.0, 2.5, "the devices wait for each other longer than they compute (10.0 s against 4.0 s"),
    (2.5, 1.0, f"the 4 processes share {os.cpu_count()} cores"),
])  # fmt: skip
def test_a_fleet_slower_than_one_device_is_told_why(compute_s: float, exchange_s: float, why: str) -> None:
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.comparison(history(1.0, 900.0), history(1.0, 1000.0), FOUR, uses(compute_s, exchange_s))
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("One device alone was faster here: ")
    assert why in last
    assert "times as fast" not in last


def test_an_invisible_screen_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(visible=False)
    with screen.working("something"), screen.progress("something", 1, 10) as bar:
        bar.on_step(StepResult(0, 0, 1.0, 10, 0.01))
    screen.lines(["one", "two"])
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_wait_prints_a_line_every_ten_seconds() -> None:
    now, file = [100.0], io.StringIO()
    with Wait(Console(file=file), "measuring", 60.0, now=lambda: now[0]) as tell:
        assert file.getvalue() == "measuring, about 1 min 0 s ...\n"
        for second in range(25):
            tell(f"layer [conv1] ({second} of 25)")
            now[0] += 1.0
    lines = file.getvalue().splitlines()[1:]
    assert lines == ["  10 s: layer [conv1] (10 of 25)", "  20 s: layer [conv1] (20 of 25)"]
    assert LINE_EVERY_S == 10


def test_a_short_wait_prints_nothing() -> None:
    now, file = [0.0], io.StringIO()
    with Wait(Console(file=file), "planning", first_s=1.0, now=lambda: now[0]) as tell:
        for second in (0.1, 0.9, 2.0, 3.0, 12.5):
            now[0] = second
            tell(f"part {second}")
    assert file.getvalue().splitlines() == ["planning: part 2.0 ...", "  12.5 s: part 12.5"]


@pytest.mark.parametrize("quiet", [False, True])
def test_on_a_terminal_a_wait_is_a_line_that_disappears(quiet: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, quiet=quiet, width=100)
    with Wait(console, "planning") as tell:
        tell("the [plans]")
        if not quiet:
            assert tell.progress is not None
            tell.progress.refresh()
    assert ("planning: the [plans]" in file.getvalue()) is not quiet
