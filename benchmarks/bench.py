"""The benchmark: Convoy's plans beside one device and beside PyTorch's DistributedDataParallel.

    python -m benchmarks.bench [--set bench-full] [--fleet NAME ...] [--data-dir D]     # Linux, root
    python -m benchmarks.bench --page-only

Writes results/bench/FLEET.json, docs/benchmarks.md and docs/figures/benchmarks.png.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bench_page import bench_page
from benchmarks.configurations import fleets_of
from benchmarks.drive import Drive, results_in, run
from benchmarks.figure import draw_efficiency
from benchmarks.page import Paper
from convoy.errors import ConvoyError
from convoy.files import write_whole

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"


def main(
    set_name: Annotated[str, typer.Option("--set", help="A set of benchmarks/configurations.py.")] = "bench",
    fleet: Annotated[list[str] | None, typer.Option(help="Only this fleet; may be given several times.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with CIFAR-10; default: random images.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
    rounds: int = 5,
    round_s: Annotated[float, typer.Option("--round", help="Seconds of a configuration in one round.")] = 1.0,
    budget: Annotated[float, typer.Option(help="Seconds to measure one net.")] = 60.0,
    links_budget: Annotated[float, typer.Option(help="Seconds to measure the wire of a fleet.")] = 20.0,
    alone: Annotated[
        float, typer.Option(help="After so many seconds a device alone has enough, with two rounds at least.")
    ] = 60.0,
    tuning: Annotated[float, typer.Option(help="Seconds to search for DDP's shares and options, per batch.")] = 120.0,
    limit: Annotated[float, typer.Option(help="Seconds for one fleet, at most.")] = 14400.0,
    measurements: Annotated[Path | None, typer.Option(help="Folder to keep what was measured of every net.")] = None,
    again: Annotated[bool, typer.Option(help="Begin anew; default: go on where an earlier run was cut off.")] = False,
    page_only: Annotated[bool, typer.Option(help="Run nothing, write the page.")] = False,
) -> None:
    """Run the set and write the page."""
    drive = Drive(
        "benchmarks.bench", set_name, tuple(fleet or ()), output, data_dir, rounds, round_s, budget, links_budget, alone,
        tuning, limit, measurements, again,
    )  # fmt: skip
    status = 0
    try:
        drive.check()
        status = 0 if page_only else run(drive)
        results = results_in(output, fleets_of(set_name))
        picture = page.parent / "figures" / f"{page.stem}.png"
        drawn = draw_efficiency(results, picture)
        write_whole(page, bench_page(Paper(results, picture.relative_to(page.parent).as_posix() if drawn else None)))
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"Written: {page}")
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
