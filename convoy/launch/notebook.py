"""Runs a notebook cell as a script on several devices: `%%convoy --devices 4`, after `%load_ext convoy`."""

import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError
from convoy.launch.supervisor import Interrupts, Signalled, Start, Supervisor, decoded

GRACE_S = 10.0  # seconds for the devices to end by themselves after an interrupt


def notebook(source: str, options: str = "") -> None:
    """Run Python source as a script on several devices of this machine or a fleet, and print the output of device 0.

    The source is a separate program without the notebook's variables, because threads and devices of the notebook's process
    cannot be shared. Return results as files.

    Args:
        options: of `convoy run`, such as "--devices 4" or "--fleet lab.toml".

    Raises:
        ConvoyError: the script failed; the reason has been printed.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-cell-") as folder:
        script = Path(folder) / "cell.py"
        script.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "convoy", "run", *shlex.split(options), str(script)]
        to_cell = decoded(lambda text: print(text, end="", flush=True))  # a cell shows only the output of this process
        start = Start(device=0, name="cell", command=command, stdout=to_cell, stderr=to_cell, own_session=True)
        with Interrupts() as interrupts, Supervisor(interrupts) as processes:
            process = processes.start(start)
            try:
                processes.listen(lambda: not processes.running)
            except Signalled:
                process.popen.send_signal(signal.SIGINT)
                processes.listen(lambda: not processes.running, GRACE_S)
                raise KeyboardInterrupt from None
        status = process.popen.returncode
    if status:
        raise ConvoyError(f"the cell ended with status {status} on its devices; the reason is printed above")


def load_ipython_extension(shell: Any) -> None:
    """Register `%%convoy` in a notebook (`%load_ext convoy`)."""
    shell.register_magic_function(lambda line, cell: notebook(cell, line), magic_kind="cell", magic_name="convoy")
