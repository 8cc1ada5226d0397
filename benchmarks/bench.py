"""The benchmark: Convoy's plans beside one device and beside PyTorch's DistributedDataParallel.

    python -m benchmarks.bench [--set bench-full] [--fleet NAME ...] [--data-dir D]     # Linux, root
    python -m benchmarks.bench --page-only

Writes results/bench/FLEET.json, docs/benchmarks.md and docs/figures/benchmarks.png.
"""

import typer

from benchmarks.bench_page import bench_page
from benchmarks.figure import draw_efficiency
from benchmarks.verb import verb

main = verb("bench", "bench", "benchmarks", bench_page, draw_efficiency, budget_s=60.0, round_default_s=1.0)

if __name__ == "__main__":
    typer.run(main)
