"""`python -m studies DIR [NET]`: the whole study into a folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.errors import ConvoyError
from studies.run import run_study


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description="Tables (CSV) and figures (PNG) of the study."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("net", nargs="?", default="alexnet:4096", metavar="NET", help="a network by name (%(default)s)")
    parser.add_argument("--no-figures", action="store_true", help="tables only: figures need the extra 'plots'")
    parser.add_argument("--no-published", action="store_true", help="without the check of the published figures")
    parser.add_argument("--no-auto", action="store_true", help="without the planner's plans along the five axes")
    given = parser.parse_args(arguments)
    try:
        run_study(
            given.folder, given.net, draw=not given.no_figures, published=not given.no_published, auto=not given.no_auto,
            say=print,
        )  # fmt: skip
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
