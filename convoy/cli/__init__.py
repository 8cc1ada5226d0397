"""The command line: each verb turns its options into values and calls one function of `app`, `doctor`, `emulate` or `launch`.

::

    options.py      the command itself, options that several verbs have, and those made from the list of settings
    scripts.py      run
    training.py     train, join, leave, stop, demo
    fleets.py       measure, plan, rehearse, doctor
    fleet_files.py  fleet init, fleet show, setup, key
    reports.py      predict, simulate, report
"""

import errno
import os
import signal
import sys
from types import FrameType

# isort: off
# Each adds its verbs, and --help lists them in this order.
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
        signal.signal(signal.SIGINT, _interrupt)  # a launcher has its own words, also for the devices that it started
    try:
        sys.exit(_run())
    finally:
        signal.signal(signal.SIGINT, own)


def _open_closed_streams() -> None:
    """Send to /dev/null what would go to a stream that the caller has closed (`>&-`), so that no other file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Say so at once: what the program is in the middle of may take a while to end."""
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
        # The libraries of the command line and of the tables make an exit of it.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _leave_stdout()
        return PIPE_STATUS
    except Exception as error:
        if (said := _usage(error) or _out_of_room(error)) is None:
            raise
        return _refused(said)


def _refused(message: str) -> int:
    print(f"error: {bounded(message)}", file=sys.stderr)
    return ERROR_STATUS


def _usage(error: Exception) -> str | None:
    """What is wrong with the command line, where the command's library found it."""
    tell, context = getattr(error, "format_message", None), getattr(error, "ctx", None)
    if tell is None:
        return None
    path = context.command_path if context is not None else "convoy"
    return f"{str(tell()).rstrip('.')}; {path} --help lists what it takes"


def _out_of_room(error: Exception) -> str | None:
    """What to say where memory, or the place that standard output goes to, is full."""
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
    """What is still to be flushed goes nowhere: else the interpreter complains when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
