"""The command line: all verbs of `convoy`.

::

    options.py         the typer app, options shared by verbs, and options made from the list of settings
    scripts.py         run
    training.py        train, join, leave, stop, demo, report
    measuring.py       measure
    plan_verbs.py      plan, predict
    fleet_commands.py  emulate, doctor; fleet init, show, setup, key

    train_job.py       starts `convoy train` on one device, at the start of a job or joining it (joining.py)
    train_session.py   runs the training that train_parts.py builds
    reporter.py        screen, log and loggers of a training

The verbs import torch and the work only when they run, so that --help is quick.
"""

import errno
import os
import signal
import sys
from types import FrameType

# isort: off
# Each adds its verbs; --help lists them in this order.
from convoy.cli import scripts, training, measuring, plan_verbs, fleet_commands  # noqa: F401

# isort: on
from convoy.cli.options import app
from convoy.errors import ConvoyError, bounded
from convoy.launch.exit_status import ERROR_STATUS, PIPE_STATUS
from convoy.machine.launch_env import is_one_of_job

__all__ = ["app", "main"]


def main() -> None:
    """Run the `convoy` command.

    Exit status: 0; 1 if `convoy doctor` found errors; 2 after a message that begins with "error:"; 130 after Ctrl-C; 128 + n
    after signal n; 141 if the reader of its output closed the pipe, as in `| head -1`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    own = signal.getsignal(signal.SIGINT)
    if not is_one_of_job(os.environ) and own is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)  # in a job the launcher handles Ctrl-C
    try:
        sys.exit(_run())
    finally:
        signal.signal(signal.SIGINT, own)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Report Ctrl-C immediately: the current work may take a while to end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(2, b"interrupted\n")
    signal.default_int_handler(signum, frame)


def _run() -> int:
    try:
        status = int(app(standalone_mode=False) or 0)
        sys.stdout.flush()
        return status
    except ConvoyError as error:
        message = str(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich turn a broken pipe into an exit.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _drop_output()
        return PIPE_STATUS
    except Exception as error:
        if not (message := _explained(error)):
            raise
    print(f"error: {bounded(message)}", file=sys.stderr)
    return ERROR_STATUS


def _explained(error: Exception) -> str:
    """Return a message for a wrong command line, exhausted memory, or a full disk under standard output; else ""."""
    if hasattr(error, "format_message"):  # an error of typer
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "convoy"
        return f"{str(error.format_message()).rstrip('.')}; {path} --help lists its options"
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in first:
        return f"there is not enough memory ({first or type(error).__name__}): give a smaller batch, net or image"
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _drop_output()
        return f"the output cannot be written ({error.strerror}): make room there, or send it elsewhere"
    return ""


def _drop_output() -> None:
    """Drop unflushed output, so that the interpreter does not report a broken pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
