"""The command line: its verbs, and the work of those that need no room of their own.

::

    options.py      the command itself, options of several verbs, and those made from the list of settings
    scripts.py      run
    training.py     train, join, leave, stop, demo
    fleets.py       measure, plan, emulate, doctor
    fleet_files.py  fleet init, show, setup, key
    reports.py      predict, simulate, report

    train.py        starts `convoy train` on one device, of the first ones or joining; then
      job.py          the training as it was started, and what all devices must agree on
      session.py      the training from the images to the last line of the log, made of build.py's parts
      reporter.py     screen, log and loggers; show.py prints plans and their changes
      admission.py    follows the devices that come and go; newcomer.py is a device that joins
      comparison.py   the same training in plain PyTorch on one device

The verbs import torch and the work only when they run, so that --help is quick.
"""

import errno
import os
import signal
import sys
from types import FrameType

# isort: off
# Each adds its verbs; --help lists them in this order.
from convoy.cli import scripts, training, fleets, fleet_files, reports  # noqa: F401

# isort: on
from convoy.cli.options import app
from convoy.cli.output import patient_output
from convoy.errors import ConvoyError, bounded
from convoy.launch.exit_status import ERROR_STATUS, PIPE_STATUS
from convoy.machine.launch_env import is_one_of_job

__all__ = ["app", "main"]


def main() -> None:
    """The `convoy` command.

    Exit status: 0; 1 where `convoy doctor` found errors; 2 after one message that begins with "error:"; 130 after Ctrl-C, and
    128 + n after signal n; 141 where the reader of its output is gone, as after `| head -1`.
    """
    _open_closed_streams()
    own = signal.getsignal(signal.SIGINT)
    if not is_one_of_job(os.environ) and own is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)  # a launcher answers for its devices
    try:
        sys.exit(_run())
    finally:
        signal.signal(signal.SIGINT, own)


def _open_closed_streams() -> None:
    """Open /dev/null for streams that the caller has closed (`>&-`), so that no other file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Answer Ctrl-C at once: the current work may take a while to end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(2, b"interrupted\n")
    signal.default_int_handler(signum, frame)


def _run() -> int:
    try:
        with patient_output() as files:
            status = int(app(standalone_mode=False) or 0)
            sys.stdout.flush()
        if missing := sum(file.left_out_bytes for file in files):
            return _refused(f"the output lacks its last {missing:,} bytes: make room there, or send it elsewhere")
        return status
    except ConvoyError as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich turn a broken pipe into an exit.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _leave_stdout()
        return PIPE_STATUS
    except Exception as error:
        if (message := _usage(error) or _out_of_room(error)) is None:
            raise
        return _refused(message)


def _refused(message: str) -> int:
    print(f"error: {bounded(message)}", file=sys.stderr)
    return ERROR_STATUS


def _usage(error: Exception) -> str | None:
    """Return the message of an error that typer found in the command line."""
    text_of, context = getattr(error, "format_message", None), getattr(error, "ctx", None)
    if text_of is None:
        return None
    path = context.command_path if context is not None else "convoy"
    return f"{str(text_of()).rstrip('.')}; {path} --help lists what it takes"


def _out_of_room(error: Exception) -> str | None:
    """Return the message if memory, or the disk under standard output, is full."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in first:
        return (
            f"there is not enough memory ({first or 'nothing could be allocated'}): give a smaller batch, net or image"
        )
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _leave_stdout()
        return f"the output cannot be written ({error.strerror}): make room there, or send it elsewhere"
    return None


def _leave_stdout() -> None:
    """Drop what is not flushed yet. Otherwise the interpreter complains when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
