"""Compare Convoy's plans with one device and with PyTorch's DistributedDataParallel.

    python -m benchmarks.bench [--set targets] [--fleet NAME ...] [--data-dir D]     # Linux, root
    python -m benchmarks.bench --fleet even4 --net two-conv:500:1500 --batch 16 --plan one-device --plan master
    python -m benchmarks.bench --set lab --fleet desktop4 --round 0.8 --budget 25 --links-budget 6 --tuning 40 --case-limit 45
    python -m benchmarks.bench --page-only

Writes results/bench/CASE.json, docs/benchmarks.md and its figure. A run that was cut off continues where it stopped.
"""

from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.bench_page import Sources, bench_page
from benchmarks.figure import draw_efficiency
from benchmarks.results import FleetResult
from benchmarks.verb import verb
from convoy.files import write_whole


def write_page(results: Sequence[FleetResult], page: Path) -> None:
    """Write the page, and its figure next to it."""
    efficiency = f"figures/{page.stem}.png"
    drawn = draw_efficiency(results, page.parent / efficiency)
    write_whole(page, bench_page(Sources(results, efficiency if drawn else None)))


main = verb("bench", "bench", "benchmarks", write_page, budget_s=60.0, round_default_s=1.0)

if __name__ == "__main__":
    typer.run(main)
