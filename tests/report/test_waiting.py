"""Whoever waits sees for what, and about how long: a plan took 14 to 110 s in silence."""

import io

import pytest
from rich.console import Console

from convoy.report.waiting import LINE_EVERY_S, Wait


def test_without_a_terminal_there_is_a_line_at_once_and_one_every_ten_seconds() -> None:
    now, file = [100.0], io.StringIO()
    with Wait(Console(file=file), "measuring", 60.0, now=lambda: now[0]) as tell:
        assert file.getvalue() == "measuring, about 1 min 0 s ...\n"
        for second in range(25):
            tell("layer [conv1]", second, 25)
            now[0] += 1.0
    lines = file.getvalue().splitlines()[1:]
    assert lines == ["  10 s: layer [conv1] (10 of 25)", "  20 s: layer [conv1] (20 of 25)"]
    assert LINE_EVERY_S == 10


def test_what_may_be_over_in_a_second_says_nothing_before() -> None:
    now, file = [0.0], io.StringIO()
    with Wait(Console(file=file), "planning", first_s=1.0, now=lambda: now[0]) as tell:
        for second in (0.1, 0.9, 2.0, 3.0, 12.5):
            now[0] = second
            tell(f"part {second}")
    assert file.getvalue().splitlines() == ["planning: part 2.0 ...", "  12.5 s: part 12.5"]


@pytest.mark.parametrize("quiet", [False, True])
def test_on_a_terminal_the_line_goes_away(quiet: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, quiet=quiet, width=100)
    with Wait(console, "planning") as tell:
        tell("the [plans]")
        if not quiet:
            assert tell.progress is not None
            tell.progress.refresh()
    assert ("planning: the [plans]" in file.getvalue()) is not quiet
    if quiet:
        assert file.getvalue() == ""
