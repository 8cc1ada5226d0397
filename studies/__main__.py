"""`python -m studies DIR [NET]`: the whole study into a folder."""

import sys
from pathlib import Path

from convoy.errors import ConvoyError
from studies.run import run_study


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        print(
            "usage: python -m studies DIR [NET]   e.g. python -m studies figures alexnet:4096",
            file=sys.stderr,
        )
        return 2
    try:
        run_study(Path(arguments[0]), *arguments[1:], say=print)
    except ConvoyError as error:
        print(f"convoy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
