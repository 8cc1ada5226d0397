"""`convoy leave` and `convoy stop`: what they tell the devices of this machine, and whether these have done it."""

import os
import signal
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]

from convoy.comm import roster
from convoy.comm.roster import Row
from convoy.comm.signals import END, LEAVE
from convoy.errors import ConvoyError, InputError


def leave(job: str | None, devices: Sequence[int], wait_s: float) -> None:
    """Let devices of this machine leave their job after the step.

    Args:
        job: HOST:PORT or the run's folder, where there are several.
        devices: by their ids; empty: all that are here.
        wait_s: how long they may take.

    Raises:
        InputError: there are none, they cannot leave, or nobody would be left.
        ConvoyError: they are still there after the time.
    """
    here = of_job(roster.rows(), job)
    rows = who_leaves(here, devices)
    _tell(rows, LEAVE)
    print(f"{_names(rows)} of {_title(here)}: asked to leave after the step", flush=True)
    _see_them_end(rows, wait_s)


def stop(job: str | None, wait_s: float) -> None:
    """End a job everywhere, from a machine on which some of its devices are: after the step, and saved if it saves checkpoints.

    Raises:
        InputError: there is none here.
        ConvoyError: they are still there after the time.
    """
    here = of_job(roster.rows(), job)
    trains = [row for row in here if row.members]
    _tell(trains, END)
    _tell([row for row in here if not row.members], LEAVE)  # the others end with it
    after = (
        "asked to end after the step, on all machines"
        if trains
        else "ended at once; it did not train yet, or could not end after a step (--spare none, a script without Members)"
    )
    print(f"{_title(here)}: {after}", flush=True)
    _see_them_end(here, wait_s)


def of_job(rows: Sequence[Row], job: str | None) -> list[Row]:
    """The rows of one job.

    Raises:
        InputError: there is none, or several and nobody said which.
    """
    if not rows:
        raise InputError(
            f"no job of user {os.geteuid()} runs on this machine ({os.uname().nodename}): give the command on a machine where "
            "its devices are, as the user who started it"
        )
    named = [row for row in rows if job is None or row.is_named(job)]
    jobs = list(dict.fromkeys(row.job for row in named))
    if len(jobs) == 1:
        return named
    listed = "\n".join(
        f"  {_title([row for row in rows if row.job == each])}" for each in dict.fromkeys(r.job for r in rows)
    )
    said = f"no job here is called {job!r}" if not named else f"{len(jobs)} jobs run here"
    raise InputError(f"{said}: name one by its HOST:PORT or its folder:\n{listed}")


def who_leaves(here: Sequence[Row], devices: Sequence[int]) -> list[Row]:
    """Of the devices of a job that are here, those that are to leave.

    Raises:
        InputError: they are not here, they cannot leave, or nobody would be left.
    """
    ids = [row.device for row in here]
    if strange := [device for device in devices if device not in ids]:
        raise InputError(
            f"--device {strange[0]}: the devices of {_title(here)} on this machine are {', '.join(map(str, ids))}; the others "
            "leave where they are"
        )
    rows = [row for row in here if not devices or row.device in devices]
    if fixed := [row for row in rows if not row.members]:
        raise InputError(
            f"{_names(fixed)} of {_title(here)} cannot leave: it has not begun to train, or the others could not go on without "
            "it (--spare none, a script without convoy.train.Members); `convoy stop` ends the job"
        )
    members = rows[0].members
    if {row.device for row in rows} >= set(members):
        raise InputError(
            f"nobody of {_title(here)} would be left: its devices are {', '.join(map(str, members))}; `convoy stop` ends it, "
            "with a checkpoint if it saves them"
        )
    return rows


def _tell(rows: Sequence[Row], signum: signal.Signals) -> None:
    for row in rows:
        try:
            os.kill(row.pid, signum)
        except ProcessLookupError:
            continue  # it has just ended
        except PermissionError:
            raise InputError(f"process {row.pid} is another user's now: nothing was told to it") from None


def _see_them_end(rows: Sequence[Row], wait_s: float) -> None:
    found = []
    for row in rows:
        try:
            found.append(psutil.Process(row.pid))
        except psutil.Error:
            continue
    _, left = psutil.wait_procs(found, timeout=wait_s)
    if left:
        names = _names([row for row in rows if row.pid in {process.pid for process in left}])
        raise ConvoyError(
            f"{names} did not end within {wait_s:g} s: a step, or what is between two steps, takes longer. Wait, or end it at "
            f"once, which loses what it has since the last checkpoint: kill -9 {' '.join(str(process.pid) for process in left)}"
        )


def _names(rows: Sequence[Row]) -> str:
    return " and ".join(f"device {row.device} ({row.kind})" for row in rows)


def _title(rows: Sequence[Row]) -> str:
    run = next((row.run for row in rows if row.run), "")
    return f"job {rows[0].job}" + (f" (run {run})" if run else "")
