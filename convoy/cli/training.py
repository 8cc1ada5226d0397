"""Defines the verbs train, join, leave, stop, demo and report."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil  # type: ignore[import-untyped]
import typer

from convoy.cli.options import HelpAll, app, argument, flag, help_of, in_job, option, path_of, with_settings
from convoy.comm.job_key import choose, need_key_file
from convoy.config.train_options import read_address
from convoy.errors import ConvoyError, InputError
from convoy.launch.pairing import choose_key
from convoy.launch.supervisor import leave_limit
from convoy.machine import roster
from convoy.machine.process import END, LEAVE
from convoy.machine.roster import JobProcess


@app.command()
@with_settings()
def train(
    run: Annotated[Path | None, argument("RUN.TOML", "Settings: options without the dashes.", parser=path_of)] = None,
    _help_all: HelpAll = False,
    **given: Any,
) -> None:
    """Train a network on images, with the loss curve of one device.

    It uses this machine's devices, the hosts of a fleet file, or runs as one process of a job that torchrun, srun or mpirun
    started. Options override the run file.

    Example: convoy train --data cifar10 --net two-conv:150:800 --plan master --devices 4 --epochs 2
    """
    from convoy.config.run_file import resolve_settings

    one_of_job = in_job()
    resolved = resolve_settings(run, given)
    settings = resolved.settings
    devices = settings.device_names
    choose(settings.job_key, settings.trust_network, os.environ)
    if not one_of_job:
        from convoy.config.checks import check, check_outputs, check_places
        from convoy.launch.fleet import startable, train_on_fleet

        if (fleet := startable(settings.fleet)) is not None:
            raise typer.Exit(train_on_fleet(resolved, fleet))
        if settings.listen is not None:
            need_key_file("--listen", os.environ)
        check(settings)
        check_places(settings)
        check_outputs(settings)
        print(f"Starting {len(devices)} device{'s' * (len(devices) > 1)} ...", flush=True)
    if one_of_job or len(devices) == 1:
        from convoy.cli.train_job import run_device

        run_device(resolved)
        return
    from convoy.data import FETCHED
    from convoy.launch.host_job import JobOptions
    from convoy.launch.local import launch_local

    if settings.data in FETCHED and settings.data_dir is None:  # download once, before the devices start
        from convoy.cli.train_parts import load_images

        load_images(settings)
    host = "127.0.0.1" if settings.listens_at is None else settings.listens_at[0]
    options = JobOptions(port=settings.port, goes_on=settings.recovers)
    raise typer.Exit(launch_local(sys.argv[1:], devices, options=options, host=host))


@app.command()
def join(
    job: Annotated[str, argument("HOST:PORT,...", "Addresses of the job's devices, as the job prints them.")],
    job_key: Annotated[Path | None, option("PATH", help_of("job_key"), "--job-key")] = None,
    pair: Annotated[str | None, option("HOST:PORT", "First get the key from convoy fleet key --to there.")] = None,
    device: Annotated[str | None, option("NAME", "Device: cuda:0 or cpu. Default: the first GPU.")] = None,
    data_dir: Annotated[Path | None, option("PATH", "Folder of the data set, if it differs here.")] = None,
    checkpoint: Annotated[Path | None, option("PATH", "Folder for checkpoints, if this device writes them.")] = None,
    accept: Annotated[list[str] | None, option("NAME", "A MODULE:FUNCTION elsewhere that may be net or data.")] = None,
    when_idle: Annotated[bool, flag("Take part only while nobody uses this machine.", "--when-idle")] = False,
) -> None:
    """Join a running training.

    `convoy train --listen` started the training and printed the command to use. This device takes over its settings, loads the
    data and measures itself while the others train. It is admitted between two steps if that is predicted to make steps faster;
    otherwise it waits as a spare. The loss curve stays that of one device. SIGTERM makes it leave after a step.

    Example: convoy join 192.168.1.5:7000,192.168.1.6:7000 --job-key lab.key
    """
    if when_idle:
        from convoy.idle import join_when_idle

        raise typer.Exit(join_when_idle(sys.argv[1:]))
    choose_key(job_key, pair)
    from convoy.cli.train_job import run_joining_device

    own = {name: path for name, path in (("data_dir", data_dir), ("checkpoint", checkpoint)) if path is not None}
    run_joining_device([read_address(text) for text in job.split(",")], device, own, accept or ())


JobName = Annotated[str | None, argument("JOB", "Its folder (runs/...) or HOST:PORT; needed if several jobs run here.")]


@app.command()
def leave(
    job: JobName = None,
    device: Annotated[list[int] | None, option("ID", "Only this device; may be repeated.")] = None,
) -> None:
    """Remove this machine's devices from a running job after the current step. The others continue.

    It signals this user's devices, and returns when they have ended: then the machine can be switched off. On another
    machine: ssh HOST convoy leave.

    Example: convoy leave && sudo poweroff
    """
    here = of_job(roster.rows(), job)
    rows = leaving(here, device or ())
    _signal(rows, LEAVE)
    print(f"{_names(rows)} of {_title(here)}: asked to leave after the step", flush=True)
    _wait_for(rows)


@app.command()
def stop(job: JobName = None) -> None:
    """End a training on all its machines after the current step.

    Run it on any of them. With --checkpoint the training is saved, and `--resume` continues from that step.

    Example: convoy stop
    """
    here = of_job(roster.rows(), job)
    training = [row for row in here if row.members]
    _signal(training, END)
    _signal([row for row in here if not row.members], LEAVE)  # the others end with it
    how = "asked to end after the step, on all machines" if training else "ended at once: it could not end after a step"
    print(f"{_title(here)}: {how}", flush=True)
    _wait_for(here)


def of_job(rows: Sequence[JobProcess], job: str | None) -> list[JobProcess]:
    """Return the rows of one job. Raises InputError if there is none, or if several match."""
    if not rows:
        user = f"user {os.geteuid()} runs on this machine ({os.uname().nodename})"
        raise InputError(f"no job of {user}: run this on one of the job's machines, as the user who started it")
    named = [row for row in rows if job is None or row.is_named(job)]
    count = len({row.job for row in named})
    if count == 1:
        return named
    titles = [_title([row for row in rows if row.job == each]) for each in dict.fromkeys(row.job for row in rows)]
    found = f"{count} jobs run here" if named else f"no job here is called {job!r}"
    raise InputError("\n  ".join([f"{found}: name one by its HOST:PORT or its folder:", *titles]))


def leaving(here: Sequence[JobProcess], devices: Sequence[int]) -> list[JobProcess]:
    """Return the named devices of a job, or all on this machine. Raises InputError if they cannot leave."""
    ids, title = [row.device for row in here], _title(here)
    if unknown := [device for device in devices if device not in ids]:
        here_are = f"the devices of {title} on this machine are {', '.join(map(str, ids))}"
        raise InputError(f"--device {unknown[0]}: {here_are}; run convoy leave on the machines of the others")
    rows = [row for row in here if not devices or row.device in devices]
    if fixed := [row for row in rows if not row.members]:
        raise InputError(
            f"{_names(fixed)} of {title} cannot leave: it has not begun to train, or the others could not continue without "
            "it (--spare none, a script without convoy.train.Members); `convoy stop` ends the job"
        )
    members = rows[0].members
    if {row.device for row in rows} >= set(members):
        left = f"no device of {title} would be left: its devices are {', '.join(map(str, members))}"
        raise InputError(f"{left}; `convoy stop` ends it")
    return rows


def _signal(rows: Sequence[JobProcess], signum: signal.Signals) -> None:
    for row in rows:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(row.pid, signum)


def _wait_for(rows: Sequence[JobProcess]) -> None:
    processes, wait_s = [], leave_limit(rows)
    for row in rows:
        with suppress(psutil.Error):
            processes.append(psutil.Process(row.pid))
    _, left = psutil.wait_procs(processes, timeout=wait_s)
    if pids := [process.pid for process in left]:
        raise ConvoyError(
            f"{_names([row for row in rows if row.pid in pids])} did not end within {wait_s:g} s: a step takes longer. Wait, "
            f"or end it at once and lose the steps since the last checkpoint: kill -9 {' '.join(map(str, pids))}"
        )


def _names(rows: Sequence[JobProcess]) -> str:
    return " and ".join(f"device {row.device} ({row.kind})" for row in rows)


def _title(rows: Sequence[JobProcess]) -> str:
    run = next((row.run for row in rows if row.run), "")
    return f"job {rows[0].job}" + (f" (run {run})" if run else "")


@app.command()
def demo(
    plan: Annotated[str, option("TEXT", help_of("plan"))] = "data-by-speed",
    epochs: Annotated[int, option("N", help_of("epochs"))] = 16,  # 20 s on the four, 40 s on one
) -> None:
    """Train one CNN on four local processes of unequal speed, then on the fastest of them alone."""
    # The four processes use 0.9 of two cores, and are 2.6 times as fast as the first.
    fleet = f"--plan {plan} --devices 4 --slowdown 3,4,6,8"
    training = f"--batch 480 --epochs {epochs} --lr 0.05 --rebalance --compare --page"
    options = f"--data digits --net two-conv:50:500 {fleet} {training}".split()
    print(f"$ convoy train {' '.join(options)}\n", flush=True)
    sys.argv[1:] = ["train", *options]
    raise typer.Exit(app(args=sys.argv[1:], standalone_mode=False) or 0)


@app.command()
def report(
    run: Annotated[Path | None, argument("RUN", "Folder or log of a run. Default: the latest.", parser=path_of)] = None,
    output: Annotated[Path | None, option("PATH", "HTML file. Default: next to the log.", "--output", "-o")] = None,
) -> None:
    """Write the HTML page of a run.

    It has the curves, throughput with prediction and limit, the plan, one step, and each device. The page needs no network.
    The page of an unfinished run shows its data so far.

    Example: convoy report runs/2026-11-21-19.37.45-two-conv-50-500
    """
    from convoy.report.page import write_report
    from convoy.runlog.directory import runs_folder
    from convoy.runlog.reader import newest_run

    print(f"wrote {write_report(run or newest_run(runs_folder()), output)}")
