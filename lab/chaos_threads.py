"""Chaos inside one process: hundreds of losses in minutes, each reproducible from its seed.

    python -m lab.chaos --inside threads --seed 1 --minutes 10

The devices are threads with machines of their own (see `chaos_machines.py`); meeting, agreement, keeping, going back are
those of processes. What happens is drawn per message (`chaos_drawn.py`): a device is switched off, leaves, falls silent and
wakes up, is slow, or its disk is full, at the n-th time that it speaks to another one after some step: in forward, backward,
keeping, another rendezvous, a test.
"""

import copy
import faulthandler
import gc
import itertools
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convoy.api import distribute
from convoy.checkpoint.checkpoint import Checkpointer
from convoy.comm.environment import ProcessEnv, listen_at
from convoy.comm.group import ChangingGroup
from convoy.comm.job_key import make_key
from convoy.comm.processes import meet
from convoy.elastic.members import JoinOptions, LeftError, Members, StateLostError
from convoy.errors import ConvoyError
from convoy.model.tracing import trace
from convoy.train.controller import Rebalancer
from convoy.train.loop import fit
from lab.chaos import TIGHT, Blow, Case, build, make_net, whole_state
from lab.chaos_disks import faults, with_troubles
from lab.chaos_drawn import drawn, example, plan_of
from lab.chaos_joins import Everybody, Late, Opens, entrance_of, part_of, with_joins
from lab.chaos_machines import Machine, SwitchedOff, machines

TIMEOUT_S, SILENCE_S = 60.0, 3.0
"""Of the groups; longer than for processes, since all of a case share one core."""

DOZE_S, STOP_S = 0.3, 1.6 * SILENCE_S
"""How long a device is silent: nobody is lost, or it is."""

WAIT_S = 0.02
"""Of a slow device, before each message."""

_numbers = itertools.count()


@dataclass
class Fate:
    """The end of one device.

    Attributes:
        ended: "done", "killed", "left", "out" (it was silent, or what is left is not enough), "late" (the training was over
            before it was in), or the error.
        happened: the kinds of what was done to it.
    """

    ended: str = "done"
    happened: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ one device


class Fleet:
    """The devices of a case and their faults."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.fates = [Fate() for _ in range(case.devices + len(case.joins))]
        self.machines: dict[int, Machine] = {}
        self.members: dict[int, Members] = {}
        self.timers: list[threading.Timer] = []
        # Once, before there are threads: torch has one generator for all of them, and who traces a model puts it back.
        torch.manual_seed(case.seed)
        self.net = make_net()
        self.key, self.plan = make_key(), plan_of(case, trace(self.net, example()).graph)
        self.come = [part_of(self.net, case, TIMEOUT_S) for _ in case.joins]
        with listen_at("127.0.0.1", 0) as listener:
            self.port = int(listener.getsockname()[1])
        self.number = next(_numbers)

    def live(self, device: int) -> None:
        """Run one device on its thread."""
        fate = self.fates[device]
        machine = self.machines[device] = Machine(self.key, self._striking(device))
        try:
            self._train(device, machine, fate)
        except SwitchedOff:
            fate.ended = "killed"
        except LeftError:
            fate.ended = "left"
        except Late:
            fate.ended = "late"
        except ConvoyError as error:
            if device >= self.case.devices and not fate.told and self.is_over():
                fate.ended = "late"
                return
            gone = "cannot continue" in str(error) or isinstance(error, StateLostError)
            fate.ended = f"out: {error}" if gone else "".join(traceback.format_exception(error))
        except BaseException as error:
            fate.ended = "".join(traceback.format_exception(error))
        finally:
            if fate.ended != "done":
                self._bury(device, machine)

    def _train(self, device: int, machine: Machine, fate: Fate) -> None:
        case, entrance = self.case, None
        if device < case.devices:
            env = ProcessEnv(device, case.devices, 0, None, "127.0.0.1", self.port, hosted=False, attempt=0)
            group: Any = ChangingGroup(meet(env, torch.device("cpu"), TIMEOUT_S, self.number))
            part = distribute(copy.deepcopy(self.net), self.plan, group, example())
        else:
            join, part = case.joins[device - case.devices], self.come[device - case.devices]
            group, entrance = part.group, (entrance_of(join, machine, self.there, self.is_over), {})
        training, train, test = build(case, part, part)
        others = [] if training.schedule is None else [training.schedule]
        members = self.members[device] = Members(
            part, training.optimizer, others=others, every=case.every, tell=fate.told.append,
            joins=JoinOptions(Everybody() if case.joins else None, entrance=entrance),
        )  # fmt: skip
        keeper = None
        if case.saves is not None:
            keeper = Checkpointer(
                self.folder / "run",
                part,
                training.optimizer,
                every=case.saves,
                schedule=training.schedule,
                tell=lambda line: fate.warned.append(line) if "WARNING" in line else None,
            )
            if entrance is None:
                keeper.begin(False)
        for name in ("start", "agree"):
            setattr(group, name, self._spoken(machine, getattr(group, name)))
        rebalancer = Rebalancer(part, training.optimizer) if case.rebalance else None
        opens = Opens(members) if case.joins else None
        history = fit(training, train, test, case.epochs, opens, rebalancer, keeper, members=members)
        state = members.repeated(lambda: whole_state(part, training.optimizer))
        members.close()
        fate.losses, fate.state = history.losses, state
        fate.accuracies = [each.accuracy for each in history.evaluations]
        group.close()

    def there(self) -> list[Members]:
        rows = list(self.members.items())
        return [m for d, m in rows if self.fates[d].ended == "done" and m.membership and not self.machines[d].is_off]

    def is_over(self) -> bool:
        """Return whether the training is over or no device is left."""
        first = self.fates[: self.case.devices]
        return any(fate.losses for fate in self.fates) or all(fate.ended != "done" for fate in first)

    def _spoken(self, machine: Machine, speak: Callable[..., Any]) -> Callable[..., Any]:
        def spoken(*args: Any, **options: Any) -> Any:
            machine.speaks()
            return speak(*args, **options)

        return spoken

    def _striking(self, device: int) -> Callable[[], None]:
        waiting = sorted((blow for blow in self.case.blows if blow.device == device), key=lambda blow: blow.at)
        calls = 0

        def strike() -> None:
            nonlocal calls
            if not waiting or device not in self.members or self.members[device].steps < waiting[0].at:
                return
            calls += 1
            if calls >= waiting[0].call:
                calls, blow = 0, waiting.pop(0)
                for each in (device, *([] if blow.beside is None else [blow.beside])):
                    self._happen(blow, each)

        return strike

    def _happen(self, blow: Blow, device: int) -> None:
        kind, machine, fate = blow.kind, self.machines[device], self.fates[device]
        if machine.is_off or fate.ended != "done" or fate.losses:
            return
        fate.happened.append(kind)
        match kind:
            case "kill":
                machine.switch_off()
            case "term":
                self.members[device].leave()
            case "stop" | "doze":
                machine.awake.clear()
                self._later(STOP_S if kind == "stop" else DOZE_S, machine.awake.set)
            case "full":
                machine.room_bytes = blow.room_bytes
                self._later(blow.for_s, lambda: setattr(machine, "room_bytes", None))
            case "slow":
                machine.wait_s = WAIT_S
                self._later(blow.for_s, lambda: setattr(machine, "wait_s", 0.0))

    def _later(self, after_s: float, work: Callable[[], object]) -> None:
        timer = threading.Timer(after_s, work)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def _bury(self, device: int, machine: Machine) -> None:
        if machine.is_off and device in self.members and (membership := self.members[device].membership):
            membership._closed.set()
            membership._server.close()
            present: Any = membership.group.present
            present._reported = True
            present.close(ConnectionResetError("switched off"))
        elif device in self.members and (membership := self.members[device].membership):
            membership.depart(ConvoyError("the end of this process"))
        machine.bury()


# ------------------------------------------------------------------------------------------------ all of them


@dataclass
class Found:
    """The result of a case.

    Attributes:
        apart: the largest difference of a survivor from one device.
        short: what is wrong; empty if nothing is.
    """

    events: int
    apart: float
    fates: list[Fate]
    short: str = ""


def alone(case: Case) -> Fate:
    """Run the same training on one device, undisturbed."""
    torch.manual_seed(case.seed)
    training, train, test = build(case, make_net(), None)
    history = fit(training, train, test, case.epochs)
    rows = [each.accuracy for each in history.evaluations]
    return Fate(losses=history.losses, accuracies=rows, state=whole_state(training.model, training.optimizer))


def run(case: Case, limit_s: float = 90.0) -> Found:
    """Run a case on threads and compare it with one device.

    Raises:
        RuntimeError: it did not end in time.
    """
    wanted = alone(case)
    before = {thread.ident for thread in threading.enumerate()}
    memory = Path("/dev/shm")  # where files are on disk at once
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name, machines():
        fleet = Fleet(case, Path(name))
        threads = [
            threading.Thread(target=fleet.live, args=(d,), name=f"device-{d}", daemon=True)
            for d in range(case.devices + len(case.joins))
        ]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + limit_s
        faulthandler.dump_traceback_later(limit_s / 3)  # where they all are, when it takes unusually long
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        faulthandler.cancel_dump_traceback_later()
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(sys.stderr)
            raise RuntimeError(f"{case} did not end within {limit_s:g} s: {[fate.ended for fate in fleet.fates]}")
        for timer in fleet.timers:
            timer.cancel()
        left = _left_behind(before)
        found = judged(fleet.fates, wanted, case.devices)
        if case.saves is not None and not found.short and any(fate.ended == "done" for fate in fleet.fates):
            left = left or faults(Path(name) / "run", case.steps, wanted.state, TIGHT)
    return replace(found, short=found.short or left)


def _left_behind(before: set[int | None]) -> str:
    deadline_s = time.monotonic() + 5.0
    while left := [
        t.name for t in threading.enumerate() if t.ident not in before and not isinstance(t, threading.Timer)
    ]:
        if time.monotonic() > deadline_s:
            return f"threads were left behind: {left}"
        time.sleep(0.01)
    return ""


def judged(fates: list[Fate], wanted: Fate, first: int) -> Found:
    """Compare the survivors with one device; ranks after the first ones joined later."""
    for fate in fates[first:]:
        fate.happened += ["join"] * any(line.startswith("joined as") for line in fate.told)
    events, apart, short = sum(len(fate.happened) for fate in fates), 0.0, ""
    fragile = any("stop" in fate.happened for fate in fates)
    for device, fate in enumerate(fates):
        struck = set(fate.happened)
        allowed = {"done", "left"} if "term" in struck else {"killed"} if "kill" in struck else {"done"}
        allowed |= {"late"} if device >= first and "join" not in struck else set()
        if fate.ended == "done":
            apart = max(apart, difference(fate, wanted, late=device >= first))
        if fate.ended in allowed or (fate.ended.startswith("out: ") and fragile):
            continue
        short = short or f"device {device}, {fate.happened}: {fate.ended}"
    if not any(fate.ended == "done" for fate in fates) and not fragile:
        short = short or "nobody was left"
    return Found(events, apart, fates, short)


def difference(fate: Fate, wanted: Fate, *, late: bool = False) -> float:
    """The largest, relative to the size of what differs (at least 1); infinite where it is of another kind. Who came late knows
    the losses from the beginning of that epoch on."""
    if late and fate.losses:
        wanted = replace(wanted, losses=wanted.losses[-len(fate.losses) :])
    if len(fate.losses) != len(wanted.losses) or fate.state.keys() != wanted.state.keys():
        return float("inf")
    if fate.accuracies != wanted.accuracies:
        return float("inf")
    rows = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(fate.losses, wanted.losses, strict=True)]
    rows += [
        float((fate.state[k] - each).abs().max() / max(1.0, float(each.abs().max())))
        for k, each in wanted.state.items()
    ]
    return max(rows)


# ------------------------------------------------------------------------------------------------ many of them


def many(seed: int, minutes: float, cases: int, *, joins: bool = False, troubles: Sequence[str] = ()) -> str:
    """Draw and run cases; print one line for each and a summary.

    Args:
        joins: devices come, too.
        troubles: what happens, too: "full" disks, "slow" devices.

    Raises:
        SystemExit: some went wrong; their seeds are named.
    """
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # threads that stand for devices wait for each other's messages, not for their turns
    run(drawn(0))  # what is loaded and made once
    until_s, before, kinds, wrong, worst = time.monotonic() + 60 * minutes, resources(), Counter[str](), [], 0.0
    done = unsaved = 0
    for at in range(seed, seed + cases):
        case, start_s = with_joins(drawn(at)) if joins else drawn(at), time.monotonic()
        case = with_troubles(case, troubles) if troubles else case
        found, done = run(case), done + 1
        kinds.update(kind for fate in found.fates for kind in fate.happened)
        worst = max(worst, found.apart)
        unsaved += max(len(fate.warned) for fate in found.fates)
        blows = " ".join(
            f"{blow.kind}:{blow.device}{'' if blow.beside is None else f'+{blow.beside}'}" for blow in case.blows
        )
        blows += "".join(f" join:{join.at}" for join in case.joins)
        ends = (
            ""
            if not found.short
            else f"; WRONG: {case}: {found.short}: {[(fate.ended[-300:], fate.told) for fate in found.fates]}"
        )
        print(
            f"seed {at}: {case.plan} {case.optimizer} on {case.devices}, {blows}: {found.events} events, "
            f"apart {found.apart:.1e}, {time.monotonic() - start_s:.1f} s{ends}",
            flush=True,
        )
        if found.short or not found.apart < TIGHT:
            wrong.append(at)
        if time.monotonic() > until_s or len(wrong) == 10:
            break
    told = f"{done} trainings, {kinds.total()} events ({dict(kinds)}), at most {worst:.1e} apart; "
    told += f"{unsaved} times something could not be written; {before} became {resources()}"
    if wrong:
        raise SystemExit(f"{told}; wrong: seeds {wrong}")
    return told


def resources() -> dict[str, float]:
    """Return memory (MB), open files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }
