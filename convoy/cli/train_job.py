"""Starts `convoy train` on one device, at the start of a job or joining a running one."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from convoy.checkpoint.checkpoint import check_resume
from convoy.cli.joining import Invitation, device_named, run_of
from convoy.cli.train_parts import compare_with_one_device
from convoy.cli.train_session import Job, train_job
from convoy.comm.control_messages import difference, from_first, gather
from convoy.comm.group import AloneGroup, ChangingGroup
from convoy.comm.processes import join, own_device
from convoy.config.checks import check, check_outputs
from convoy.config.run_file import RunSettings
from convoy.config.train_options import Settings, key_of
from convoy.elastic.entrance import greet
from convoy.elastic.regroup import home_at
from convoy.errors import MismatchError
from convoy.machine import roster
from convoy.machine.accelerator import limit_memory, set_modes
from convoy.machine.process import watch_parent
from convoy.report.screen import Screen
from convoy.runlog.directory import check_directory


def run_device(run: RunSettings) -> None:
    """Train as one of a job's first devices."""
    settings = run.settings
    _prepare(settings)
    with ExitStack() as stack:
        group = stack.enter_context(join(device_named(settings.device_names), timeout_s=settings.timeout_s))
        if settings.listen is not None and group.devices == 1:
            group = ChangingGroup(group)
        screen = Screen(visible=group.device == 0)
        rows = gather(group, "settings", settings.decisive)
        for name in rows[0]:
            if found := difference([row[name] for row in rows]):
                raise MismatchError(
                    f"the devices were started with different options: --{key_of(name)} is {found}; start every device with "
                    "the same options"
                )
        if settings.listens_at is not None:
            home_at(*settings.listens_at, group)  # refuse a wrong address before anything takes long
        if settings.memory is not None:
            limit_memory(group.torch_device, settings.memory[min(group.device, len(settings.memory) - 1)])
        if group.device == 0:
            check_outputs(settings)
            check_directory(settings)
            if settings.explain:
                screen.settings(run.rows())
        if (folder := settings.checkpoint) is not None:
            begins = partial(check_resume, folder, settings.resume, settings.lasting, settings.epochs)
            from_first(group, "checkpoint: to resume", begins)
        done = train_job(Job(run, group, screen, stack))
    if not screen.visible:
        return
    if settings.compare:  # after the group is closed: the other devices need not wait
        compare_with_one_device(settings, done, screen)
    if done.directory is not None:
        folder = done.directory.run
        page = f"convoy report {shlex.quote(str(folder))}"
        if settings.page:
            from convoy.report.page import write_report  # imports jinja2, which only a page needs

            page = str(write_report(folder))
        screen.line(f"A page of this run: {page}")


def run_joining_device(
    addresses: Sequence[tuple[str, int]], device: str | None, own: Mapping[str, Any], accepted: Collection[str] = ()
) -> None:
    """Join a running training at one of these addresses. `own` and `accepted` are as in `run_of`."""
    watch_parent()
    entrance, offer = greet(addresses)
    run = run_of(offer, {"devices": device or "auto", **own}, accepted)
    settings = run.settings
    _prepare(settings)
    torch_device = own_device(device_named(settings.device_names), 0)
    roster.enter(str(offer["job"]), 0, str(torch_device))
    with ExitStack() as stack:
        group = stack.enter_context(ChangingGroup(AloneGroup(torch_device, settings.timeout_s)))
        train_job(Job(run, group, Screen(visible=False), stack, Invitation(entrance, offer)))


def _prepare(settings: Settings) -> None:
    check(settings)
    set_modes(settings.tf32, settings.deterministic)
    torch.manual_seed(settings.seed)
