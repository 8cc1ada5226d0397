"""Validation: compare predictions made before the runs with the runs.

    python -m benchmarks.validate [--fleet NAME ...] [--data-dir D]     # Linux, root; about an hour on two cores
    python -m benchmarks.validate --page-only                           # only the page, from the results that are there

Writes results/validation/CASE.json, docs/validation.md and docs/figures/validation.png. It says about how long it will take
before it starts, and goes on where it was cut off.
"""

from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.figure import draw
from benchmarks.page import Paper, validation_page
from benchmarks.results import FleetResult
from benchmarks.verb import verb
from convoy.files import write_whole


def write_page(results: Sequence[FleetResult], page: Path) -> None:
    """Write the page, and its figure next to it."""
    picture = page.parent / "figures" / f"{page.stem}.png"
    figure = picture.relative_to(page.parent).as_posix() if draw(results, picture) else None
    write_whole(page, validation_page(Paper(results, figure)))


main = verb("validate", "validation", "validation", write_page, budget_s=30.0, round_default_s=0.6)

if __name__ == "__main__":
    typer.run(main)
