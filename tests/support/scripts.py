"""Run a script or a Convoy command on processes that have already imported torch: one second instead of ten.

That `convoy run`, `convoy train --devices` and torchrun start their processes rightly is for other tests to say.
"""

import contextlib
import io
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy import cli
from convoy.machine.launch_env import hidden
from tests.support.processes import on_processes


def on_forks(devices: int, script: Path, *options: str, as_one: bool = True) -> list[tuple[str, str]]:
    """Return a script's output and errors on each device.

    Args:
        as_one: the script sees one device, as under `convoy run`; else torchrun's variables. Warnings are errors then.
    """
    given = (str(script), list(options), as_one)
    return [(out, err) for out, err in on_processes(devices, f"{__name__}:_run", *given, joined=False, limit_s=100)]


def _run(_device: int, script: str, options: list[str], as_one: bool) -> tuple[str, str]:
    if as_one:
        seen = hidden(os.environ)
        os.environ.clear()
        os.environ.update(seen)
    else:
        warnings.simplefilter("error")
    os.chdir(Path(script).parent)
    sys.argv = [script, *options]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        runpy.run_path(script, run_name="__main__")
    return out.getvalue(), err.getvalue()


def launch_on_forks(argv: Sequence[str], devices: Sequence[str], **_: Any) -> int:
    """Replace `launch_local` for devices that succeed: print what device 0 prints."""
    printed = on_processes(len(devices), f"{__name__}:_command", list(argv), os.getcwd(), joined=False, limit_s=100)
    print(printed[0], end="")
    return 0


def _command(_device: int, argv: list[str], folder: str) -> str:
    os.chdir(folder)
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.app(args=argv, standalone_mode=False)
    return out.getvalue()
