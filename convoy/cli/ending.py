"""`convoy leave` and `convoy stop`: signal the devices of this machine, and wait until they have ended."""

import os
import signal
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]

from convoy.errors import ConvoyError, InputError
from convoy.machine import roster
from convoy.machine.process import END, LEAVE
from convoy.machine.roster import JobProcess


def leave(job: str | None, devices: Sequence[int], wait_s: float) -> None:
    """Remove devices of this machine from their job after the current step.

    Args:
        job: HOST:PORT or the run's folder, if there are several.
        devices: by their ids; empty: all that are here.
        wait_s: how long they may take.

    Raises:
        InputError: there are none, they cannot leave, or no device would be left.
        ConvoyError: they are still there after the time.
    """
    here = of_job(roster.rows(), job)
    rows = who_leaves(here, devices)
    _signal(rows, LEAVE)
    print(f"{_names(rows)} of {_title(here)}: asked to leave after the step", flush=True)
    _wait_for(rows, wait_s)


def stop(job: str | None, wait_s: float) -> None:
    """End a job on all its machines after the current step, saved if it saves checkpoints.

    Raises:
        InputError: none of its devices is here.
        ConvoyError: they are still there after the time.
    """
    here = of_job(roster.rows(), job)
    training = [row for row in here if row.members]
    _signal(training, END)
    _signal([row for row in here if not row.members], LEAVE)  # the others end with it
    after = (
        "asked to end after the step, on all machines"
        if training
        else "ended at once; it did not train yet, or could not end after a step (--spare none, a script without Members)"
    )
    print(f"{_title(here)}: {after}", flush=True)
    _wait_for(here, wait_s)


def of_job(rows: Sequence[JobProcess], job: str | None) -> list[JobProcess]:
    """Return the rows of one job.

    Raises:
        InputError: there is none, or several and none was named.
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
    titles = [_title([row for row in rows if row.job == each]) for each in dict.fromkeys(row.job for row in rows)]
    found = f"{len(jobs)} jobs run here" if named else f"no job here is called {job!r}"
    raise InputError("\n  ".join([f"{found}: name one by its HOST:PORT or its folder:", *titles]))


def who_leaves(here: Sequence[JobProcess], devices: Sequence[int]) -> list[JobProcess]:
    """Return those of a job's devices here that are to leave.

    Raises:
        InputError: they are not here, they cannot leave, or no device would be left.
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
            f"{_names(fixed)} of {_title(here)} cannot leave: it has not begun to train, or the others could not continue "
            "without it (--spare none, a script without convoy.train.Members); `convoy stop` ends the job"
        )
    members = rows[0].members
    if {row.device for row in rows} >= set(members):
        raise InputError(
            f"no device of {_title(here)} would be left: its devices are {', '.join(map(str, members))}; `convoy stop` ends "
            "it, with a checkpoint if it saves them"
        )
    return rows


def _signal(rows: Sequence[JobProcess], signum: signal.Signals) -> None:
    for row in rows:
        try:
            os.kill(row.pid, signum)
        except ProcessLookupError:
            continue  # it has just ended
        except PermissionError:
            raise InputError(f"process {row.pid} is another user's now: it was sent no signal") from None


def _wait_for(rows: Sequence[JobProcess], wait_s: float) -> None:
    processes = []
    for row in rows:
        try:
            processes.append(psutil.Process(row.pid))
        except psutil.Error:
            continue
    _, left = psutil.wait_procs(processes, timeout=wait_s)
    if left:
        pids = [process.pid for process in left]
        raise ConvoyError(
            f"{_names([row for row in rows if row.pid in pids])} did not end within {wait_s:g} s: a step, or the work "
            "between two steps, takes longer. Wait, or end it at once, which loses what it has since the last checkpoint: "
            f"kill -9 {' '.join(map(str, pids))}"
        )


def _names(rows: Sequence[JobProcess]) -> str:
    return " and ".join(f"device {row.device} ({row.kind})" for row in rows)


def _title(rows: Sequence[JobProcess]) -> str:
    run = next((row.run for row in rows if row.run), "")
    return f"job {rows[0].job}" + (f" (run {run})" if run else "")
