"""Examinations: of this machine alone, of all devices of a job together, and of a fleet over ssh."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from convoy.comm.connection import credentials_of
from convoy.comm.environment import ProcessEnv, is_loopback, is_own
from convoy.comm.store import store_at
from convoy.doctor.exchange import Exchange
from convoy.doctor.facts import (
    CONTEXT,
    FACTS,
    PACE,
    Context,
    DeviceFacts,
    Examination,
    Finding,
    Reach,
    assemble,
    collect_facts,
    from_text,
    measure_pace,
)
from convoy.doctor.links import measure_fleet, try_ways
from convoy.errors import ConvoyError, DeviceLostError, InputError
from convoy.fleet import Fleet
from convoy.launch.fleet import run_on_fleet
from convoy.launch.survey import ask_one
from convoy.machine.accelerator import local_devices
from convoy.machine.process import within

PACE_LIMIT_S = 20.0  # for the first convolution of a slow device; one that takes longer counts as silent
LEAVE_S = 5.0  # how long device 0 waits for the last call of a device that is slow or gone
LIMIT_S = 180.0  # for everything after the meeting, on the largest fleets
SSH_CALLS = 16  # at a time


def examine_alone(context: Context) -> Examination:
    """Examine this machine: its processor, and every GPU that torch sees."""
    *accelerators, cpu = local_devices()
    found = [replace(collect_facts(None, name), device=index) for index, name in enumerate([cpu, *accelerators])]
    paces = {each.device: measure_pace(torch.device(each.info.device)) for each in found}
    return Examination(len(found), tuple(found), paces=paces, reports=context.reports)


def examine_job(
    env: ProcessEnv, own: DeviceFacts, context: Context, wait_s: float, slowdown: float = 1.0
) -> Examination | Finding | None:
    """Examine all devices of a job that come within the time, together. Each device calls it.

    Returns:
        All facts on device 0; None on the others; on a device that could not meet the others, what is in the way.
    """
    place = f"{env.host} port {env.port}"
    try:
        store = store_at(env, time.monotonic() + wait_s, credentials_of(env))
    except (InputError, DeviceLostError) as error:
        itself = " (this machine itself)" if env.device != 0 and is_own(env.host) else ""
        what = f"device {env.device} cannot come to the meeting point {place}{itself}: {error}"
        cure = (
            "MASTER_ADDR must be device 0's address in the network, not a name that leads to 127.0.0.1; open "
            f"the port there (sudo ufw allow {env.port}/tcp), and all from 1024 up for training"
        )
        return Finding("error", what, cure, (f"device {env.device}",))
    exchange = Exchange(store, f"convoy-doctor/{env.attempt}", env.device, tuple(range(env.devices)))
    try:
        # Torch's store waits out of reach of signals, some of it without a limit.
        return within(wait_s + LIMIT_S, lambda: _examine(env, exchange, own, context, wait_s, slowdown))
    except (RuntimeError, TimeoutError, ConvoyError) as error:
        what = f"device {env.device} cannot go on with the others at {place}: {str(error).splitlines()[0]}"
        cure = (
            "See device 0's own output, and start all devices at one time. Where its process lives, full-size packets may be "
            "lost: the MTU must be the same on all hosts and the switch (ip link shows it; 1500 is safe, in tunnels less)"
        )
        return Finding("error", what, cure)


def _examine(
    env: ProcessEnv, exchange: Exchange, own: DeviceFacts, context: Context, wait_s: float, slowdown: float
) -> Examination | None:
    texts = exchange.gather("facts", FACTS.dump_json(own).decode(), wait_s)
    facts = [replace(from_text(FACTS, texts[device], f"device {device}"), device=device) for device in sorted(texts)]
    # No device has work now, so what is busy is not the doctor.
    pace = measure_pace(torch.device(own.info.device), slowdown)
    texts = exchange.gather("pace", PACE.dump_json(pace).decode(), PACE_LIMIT_S)
    paces = {device: from_text(PACE, texts[device], f"device {device}") for device in texts}
    ways = try_ways(exchange, [each for each in facts if each.device in paces])
    found = replace(assemble(env.devices, facts, context), paces=paces, ways=ways)
    reports = [*found.reports, *absent(found, f"{env.host} port {env.port}", wait_s)]
    is_open = all(way.reach is Reach.OPEN for way in ways)
    if is_open and found.reports == context.reports and len(exchange.present) == len(facts) > 1:
        measured, troubles = measure_fleet(env, found)
        found, reports = replace(found, measured=measured), [*reports, *troubles]
    else:
        exchange.leave(LEAVE_S)
    return replace(found, reports=tuple(reports)) if env.device == 0 else None


def absent(found: Examination, at: str, waited_s: float) -> list[Finding]:
    """Report the devices that did not come to the meeting point of device 0."""
    came = [each.device for each in found.facts]
    missing = tuple(found.name(device) for device in range(found.devices) if device not in came)
    address = found.facts[0].info.address
    cure = (
        f"Look at their own output: if they run, it says why they cannot reach {at}. If there is none, start them with "
        f"MASTER_ADDR and MASTER_PORT of that point, or a job of {len(came)} devices"
    )
    if is_loopback(address):
        cure = (
            f"If they are on other machines: {at} leads to {address} on device 0's machine, to itself only. Set MASTER_ADDR "
            "to its address in the network (ip -brief address shows it)"
        )
    what = f"{len(missing)} of {found.devices} devices did not come within {waited_s:g} s: {', '.join(missing)}"
    return [Finding("error", what, cure, missing)] if missing else []


def examine_fleet(fleet: Fleet, json_file: Path | None, wait_s: float) -> tuple[int, tuple[Finding, ...]]:
    """Examine the hosts of a fleet that ssh reaches, together. Device 0 of those prints, with a report of the other hosts.

    Returns:
        The exit status of the examination there, and what kept it from beginning or ending, still to be printed.
    """
    asked = [host for host in fleet.hosts if not is_own(str(host.address))]
    with ThreadPoolExecutor(SSH_CALLS, thread_name_prefix="convoy-doctor-ssh") as pool:
        answers = dict(zip(asked, pool.map(ask_one, asked), strict=True))
    reports = tuple(
        Finding(
            "error", f"{host.name} at {host.address} cannot be used: {reason}", "The others are examined", (host.name,)
        )
        for host, reason in answers.items()
        if isinstance(reason, str)
    )
    without = {name for report in reports for name in report.about}
    kept = [index for index, device in enumerate(fleet.devices) if device.host not in without]
    if not kept:
        return 1, reports
    context = Context(fleet.with_only(kept), reports)
    argv = ["doctor", "--case", CONTEXT.dump_json(context).decode(), "--wait", f"{wait_s:g}"]
    try:
        return run_on_fleet(fleet.with_only(kept), argv if json_file is None else [*argv, "--json", str(json_file)]), ()
    except ConvoyError as error:
        return 1, (*reports, Finding("error", str(error), "The devices that were started have ended; then start again"))
