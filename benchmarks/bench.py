"""The benchmark: Convoy's plans beside one device and beside PyTorch's DistributedDataParallel.

    python -m benchmarks.bench [--set targets] [--fleet NAME ...] [--data-dir D]     # Linux, root
    python -m benchmarks.bench --fleet even4 --net two-conv:500:1500 --batch 16 --plan one-device --plan master
    python -m benchmarks.bench --set lab --fleet desktop4 --round 0.8 --budget 25 --links-budget 6 --tuning 40 --case-limit 45
    python -m benchmarks.bench --page-only

Writes results/bench/CASE.json, docs/benchmarks.md and its figures. It says about how long it will take before it starts, and
goes on where it was cut off.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.bench_page import Sources, bench_page
from benchmarks.figure import draw_efficiency, draw_scaling
from benchmarks.overhead import RESULTS as OVERHEAD
from benchmarks.overhead_page import read_overhead
from benchmarks.planning import RESULTS as PLANNED
from benchmarks.planning_page import read_planning
from benchmarks.rebalance import RESULTS as REBALANCED
from benchmarks.rebalance_page import read_rebalanced
from benchmarks.results import FleetResult
from benchmarks.verb import verb
from convoy.files import write_whole


def write_page(results: Sequence[FleetResult], folder: Path, page: Path) -> None:
    """The page, with figures beside it: those of the numbers, and the timelines that workers drew where a target was missed."""
    figures = page.parent / "figures"
    timelines = {}
    for picture in sorted(folder.glob("*.png")):
        figures.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, figures / f"timeline-{picture.name}")
        timelines[picture.stem] = f"figures/timeline-{picture.name}"
    efficiency, scaling = f"figures/{page.stem}.png", f"figures/{page.stem}-scaling.png"
    sources = Sources(
        results,
        figure=efficiency if draw_efficiency(results, page.parent / efficiency) else None,
        scaling=scaling if draw_scaling(results, page.parent / scaling) else None,
        timelines=timelines,
        rebalanced=read_rebalanced(REBALANCED),
        planning=read_planning(PLANNED),
        overhead=read_overhead(OVERHEAD),
    )
    write_whole(page, bench_page(sources))


main = verb("bench", "bench", "benchmarks", write_page, budget_s=60.0, round_default_s=1.0)

if __name__ == "__main__":
    typer.run(main)
