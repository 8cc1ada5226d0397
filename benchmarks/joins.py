"""Measure how long training pauses when a device joins or leaves, compared with an ordinary step.

    python -m benchmarks.joins [--rounds 3] [--net two-conv:50:500] [--batch 480] [--plan data-by-speed] [--comes 2]

Hosts are network namespaces with cards of 1 Gbit/s (Linux, root), each with one device on a core of its own as far as there are
cores. `convoy train --listen` runs on the first, one `convoy join` after another comes from the others, and then they leave
(SIGTERM). From the run's log: the longest time between the ends of two steps around each change, and the ordinary step before
and after it (median of ten). What the change itself took is the longest without an ordinary step.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from convoy.comm.job_key import write_key_file
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from convoy.fleet import Nic

GIGABIT = Nic(125e6, 125e6, 5e-5)
PORT = 7000
BESIDE = 10
"""Steps before and after a change, of which the ordinary one is the median."""

LIMIT_S = 90.0
"""For a device to come in, or to go."""

RUN = ["--data", "digits", "--epochs", "100000", "--evaluate-epochs", "100000", "--no-rebalance", "--timeout", "60"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the devices of a run.

    Attributes:
        what: in words, by the log.
        gap_s: the longest time between the ends of two steps around it.
        before_s, after_s: an ordinary step.
    """

    what: str
    gap_s: float
    before_s: float
    after_s: float

    @property
    def stall_s(self) -> float:
        return self.gap_s - self.after_s

    @property
    def steps(self) -> float:
        """Return the duration of the change in steps before it."""
        return self.stall_s / self.before_s


def changes(log: Path) -> list[Change]:
    """Return the changes of a run that are followed by enough steps."""
    ends, found = dict[int, float](), []
    rows = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    for row in rows:
        if row["what"] == "step":
            ends[row["step"]] = row["s"]
    durations = {after: ends[after] - ends[before] for before, after in pairwise(sorted(ends))}
    for row in rows:
        if row["what"] != "members":
            continue
        at = row["step"]  # of steps that are done: the next one has this number
        before = [durations[k] for k in range(at - BESIDE - 2, at - 2) if k in durations]
        after = [durations[k] for k in range(at + 3, at + 3 + BESIDE) if k in durations]
        if before and len(after) == BESIDE:
            gap_s = max(durations[k] for k in range(at - 2, at + 3) if k in durations)
            found.append(Change(row["reason"], gap_s, statistics.median(before), statistics.median(after)))
    return found


@contextmanager
def started(command: Sequence[str], namespace: str, core: int, output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process on a host and a core; end it with the context."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    with output.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), "ip", "netns", "exec", namespace, *command], stdout=out, stderr=out, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


def until(log: Path, count: int, what: str, outputs: Sequence[Path]) -> None:
    """Wait until the run has changed `count` times and has continued.

    Raises:
        RuntimeError: it has not.
    """
    deadline_s = time.monotonic() + LIMIT_S
    while not log.exists() or len(changes(log)) < count:
        if time.monotonic() > deadline_s:
            shown = "\n".join(path.read_text(errors="replace")[-2000:] for path in outputs if path.exists())
            raise RuntimeError(f"{what}: not within {LIMIT_S:g} s\n{shown}")
        time.sleep(0.1)


def run(wiring: namespaces.Wiring, folder: Path, options: Sequence[str], comes: int) -> list[Change]:
    """Run one job whose devices join and leave."""
    convoy, key, log = [sys.executable, "-m", "convoy"], folder / "key", folder / "log.jsonl"
    first, *others = wiring.ports
    outputs = [folder / f"output-{port.host}" for port in wiring.ports]
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        listen = ["--listen", f"{first.address}:{PORT}", "--job-key", str(key), "--devices", "cpu", "--log", str(log)]
        command = [*convoy, "train", *RUN, *options, *listen]
        training = stack.enter_context(started(command, first.namespace, cores[0], outputs[0]))
        came = []
        deadline_s = time.monotonic() + LIMIT_S
        while not log.exists() or log.read_text().count('"step"') <= BESIDE + 5:
            if training.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"it does not train:\n{outputs[0].read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        for number, port in enumerate(others[:comes], start=1):
            join = [*convoy, "join", f"{first.address}:{PORT}", "--job-key", str(key), "--device", "cpu"]
            core = cores[number % len(cores)]
            came.append(stack.enter_context(started(join, port.namespace, core, outputs[number])))
            until(log, number, f"{port.host} joins", outputs)
        for number, process in enumerate(reversed(came), start=len(came) + 1):
            process.terminate()
            until(log, number, "one leaves", outputs)
        return changes(log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--net", default="two-conv:50:500")
    parser.add_argument("--batch", type=int, default=480)
    parser.add_argument("--plan", default="data-by-speed")
    parser.add_argument("--spare", default="auto")
    parser.add_argument("--also", default="", help="more training options, such as '--ema 0.99 --accumulate 2'")
    parser.add_argument("--comes", type=int, default=2, help="devices that join, one after another")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed all the same
    options = ["--net", given.net, "--batch", str(given.batch), "--plan", given.plan, "--spare", given.spare]
    options += shlex.split(given.also)
    found: list[Change] = []
    for _ in range(given.rounds):
        wiring = namespaces.wire(RunName.mine(), [f"h{n}" for n in range(given.comes + 1)])
        with namespaces.network(wiring), tempfile.TemporaryDirectory() as name:
            namespaces.shape(wiring, lambda _: GIGABIT)
            write_key_file(Path(name) / "key")
            for change in run(wiring, Path(name), options, given.comes):
                found.append(change)
                print(
                    f"{change.what}: longest {change.gap_s:.3f} s, a step {change.before_s:.3f} s before and "
                    f"{change.after_s:.3f} s after: {change.stall_s:.3f} s, {change.steps:.2f} steps",
                    flush=True,
                )
    for word, rows in (
        ("join", [c for c in found if "joined" in c.what]),
        ("leave", [c for c in found if "left" in c.what]),
    ):
        if rows:
            stalls, steps = [c.stall_s for c in rows], [c.steps for c in rows]
            print(
                f"{word}: {len(rows)}, median {statistics.median(stalls):.3f} s, worst {max(stalls):.3f} s; "
                f"in steps {statistics.median(steps):.2f}, worst {max(steps):.2f}"
            )


if __name__ == "__main__":
    main()
