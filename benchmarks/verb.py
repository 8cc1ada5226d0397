"""The shared command line of the benchmarks: run the requested cases, then write the page from all results."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.configurations import Choice
from benchmarks.drive import Drive, results_in, run
from benchmarks.results import FleetResult
from convoy.errors import ConvoyError

ROOT = Path(__file__).parent.parent


def verb(
    name: str,
    set_run: str,
    page_name: str,
    write_page: Callable[[Sequence[FleetResult], Path], None],
    *,
    budget_s: float,
    round_default_s: float,
) -> Callable[..., None]:
    """Return the typer command of `python -m benchmarks.NAME`. It writes results/SET/CASE.json and a page with figures.

    Args:
        set_run: the set that is run if nothing is named; names the folder of the results.
        page_name: of the page in docs/, without its ending.
        write_page: receives the results and the page to write.
        budget_s, round_default_s: defaults of --budget and --round.
    """

    def main(
        set_name: Annotated[
            str | None, typer.Option("--set", help=f"A set of benchmarks/configurations.py; without --net: {set_run}.")
        ] = None,
        fleet: Annotated[list[str] | None, typer.Option(help="Only this fleet; repeatable.")] = None,
        net: Annotated[
            list[str] | None,
            typer.Option(help="Only this net. Without --set: a case of your own, with --fleet and --batch."),
        ] = None,
        batch: Annotated[list[int] | None, typer.Option(help="Only this batch.")] = None,
        plan: Annotated[
            list[str] | None, typer.Option(help="Only this plan, or one-device, ddp-even, ddp-tuned.")
        ] = None,
        data_dir: Annotated[Path | None, typer.Option(help="Folder with CIFAR-10; default: random images.")] = None,
        output: Annotated[Path, typer.Option(help="Folder for the results.")] = ROOT
        / "benchmarks"
        / "results"
        / set_run,
        page: Annotated[Path, typer.Option(help="The page to write.")] = ROOT / "docs" / f"{page_name}.md",
        rounds: int = 5,
        round_s: Annotated[
            float, typer.Option("--round", help="Seconds per configuration and round.")
        ] = round_default_s,
        budget: Annotated[float, typer.Option(help="Seconds to measure one net.")] = budget_s,
        links_budget: Annotated[float, typer.Option(help="Seconds to measure the links of a fleet.")] = 20.0,
        alone: Annotated[
            float, typer.Option(help="Stop timing single devices after this many seconds, but not before two rounds.")
        ] = 60.0,
        tuning: Annotated[
            float, typer.Option(help="Seconds to search for DDP's shares and options, per batch.")
        ] = 120.0,
        case_limit: Annotated[
            float, typer.Option(help="Start no further round of a case after this many seconds and two rounds.")
        ] = 900.0,
        limit: Annotated[float, typer.Option(help="Time limit per fleet in seconds.")] = 14400.0,
        measurements: Annotated[Path | None, typer.Option(help="Folder for the measurements of every net.")] = None,
        encrypted: Annotated[
            bool,
            typer.Option("--encrypted", help="Encrypt Convoy's traffic; default: plain, like DDP's."),
        ] = False,
        again: Annotated[bool, typer.Option(help="Measure again; default: skip cases measured by this code.")] = False,
        page_only: Annotated[bool, typer.Option(help="Only write the page.")] = False,
    ) -> None:
        """Run the set or the named cases, then write the page."""
        chosen = set_name or (None if net else set_run)
        choice = Choice(chosen, tuple(fleet or ()), tuple(net or ()), tuple(batch or ()), tuple(plan or ()))
        drive = Drive(
            f"benchmarks.{name}", choice, output, data_dir, rounds, round_s, budget, links_budget, alone, tuning,
            case_limit, limit, measurements, again, encrypted,
        )  # fmt: skip
        status = 0
        try:
            drive.check()
            status = 0 if page_only else run(drive)
            write_page(results_in(output), page)
        except ConvoyError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        print(f"Written: {page}")
        raise typer.Exit(status)

    return main
