"""Hours of churn: devices of one job are killed and new ones join, again and again.

    python -m lab.chaos --churn --seed 1 --minutes 60

One device is spared. A line now and then says what it has: memory, open files, threads. These depend on how many devices there
are, so the last line sets the first and the last row with the same number beside each other. The losses of its steps must be
those of one device.
"""

import json
import os
import random
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from convoy.api import distribute, make_plan
from convoy.comm.connection import credentials_of
from convoy.comm.environment import ProcessEnv, listen_at
from convoy.comm.job_key import write_key_file
from convoy.comm.processes import join
from convoy.elastic.entrance import Entrance
from convoy.elastic.members import JoinOptions, Members
from convoy.launch.host_job import device_environments
from convoy.train.loop import fit
from convoy.train.record import StepResult
from lab.chaos import SILENCE_S, TIGHT, TIMEOUT_S, Case, _forked, build, make_net
from lab.chaos_joins import Everybody, Opens, part_of

SPARED, FIRST, MOST = 1, 3, 5
"""The device that is spared, devices at the beginning, and at most."""

BETWEEN = 25
"""Steps from one stroke to the next; some are made before it is written down how many there are."""

COMING = 2
"""So many may be on their way at once."""

PAUSE_S = (0.5, 2.5)
LINE_S = 15.0
STUCK_S = 90.0
COMPARED = 100_000
"""Steps; one device has to make them after the end."""

_ROW = struct.Struct("<qd")


def case_of(seed: int, plan: str) -> Case:
    """Rounding must not grow from step to step: no momentum, and few samples, which the net learns by heart.

    Of 1,600 different ones one device with a weight that is 1e-15 larger had a loss that was 1.3 apart after 16,800 steps.
    Epochs of 200 steps: a history keeps a result of each.
    """
    return Case(seed, FIRST, plan, "sgd-plain", epochs=10**6, samples=1600, distinct=48, pace_s=0.01)


class Told(Opens):
    """An observer that records the spared device's progress."""

    def __init__(self, members: Members, case: Case, folder: Path | None) -> None:
        super().__init__(members)
        self.case, self.folder, self.last_s = case, folder, 0.0

    def on_step_end(self, step: int, samples: int) -> None:
        super().on_step_end(step, samples)
        time.sleep(self.case.pace_s)
        if self.folder is not None and time.monotonic() > self.last_s + 0.2 and self.members.membership is not None:
            self.last_s = time.monotonic()
            told = {"steps": step, "doors": self.members.membership.addresses}
            (self.folder / "part").write_text(json.dumps(told))
            (self.folder / "part").rename(self.folder / "status")

    def on_step(self, result: StepResult) -> None:
        if self.folder is not None:
            with (self.folder / "losses").open("ab") as file:
                file.write(_ROW.pack(result.step, result.loss))


def live(case: Case, folder: Path, doors: list[tuple[str, int]] | None) -> None:
    """Run one device, from the start or joining."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    net, example, entrance, spared = make_net(), torch.zeros(2, 2, 8, 8, dtype=torch.float64), None, False
    if doors is None:
        group = join(timeout_s=TIMEOUT_S)
        spared = group.device == SPARED
        part = distribute(
            net, make_plan(case.plan, net, example, case.batch, group, speeds=[1.0] * FIRST), group, example
        )
    else:
        alone = ProcessEnv(0, 1, 0, 1, "127.0.0.1", 1, hosted=False, attempt=0)
        entrance = Entrance(doors, credentials_of(alone)), {}
        entrance[0].hello(5.0)
        part = part_of(net, case, TIMEOUT_S)
    training, train, test = build(case, part, part)
    members = Members(
        part,
        training.optimizer,
        others=[training.schedule],
        every=case.every,
        joins=JoinOptions(Everybody(), entrance=entrance),
    )
    signal.signal(signal.SIGTERM, lambda *_: members.leave())
    fit(training, train, test, case.epochs, Told(members, case, folder if spared else None), members=members)


@dataclass
class Churn:
    """The processes of one job.

    Attributes:
        wakes_s: when those go on that are stopped.
        rows: at some moments, what the spared device has, behind the number of its connections' other ends.
    """

    case: Case
    folder: Path
    dice: random.Random
    pids: dict[int, int] = field(default_factory=dict)
    wakes_s: dict[int, float] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    struck_at: int = 0

    def begin(self) -> None:
        with listen_at("127.0.0.1", 0) as listener:
            port = int(listener.getsockname()[1])
        rows = device_environments(
            os.environ, range(FIRST), ["cpu"] * FIRST, total=FIRST, address="127.0.0.1", port=port
        )
        for env in rows:
            self._start(lambda: live(self.case, self.folder, None), env)

    def _start(self, work: Callable[[], object], env: Any) -> None:
        number = len(self.events) if not self.pids else max(self.pids) + 1
        self.pids[number] = _forked(work, {**env, **self._key()}, self.folder / f"output-{number}")

    def _key(self) -> dict[str, str]:
        return {"CONVOY_JOB_KEY": str(self.folder / "key")}

    def status(self) -> dict[str, Any]:
        file = self.folder / "status"
        return json.loads(file.read_text()) if file.exists() else {"steps": 0, "doors": []}  # type: ignore[no-any-return]

    def turn(self) -> None:
        """Kill a device, or let another one request to join."""
        doors = [(str(host), int(port)) for host, port in self.status()["doors"]]
        if len(doors) < MOST and (len(doors) < FIRST or self.dice.random() < 0.5):
            if len(self.pids) - len(self.wakes_s) - len(doors) < COMING:
                self._start(lambda: live(self.case, self.folder, doors), {})
                self.events["join"] += 1
            return
        if (steps := self.status()["steps"]) < self.struck_at + BETWEEN:
            return  # two at once may take with them what nobody else has, and there are no checkpoints
        self.struck_at = steps
        awake = [number for number in self.pids if number not in (*self.wakes_s, SPARED)]
        number = self.dice.choice(awake)
        kind = self.dice.choice(("kill",) * 6 + ("term",) * 3 + ("stop",))
        self.events[kind] += 1
        if kind == "stop":
            self.wakes_s[number] = time.monotonic() + 3 * SILENCE_S
        os.kill(self.pids[number], {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[kind])

    def reap(self) -> None:
        for number, until_s in list(self.wakes_s.items()):
            if time.monotonic() > until_s:
                del self.wakes_s[number]
                os.kill(self.pids[number], signal.SIGCONT)
        for number, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[number]
                self.wakes_s.pop(number, None)
        if SPARED not in self.pids:
            told = "".join(f"\ndevice {number}:\n{self.output(number)}" for number in (SPARED, *self.pids))
            raise RuntimeError(f"the device that was spared ended after {dict(self.events)}{told}")

    def output(self, number: int) -> str:
        return (self.folder / f"output-{number}").read_text(errors="replace")[-3000:]

    def line(self, begun_s: float) -> str:
        """Return the resources of the spared device."""
        here = Path(f"/proc/{self.pids[SPARED]}")
        found = {
            "rss_mb": int((here / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "files": len(list((here / "fd").iterdir())), "threads": len(list((here / "task").iterdir())),
        }  # fmt: skip
        told = self.status()
        self.rows.append((len(told["doors"]), found))
        return (
            f"{(time.monotonic() - begun_s) / 60:.1f} minutes: step {told['steps']}, {len(told['doors'])} devices, "
            f"{self.events.total()} events, {found['rss_mb']:.1f} MB, {found['files']} files, {found['threads']} threads"
        )

    def growth(self) -> str:
        """Return the first and last row with the most frequent number of devices, after the first fifth."""
        rows = self.rows[len(self.rows) // 5 :]
        usual = Counter(count for count, _ in rows).most_common(1)[0][0]
        same = [row for count, row in rows if count == usual]
        return f"with {usual} devices: {same[0]} became {same[-1]}"

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()


def compared(case: Case, folder: Path) -> tuple[int, float]:
    """Return how many steps of the spared device were compared, and the largest loss difference."""
    losses = dict(_ROW.iter_unpack((folder / "losses").read_bytes()))
    count = min(COMPARED, max(losses) + 1)

    def alone() -> None:
        torch.set_num_threads(1)
        torch.manual_seed(case.seed)
        training, train, test = build(case, make_net(), None)
        torch.save(fit(training, train, test, -(-count // len(train))).losses, folder / "alone")

    os.waitpid(_forked(alone, {}, folder / "output-alone"), 0)
    wanted = torch.load(folder / "alone")
    return count, max(abs(losses[step] - wanted[step]) / max(1.0, abs(wanted[step])) for step in range(count))


def many(seed: int, minutes: float, plan: str = "model") -> str:
    """Let devices leave and join for the given time; return a summary.

    Raises:
        RuntimeError: it stood still, or the device that was spared ended.
        SystemExit: losses are not those of one device.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_key_file(folder / "key")
        churn = Churn(case_of(seed, plan), folder, random.Random(seed))
        begun_s = moved_s = time.monotonic()
        steps, next_s = -1, begun_s + LINE_S
        try:
            churn.begin()
            while time.monotonic() < begun_s + 60 * minutes:
                time.sleep(churn.dice.uniform(*PAUSE_S))
                churn.reap()
                if (folder / "status").exists():  # it trains
                    churn.turn()
                now_s, told = time.monotonic(), churn.status()["steps"]
                if told != steps:
                    steps, moved_s = told, now_s
                if now_s > moved_s + STUCK_S:
                    outputs = "\n".join(churn.output(number) for number in churn.pids)
                    raise RuntimeError(f"stands still at step {steps} since {STUCK_S:g} s\n{outputs}")
                if now_s > next_s:
                    next_s = now_s + LINE_S
                    print(churn.line(begun_s), flush=True)
        finally:
            churn.end()
        count, apart = compared(churn.case, folder)
        kinds = f"{churn.events.total()} events ({dict(churn.events)})"
        found = f"{steps} steps, {kinds}; losses of {count} steps at most {apart:.1e} apart"
        if not apart < TIGHT:
            raise SystemExit(found)
        return f"{found}; {churn.growth()}" if churn.rows else found
