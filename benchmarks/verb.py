"""The command line that the benchmarks share: run a set, then write its page from the results that are there."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.configurations import fleets_of
from benchmarks.drive import Drive, results_in, run
from benchmarks.page import Paper
from benchmarks.results import FleetResult
from convoy.errors import ConvoyError
from convoy.files import write_whole

ROOT = Path(__file__).parent.parent


def verb(
    name: str,
    set_run: str,
    page_name: str,
    page_of: Callable[[Paper], str],
    draw: Callable[[Sequence[FleetResult], Path], bool],
    *,
    budget_s: float,
    round_default_s: float,
) -> Callable[..., None]:
    """The command `python -m benchmarks.NAME`, for typer. It writes results/SET/FLEET.json and a page with a figure.

    Args:
        set_run: the set that is run if none is named; names the folder of the results.
        page_name: of the page in docs/, without its ending.
        page_of, draw: write the page's text and its figure; `draw` says whether there was anything to draw.
        budget_s, round_default_s: defaults of --budget and --round.
    """

    def main(
        set_name: Annotated[str, typer.Option("--set", help="A set of benchmarks/configurations.py.")] = set_run,
        fleet: Annotated[list[str] | None, typer.Option(help="Only this fleet; may be given several times.")] = None,
        data_dir: Annotated[Path | None, typer.Option(help="Folder with CIFAR-10; default: random images.")] = None,
        output: Annotated[Path, typer.Option(help="Folder for the results.")] = ROOT
        / "benchmarks"
        / "results"
        / set_run,
        page: Annotated[Path, typer.Option(help="The page to write.")] = ROOT / "docs" / f"{page_name}.md",
        rounds: int = 5,
        round_s: Annotated[
            float, typer.Option("--round", help="Seconds of a configuration in one round.")
        ] = round_default_s,
        budget: Annotated[float, typer.Option(help="Seconds to measure one net.")] = budget_s,
        links_budget: Annotated[float, typer.Option(help="Seconds to measure the wire of a fleet.")] = 20.0,
        alone: Annotated[
            float, typer.Option(help="After so many seconds a device alone has enough, with two rounds at least.")
        ] = 60.0,
        tuning: Annotated[
            float, typer.Option(help="Seconds to search for DDP's shares and options, per batch.")
        ] = 120.0,
        limit: Annotated[float, typer.Option(help="Seconds for one fleet, at most.")] = 14400.0,
        measurements: Annotated[
            Path | None, typer.Option(help="Folder to keep what was measured of every net.")
        ] = None,
        again: Annotated[
            bool, typer.Option(help="Begin anew; default: go on where an earlier run was cut off.")
        ] = False,
        page_only: Annotated[bool, typer.Option(help="Run nothing, write the page.")] = False,
    ) -> None:
        """Run the set and write the page."""
        drive = Drive(
            f"benchmarks.{name}", set_name, tuple(fleet or ()), output, data_dir, rounds, round_s, budget, links_budget,
            alone, tuning, limit, measurements, again,
        )  # fmt: skip
        status = 0
        try:
            drive.check()
            status = 0 if page_only else run(drive)
            results = results_in(output, fleets_of(set_name))
            picture = page.parent / "figures" / f"{page.stem}.png"
            drawn = draw(results, picture)
            paper = Paper(results, picture.relative_to(page.parent).as_posix() if drawn else None)
            write_whole(page, page_of(paper))
        except ConvoyError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        print(f"Written: {page}")
        raise typer.Exit(status)

    return main
