"""The validation: predictions made before the runs, beside the runs.

    python -m benchmarks.validate [--fleet NAME ...] [--data-dir D]     # Linux, root; about an hour on two cores
    python -m benchmarks.validate --page-only                           # only the page, from the results that are there

Writes results/validation/FLEET.json, docs/validation.md and docs/figures/validation.png.
"""

import typer

from benchmarks.figure import draw
from benchmarks.page import validation_page
from benchmarks.verb import verb

main = verb("validate", "validation", "validation", validation_page, draw, budget_s=30.0, round_default_s=0.6)

if __name__ == "__main__":
    typer.run(main)
