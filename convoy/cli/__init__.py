"""The command line: its verbs, and the work of those that need no room of their own.

::

    options.py         the command itself, options of several verbs, and those made from the list of settings
    scripts.py         run
    training.py        train, join, leave, stop, demo
    measuring.py       measure
    plan_verbs.py      plan, predict
    simulating.py      simulate, report
    fleet_commands.py  emulate, doctor; fleet init, show, setup, key

    train_job.py       starts `convoy train` on one device: of the first ones, or joining (joining.py); then
    train_session.py   the training, made of the parts in train_parts.py
    reporter.py        its screen, log and loggers
    admitting.py       admits joining devices

The verbs import torch and the work only when they run, so that --help is quick.
"""

import errno
import os
import signal
import sys
from types import FrameType

# isort: off
# Each adds its verbs; --help lists them in this order.
from convoy.cli import scripts, training, measuring, plan_verbs, simulating, fleet_commands  # noqa: F401

# isort: on
from convoy.cli.options import app
from convoy.errors import ConvoyError, bounded
from convoy.launch.exit_status import ERROR_STATUS, PIPE_STATUS
from convoy.machine.launch_env import is_one_of_job

__all__ = ["app", "main"]


def main() -> None:
    """Run the `convoy` command.

    Exit status: 0; 1 where `convoy doctor` found errors; 2 after one message that begins with "error:"; 130 after Ctrl-C, and
    128 + n after signal n; 141 where the reader of its output is gone, as after `| head -1`.
    """
    own = signal.getsignal(signal.SIGINT)
    if not is_one_of_job(os.environ) and own is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)  # in a job its launcher answers
    try:
        sys.exit(_run())
    finally:
        signal.signal(signal.SIGINT, own)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Answer Ctrl-C at once: the current work may take a while to end."""
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
        message = _explained(error)
        if not message:
            raise
    print(f"error: {bounded(message)}", file=sys.stderr)
    return ERROR_STATUS


def _explained(error: Exception) -> str:
    """Return the message for a mistake in the command line, full memory, or a full disk under standard output; else ""."""
    if hasattr(error, "format_message"):  # of typer
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "convoy"
        return f"{str(error.format_message()).rstrip('.')}; {path} --help lists what it takes"
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in first:
        return (
            f"there is not enough memory ({first or 'nothing could be allocated'}): give a smaller batch, net or image"
        )
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _drop_output()
        return f"the output cannot be written ({error.strerror}): make room there, or send it elsewhere"
    return ""


def _drop_output() -> None:
    """Drop what is not flushed yet. Otherwise the interpreter complains when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
