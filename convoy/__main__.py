"""python -m convoy"""

import atexit
import os
import sys
import threading
from contextlib import suppress


def run() -> None:
    """Run the command, and end without the interpreter's own shutdown, which takes a second or more with torch."""
    try:
        from convoy.cli import main

        main()
    except KeyboardInterrupt:  # while the modules load
        os._exit(130)
    except SystemExit as ended:
        status = ended.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    run()
