"""The validation: predictions made before the runs, beside the runs.

    python -m benchmarks.validate [--fleet NAME ...] [--data-dir D]     # Linux, root; about 45 minutes on two cores
    python -m benchmarks.validate --page-only                           # only the page, from the results that are there

Writes results/validation/FLEET.json, docs/validation.md and docs/figures/validation.png.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.configurations import fleets_of
from benchmarks.drive import Drive, results_in, run
from benchmarks.figure import draw
from benchmarks.page import Paper, validation_page
from convoy.errors import ConvoyError
from convoy.files import write_whole

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "validation"
PAGE = ROOT / "docs" / "validation.md"


def main(
    set_name: Annotated[str, typer.Option("--set", help="A set of benchmarks/configurations.py.")] = "validation",
    fleet: Annotated[list[str] | None, typer.Option(help="Only this fleet; may be given several times.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with CIFAR-10; default: random images.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
    rounds: int = 5,
    round_s: Annotated[float, typer.Option("--round", help="Seconds of a configuration in one round.")] = 0.6,
    budget: Annotated[float, typer.Option(help="Seconds to measure one net.")] = 30.0,
    links_budget: Annotated[float, typer.Option(help="Seconds to measure the wire of a fleet.")] = 20.0,
    limit: Annotated[float, typer.Option(help="Seconds for one fleet, at most.")] = 5400.0,
    measurements: Annotated[Path | None, typer.Option(help="Folder to keep what was measured of every net.")] = None,
    again: Annotated[bool, typer.Option(help="Begin anew; default: go on where an earlier run was cut off.")] = False,
    page_only: Annotated[bool, typer.Option(help="Run nothing, write the page.")] = False,
) -> None:
    """Run the set and write the page."""
    fleets = tuple(fleet or ())
    drive = Drive(
        "benchmarks.validate", set_name, fleets, output, data_dir, rounds, round_s, budget, links_budget, 60.0, 60.0,
        limit, measurements, again,
    )  # fmt: skip
    status = 0
    try:
        drive.check()
        status = 0 if page_only else run(drive)
        results = results_in(output, fleets_of(set_name))
        picture = page.parent / "figures" / f"{page.stem}.png"
        drawn = draw(results, picture)
        paper = Paper(results, picture.relative_to(page.parent).as_posix() if drawn else None)
        write_whole(page, validation_page(paper))
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"Written: {page}")
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
