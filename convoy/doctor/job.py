"""One examination: of this machine alone, or of all devices of a job together."""

import time
import uuid
from dataclasses import replace

import torch

from convoy.comm.environment import Place
from convoy.comm.processes import within
from convoy.doctor.board import Board, approach
from convoy.doctor.case import Case
from convoy.doctor.facts import CHECKUP, PACE, Checkup, Examination, Finding, Pace, from_text, to_text
from convoy.doctor.link import WallClock
from convoy.doctor.own import addresses_of, check_up
from convoy.doctor.pace import busy_cores, samples_per_s
from convoy.doctor.tour import tour
from convoy.errors import ConvoyError

PACE_LIMIT_S = 20.0
"""For the first convolution of a slow device. Once the others have been waiting so long, it counts as silent."""

LEAVE_S = 2.0
LIMIT_S = 120.0
"""For all that comes after the meeting, on the largest fleets."""


def examine_alone(case: Case) -> Examination:
    """This machine: its processor, and every GPU that torch sees."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    checkups = tuple(replace(check_up(None, name), device=index) for index, name in enumerate(names))
    checkups = tuple(replace(checkup, devices=len(names)) for checkup in checkups)
    busy = busy_cores()
    paces = {checkup.device: Pace(_speed(checkup, 1.0), busy) for checkup in checkups}
    return Examination(len(names), checkups, paces, reports=case.reports)


def examine_job(
    place: Place,
    own: Checkup,
    case: Case,
    wait_s: float,
    *,
    slowdown: float = 1.0,
    wall_ns: WallClock = time.time_ns,
) -> Examination | Finding | None:
    """Examine all devices of a job that come within the time, together. Each device calls it.

    Args:
        own: what this device says of itself.
        wait_s: how long those that are not there yet are waited for.
        slowdown: how many times slower this device plays than it is.
        wall_ns: its clock.

    Returns:
        All facts on device 0; None on the others; and on a device that could not meet the others, what is in the way.
    """
    board = approach(place, wait_s, addresses_of(place.host))
    if isinstance(board, Finding):
        return board
    try:
        # Torch's store waits out of reach of signals, some of it without a limit.
        return within(wait_s + LIMIT_S, lambda: _examine(board, own, case, wait_s, slowdown, wall_ns))
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
        what = f"device {place.device} lost the meeting point {place.host} port {place.port} ({reason})"
        return Finding("error", what, "Its process, or its machine, is gone: see its own output, and start again")
    except ConvoyError as error:
        return Finding("error", str(error), "Then start the doctor again, on all devices at one time")


def _examine(
    board: Board, own: Checkup, case: Case, wait_s: float, slowdown: float, wall_ns: WallClock
) -> Examination | None:
    checkups = tuple(
        replace(from_text(CHECKUP, text, f"device {device}"), device=device)
        for device, text in board.gather("checkup", to_text(CHECKUP, own), wait_s).items()
    )
    token = board.texts.pin("token", uuid.uuid4().hex)
    # Nobody has anything to do now, so what is busy is not the doctor.
    busy = busy_cores()
    pace = Pace(_speed(own, slowdown), busy)
    paces = {
        device: from_text(PACE, text, f"device {device}")
        for device, text in board.gather("pace", to_text(PACE, pace), PACE_LIMIT_S).items()
    }
    links, deaf = tour(board, tuple(each for each in checkups if each.device in paces), token, wall_ns)
    board.leave(LEAVE_S)
    if board.device != 0:
        return None
    reports = (*case.reports, *deaf)
    return Examination(own.devices, checkups, paces, links, wait_s, case.fleet, case.past_samples_per_s, reports)


def _speed(own: Checkup, slowdown: float) -> float:
    if own.on_problem:
        return 0.0
    return samples_per_s(torch.device(own.on), slowdown=slowdown)
