"""Kill, stop and end devices of trainings at random moments; compare the results with one undisturbed device.

    python -m lab.chaos --seed 1 --minutes 10

Each training is a small net in float64 (convolutions, batch norm, fully connected layers), with its plan, optimizer and number
of devices drawn from the seed. Its devices are processes of this machine. What happens to them is drawn, too: SIGKILL at the
n-th time after some step that a device speaks to the others: in forward, backward, keeping the state, going back after another
loss, or a test;
SIGSTOP, and SIGCONT later; SIGTERM; the disk for checkpoints and the log is full for a while ("full"; Linux, root); a device
is slow for a while ("slow"). Afterwards losses, weights, statistics of batch norm and optimizer state must be those of
one device, to 1e-10 of their size.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from convoy.api import distribute, loader, make_plan
from convoy.checkpoint import Checkpointer
from convoy.comm.environment import listen_at
from convoy.comm.group import ChangingGroup, Group
from convoy.comm.processes import join
from convoy.elastic.members import Members
from convoy.launch.host_job import device_environments
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage, full_optimizer_state
from convoy.train.controller import Rebalancer
from convoy.train.loop import RateCurve, Recipe, Training, build_schedule, fit
from convoy.train.record import Observer, Observers

PLANS = ("data", "data-by-speed", "sharded", "master", "model", "hybrid")
TIGHT = 1e-10
TIMEOUT_S, SILENCE_S = 30.0, 2.0
"""Of the groups; a device that is silent for so long is lost."""


@dataclass(frozen=True)
class Blow:
    """A fault of one device.

    Attributes:
        kind: what it gets when it has done `at` steps, and then speaks to the others for the `call`-th time: SIGKILL ("kill"),
            SIGSTOP ("stop", and SIGCONT once the others have gone on), or SIGTERM ("term": it leaves). On threads also "doze":
            it is silent for less than the limit. "full": the disk that it writes to is; "slow": it waits at each message, or
            its process is stopped for most of the time, a moment at once.
        beside: a device that the same happens to at that moment; on threads only.
        for_s: how long a disk is full, or a device slow.
        room_bytes: that a full disk still has.
    """

    device: int
    kind: str
    at: int
    call: int = 1
    beside: int | None = None
    for_s: float = 0.0
    room_bytes: int = 0


@dataclass(frozen=True)
class Join:
    """A device's request to join once `at` steps are done; on threads only."""

    at: int


@dataclass(frozen=True)
class Case:
    """One training and its faults."""

    seed: int
    devices: int = 3
    plan: str = "data"
    optimizer: str = "sgd"
    epochs: int = 3
    samples: int = 48
    distinct: int | None = None  # so many samples, again and again; None: all
    batch: int = 8
    every: int = 1
    rebalance: bool = False
    blows: tuple[Blow, ...] = ()
    pace_s: float = 0.0  # of a pass, at least
    schedule: str = "cosine"
    accumulate: int = 1
    clip_norm: float | None = None
    average: bool = False  # of the weights
    saves: int | None = None  # steps from one checkpoint to the next
    joins: tuple[Join, ...] = ()  # of devices that are numbered behind the first ones

    @property
    def steps(self) -> int:
        passes = -(-self.samples // self.batch)
        return self.epochs * -(-passes // self.accumulate)


@dataclass
class Outcome:
    """The result of a case: difference from one device, exit states and messages."""

    apart: float
    statuses: list[int]
    told: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    unsaved: int = 0  # how often it was told that something could not be written


# ------------------------------------------------------------------------------------------------ one training


def make_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(9 * 16, 12), nn.ReLU(), nn.Linear(12, 4),
    )  # fmt: skip
    return net.double()


def make_data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(case.seed)
    distinct = case.distinct or case.samples
    x = torch.randn(distinct, 2, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (distinct,), generator=generator)
    which = torch.arange(case.samples) % distinct
    return TensorDataset(x[which], y[which])


def build(case: Case, model: nn.Module, part: Any) -> tuple[Any, Any, Any]:
    """Return the training and its loaders, for a distributed model (`part`) or an ordinary one."""
    data = make_data(case)
    train = loader(data, case.batch, part, seed=case.seed)
    test = loader(data, case.batch, part, shuffle=False)
    parameters = list(model.parameters())
    if case.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(
            parameters, lr=0.01, eps=1e-4
        )  # a tiny one magnifies rounding
    else:
        momentum = 0.0 if case.optimizer == "sgd-plain" else 0.9
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=momentum, weight_decay=1e-4)
    average = WeightAverage(optimizer, 0.8) if case.average else None
    schedule = build_schedule(optimizer, RateCurve(case.schedule, case.steps, 2, 5, 0.5))
    recipe = Recipe(case.accumulate, case.clip_norm, evaluate_epochs=2)
    return Training(model, optimizer, recipe, schedule, average), train, test


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights, buffers and optimizer state by name; every device calls it."""
    if isinstance(model, Distributed):
        rows = full_optimizer_state(model, optimizer)["state"]
        weights = model.full_state_dict()
    else:
        rows = {key: optimizer.state[p] for key, p in model.named_parameters()}
        weights = model.state_dict()
    state = {
        f"{key}/{name}": torch.as_tensor(v) for key, row in rows.items() for name, v in row.items() if v is not None
    }
    return {key: tensor.detach().clone().double() for key, tensor in {**weights, **state}.items()}


def alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Run the same training on one device, undisturbed."""
    torch.manual_seed(case.seed)
    training, train, test = build(case, make_net(), None)
    history = fit(training, train, test, case.epochs)
    return history.losses, whole_state(training.model, training.optimizer)


DISK = "disk"
"""The folder of checkpoints and the log, which may be full."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def work(case: Case, folder: Path, group: Group | None = None) -> None:
    """Run one device. The lowest surviving rank writes the result."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    group = join(timeout_s=TIMEOUT_S) if group is None else group
    rank = group.device
    net, example = make_net(), torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    speeds = [1.0 + 0.5 * d for d in range(case.devices)]
    plan = make_plan(case.plan, net, example, case.batch, group, speeds=speeds)
    part = distribute(net, plan, group, example)
    training, train, test = build(case, part, part)

    class Marks(Observer):
        """An observer that records that training runs and how long each step took."""

        def __init__(self) -> None:
            self.last_s, self.steps = time.monotonic(), 0
            self.longest: list[tuple[int, float]] = []

        def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
            now_s = time.monotonic()
            if self.steps == 0:
                (folder / f"trains-{rank}").touch()
            elif step:
                self.longest.append((step, now_s - self.last_s))
            self.last_s, self.steps = now_s, self.steps + 1
            with (folder / f"steps-{rank}").open("a") as file:
                file.write(".")
            time.sleep(case.pace_s)

    told: list[str] = []
    warned: list[str] = []
    others = [] if training.schedule is None else [training.schedule]
    members = Members(part, training.optimizer, others=others, every=case.every, tell=told.append)
    marks = Marks()
    for blow in case.blows:
        if blow.device == rank:
            strike(members, blow, folder)
    rebalancer = Rebalancer(part, training.optimizer) if case.rebalance else None
    signal.signal(signal.SIGTERM, lambda *_: members.leave())
    keeper = None
    with ExitStack() as stack:
        observers: list[Observer] = [marks]
        if case.saves is not None:
            keeper = Checkpointer(
                folder / DISK / "run",
                part,
                training.optimizer,
                every=case.saves,
                schedule=training.schedule,
                tell=warned.append,
            )
            keeper.begin(resume=False)
            if rank == 0:
                observers.append(stack.enter_context(RunLog(folder / DISK / "log.jsonl", report=warned.append)))
        history = fit(training, train, test, case.epochs, Observers(*observers), rebalancer, keeper, members=members)
    state = members.repeated(lambda: whole_state(part, training.optimizer))
    members.close()
    if group.device == 0:
        torch.save([history.losses, state], folder / "result.part")
        (folder / "told").write_text(json.dumps([told, marks.longest]))
        (folder / "warned").write_text(json.dumps([rank, warned]))
        (folder / "result.part").rename(folder / "result")


def strike(members: Members, blow: Blow, folder: Path) -> None:
    """Inject the fault into this process at its n-th message after the given number of steps."""
    from lab.chaos_disks import fill  # which stands on this file

    calls = 0

    def counted(name: str) -> Any:
        whole = getattr(ChangingGroup, name)

        def speak(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += members.steps >= blow.at
            if calls == blow.call:
                calls += 1
                if blow.kind == "full":
                    fill(folder / DISK / f"ballast-{blow.device}", blow.room_bytes)
                (folder / f"{blow.kind}-{blow.device}").touch()  # said to who undoes it
                if blow.kind in SIGNALS:
                    os.kill(os.getpid(), SIGNALS[blow.kind])
            return whole(self, *args, **options)

        return speak

    for name in ("start", "agree"):
        setattr(ChangingGroup, name, counted(name))


# ------------------------------------------------------------------------------------------------ and what happens to it


def run(case: Case, limit_s: float = 120.0) -> Outcome:
    """Run a case and compare it with one device.

    Raises:
        RuntimeError: it did not end in time, or left no result.
    """
    from lab.chaos_disks import small_disk  # which stands on this file

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if any(blow.kind == "full" for blow in case.blows):
            stack.enter_context(small_disk(folder / DISK))
        os.waitpid(_forked(lambda: torch.save(alone(case), folder / "alone"), {}, folder / "output-alone"), 0)
        losses, state = torch.load(folder / "alone")
        statuses, outputs = _play(case, folder, limit_s)
        if not (folder / "result").exists():
            raise RuntimeError(f"{case} left no result: {statuses}\n" + "\n".join(outputs))
        outcome = compared(case, folder, losses, state, statuses)
        if case.saves is not None:
            outcome.unsaved = _saved(case, folder, state)
        return outcome


def _saved(case: Case, folder: Path, state: Mapping[str, Tensor]) -> int:
    """Return how many failed writes were reported. RuntimeError: the written files are wrong."""
    from lab.chaos_disks import faults, log_faults

    rank, warned = json.loads((folder / "warned").read_text())
    found = faults(folder / DISK / "run", case.steps, state, TIGHT)
    if not found and rank == 0:
        found = log_faults(folder / DISK / "log.jsonl", case.steps, warned)
    if found:
        raise RuntimeError(f"{case}: {found}\n" + "\n".join(warned))
    return sum("WARNING" in line for line in warned)


def compared(
    case: Case, folder: Path, losses: Sequence[float], state: Mapping[str, Tensor], statuses: list[int]
) -> Outcome:
    """Compare the devices' results in the folder with one device."""
    found, held = torch.load(folder / "result")
    told, longest = json.loads((folder / "told").read_text())
    assert len(found) == len(losses), (case, len(found), len(losses))
    assert held.keys() == state.keys(), (case, held.keys() ^ state.keys())
    apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, losses, strict=True))
    apart = max(
        [apart, *(float((held[k] - state[k]).abs().max() / max(1.0, float(state[k].abs().max()))) for k in state)]
    )
    usual_s = sorted(s for _, s in longest)[len(longest) // 2] if longest else 0.0
    return Outcome(apart, statuses, told, sorted(s - usual_s for _, s in longest)[-max(1, len(told)) :])


def _play(case: Case, folder: Path, limit_s: float) -> tuple[list[int], list[str]]:
    with listen_at("127.0.0.1", 0) as listener:
        port = int(listener.getsockname()[1])
    environments = device_environments(
        os.environ, range(case.devices), ["cpu"] * case.devices, total=case.devices, address="127.0.0.1", port=port
    )
    pids = [_forked(lambda: work(case, folder), env, folder / f"output-{d}") for d, env in enumerate(environments)]
    statuses: dict[int, int] = {}
    try:
        deadline_s = time.monotonic() + limit_s
        begun_s: dict[Blow, float] = {}
        while len(statuses) < case.devices:
            now_s = time.monotonic()
            _reap(pids, statuses)
            for blow in case.blows:
                if blow.device not in statuses and (folder / f"{blow.kind}-{blow.device}").exists():
                    _tend(blow, folder, pids[blow.device], now_s - begun_s.setdefault(blow, now_s))
                elif blow.kind == "full":  # whose device has ended
                    (folder / DISK / f"ballast-{blow.device}").unlink(missing_ok=True)
            if now_s > deadline_s:
                raise RuntimeError(f"{case} did not end within {limit_s:g} s")
            time.sleep(0.01)
    finally:
        for device, pid in enumerate(pids):
            if device not in statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        outputs = [(folder / f"output-{d}").read_text(errors="replace") for d in range(case.devices)]
    return [statuses[d] for d in range(case.devices)], outputs


def _tend(blow: Blow, folder: Path, pid: int, since_s: float) -> None:
    """Return what continues a struck device after its time."""
    if blow.kind == "stop" and since_s > 2.5 * SILENCE_S:
        os.kill(pid, signal.SIGCONT)
    elif blow.kind == "full" and since_s > blow.for_s:
        (folder / DISK / f"ballast-{blow.device}").unlink(missing_ok=True)
    elif blow.kind == "slow":
        goes_on = since_s > blow.for_s or since_s % SLOW_S[1] > SLOW_S[0]
        os.kill(pid, signal.SIGCONT if goes_on else signal.SIGSTOP)


SLOW_S = 0.06, 0.08
"""A slow process is stopped for the first of each of the second."""


def _forked(work_on: Callable[[], object], environment: Mapping[str, str], output: Path) -> int:
    """Fork this process, which has imported torch but never computes: afterwards a fork would be unsafe."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(environment)
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work_on()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(pids: Sequence[int], statuses: dict[int, int]) -> None:
    for device, pid in enumerate(pids):
        if device not in statuses:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[device] = os.waitstatus_to_exitcode(status)


def drawn(seed: int, kinds: Sequence[str] = ("kill",)) -> Case:
    """A case by a seed. One device is spared; one at most falls silent, where two others are left to go on. No two devices
    are struck in one step."""
    dice = random.Random(seed)
    devices = dice.choice((2, 3, 3, 4))
    plan, optimizer = dice.choice(PLANS), dice.choice(("sgd", "adam"))
    struck = dice.sample(range(devices), dice.randint(1, devices - 1))
    steps = sorted(dice.sample(range(1, 17, 2), len(struck)))
    blows: list[Blow] = []
    for device, step in zip(struck, steps, strict=True):
        silent = any(blow.kind == "stop" for blow in blows) or devices - len(blows) < 3
        kind = dice.choice([each for each in kinds if each != "stop" or not silent] or ["kill"])
        blows.append(Blow(device, kind, step, dice.randint(1, 30)))
    every, rebalance = dice.choice((1, 1, 3)), dice.random() < 0.3
    if troubles := [kind for kind in kinds if kind in ("full", "slow")]:
        from lab.chaos_disks import with_troubles  # which stands on this file

        quiet = [blow for blow in blows if blow.kind not in troubles]
        free = [device for device in range(devices) if all(blow.device != device for blow in quiet)]
        case = Case(seed, devices, plan, optimizer, every=every, rebalance=rebalance, blows=tuple(quiet))
        return with_troubles(case, troubles, free)
    return Case(seed, devices, plan, optimizer, every=every, rebalance=rebalance, blows=tuple(blows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--kinds", default="kill", help="comma-separated: kill, stop, term, full, slow")
    parser.add_argument("--inside", default="processes", choices=("processes", "threads", "hosts"))
    parser.add_argument("--joins", action="store_true", help="devices also join; on threads only")
    parser.add_argument("--churn", action="store_true", help="one long job, see chaos_churn.py")
    parser.add_argument("--full", action="store_true", help="disks are temporarily full; on threads only")
    parser.add_argument("--slow", action="store_true", help="devices are temporarily slow; on threads only")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if given.inside == "hosts":
        from lab.chaos_network import many as cut

        print(cut(given.seed, given.minutes))
        return
    if given.churn:
        from lab.chaos_churn import many as churned

        print(churned(given.seed, given.minutes))
        return
    if given.inside == "threads":
        from lab.chaos_threads import many  # which stands on this file

        troubles = ("full",) * given.full + ("slow",) * given.slow
        print(many(given.seed, given.minutes, given.cases, joins=given.joins, troubles=troubles))
        return
    if "full" in kinds:
        from lab.chaos_disks import own_mounts

        own_mounts()
    unsaved = 0
    until_s, events, worst, done = time.monotonic() + 60 * given.minutes, Counter[str](), 0.0, 0
    for seed in range(given.seed, given.seed + given.cases):
        if time.monotonic() > until_s:
            break
        case = drawn(seed, kinds)
        outcome = run(case)
        events.update(blow.kind for blow in case.blows)
        unsaved += outcome.unsaved
        done, worst = done + 1, max(worst, outcome.apart)
        print(
            f"seed {seed}: {case.plan} {case.optimizer} on {case.devices}, every {case.every}, "
            f"{' '.join(f'{blow.kind}:{blow.device}' for blow in case.blows)}, apart {outcome.apart:.1e}, "
            f"{outcome.statuses}, pauses {[round(s, 2) for s in outcome.pauses_s]}"
            + f", {outcome.unsaved} times not written"
            * bool(outcome.unsaved),
            flush=True,
        )
        if not outcome.apart < TIGHT:
            raise SystemExit(f"seed {seed}: {case}: {outcome}")
    print(
        f"{done} trainings, {events.total()} events ({dict(events)}), at most {worst:.1e} apart; "
        f"{unsaved} times something could not be written"
    )


if __name__ == "__main__":
    main()
