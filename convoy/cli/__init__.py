"""The command line: each verb turns its options into values and calls one function of `app`, `doctor`, `emulate` or `launch`.

::

    top.py       the command itself, and whether this process is one of a job
    options.py   options that several verbs have, and those made from the list of settings
    training.py  train, demo
    fleets.py    measure, plan, rehearse, doctor
    reports.py   simulate, report
"""

import sys

# isort: off
from convoy.cli import training, fleets, reports  # noqa: F401 - each adds its verbs, and --help lists them in this order

# isort: on
from convoy.cli.top import app
from convoy.errors import ConvoyError

__all__ = ["app", "main"]


def main() -> None:
    """The `convoy` command: errors of ours are one message and exit status 2, without a traceback."""
    try:
        app()
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
