"""Calling the system's own programs (ip, tc, mount), each call bounded in time."""

import os
import shutil
import subprocess

from convoy.errors import InputError

_CALL_LIMIT_S = 10.0

_PACKAGES = {
    "ip": "iproute2 (apt install iproute2; dnf install iproute)",
    "tc": "iproute2 (apt install iproute2; dnf install iproute-tc)",
    "mount": "util-linux",
    "umount": "util-linux",
    "sh": "a POSIX shell",
}


def find(program: str) -> str:
    """The full path of a program. InputError, with the package that has it, where it is missing."""
    # Root's PATH lacks the sbin folders under some su and cron set-ups.
    path = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if path is None:
        raise InputError(
            f"program {program!r} is not on this machine: a rehearsal calls it; install {_PACKAGES[program]}"
        )
    return path


def call(program: str, *arguments: str) -> str:
    """Run a program to its end and return what it printed.

    Raises:
        InputError: it failed, or took longer than ten seconds; the message has its own words.
    """
    line = " ".join((program, *arguments))
    try:
        # A session of its own: Ctrl-C reaches this process, which then removes what the program made.
        done = subprocess.run(
            [find(program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CALL_LIMIT_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"`{line}` took more than {_CALL_LIMIT_S:g} s: try again on a calmer machine") from error
    if done.returncode != 0:
        words = done.stderr.strip().rstrip(".")
        raise InputError(
            f"`{line}` ended with status {done.returncode}: {words or 'no message'}. A rehearsal needs a "
            "kernel with network namespaces, veth, bridge, tbf and control groups, and the right to change them; "
            "in a container, start it privileged"
        )
    return done.stdout
