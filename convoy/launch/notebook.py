"""Runs a cell of a notebook as a script on several devices: `%%convoy --devices 4`, after `%load_ext convoy`."""

import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError

_GRACE_S = 10.0
"""After an interrupt the devices get this long to end by themselves."""


def notebook(source: str, options: str = "") -> None:
    """Run Python source as a script on several devices of this machine or a fleet; what device 0 prints is printed here.

    The source is a program of its own and shares no variables with the notebook, whose process may hold threads and devices
    that no other process can take over. Results come back as files.

    Args:
        options: of `convoy run`, such as "--devices 4" or "--fleet lab.toml".

    Raises:
        ConvoyError: it did not end well; what was said has been printed.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-cell-") as folder:
        script = Path(folder) / "cell.py"
        script.write_text(source, encoding="utf-8")
        status = _streamed([sys.executable, "-m", "convoy", "run", *shlex.split(options), str(script)])
    if status:
        raise ConvoyError(f"the cell ended with status {status} on its devices; what went wrong is printed above")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext convoy`: makes `%%convoy` known to a notebook."""

    def convoy(line: str, cell: str) -> None:
        notebook(cell, line)

    shell.register_magic_function(convoy, magic_kind="cell", magic_name="convoy")


def _streamed(command: list[str]) -> int:
    """Run a command and print its output as it comes: a cell shows what this process prints, not what its children do."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                print(line, end="", flush=True)
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
