"""Measure how long training pauses when a device is killed: Convoy's recovery, torchrun's restart and torchft.

    python -m benchmarks.restarts [--rounds 3] [--net resnet18:16] [--batch 24] [--devices 3] [--ways convoy,torchrun-1]

The same net and batches, on processes of this machine, by turns:

    convoy           `convoy run --goes-on`, the step in `members.step()`: those that are left go on
    torchrun-1       DistributedDataParallel, one agent with all devices (`--standalone --max-restarts`), which starts all of
                     them again, the killed one too; they load the last checkpoint, saved after every step by the first
    torchrun-10      the same, saved after every tenth step
    torchrun-hosts   an agent per device, as on separate machines. The agent of the killed device is killed too; the others
                     continue from the checkpoint of every step (in a shared folder)
    torchft          replica groups of one device over gloo; needs `--torchft PYTHON`, where torchft is installed

A device is repeatedly killed (SIGKILL) at a random moment. A pause lasts from the kill to the end of the next new step. Prints
the median and the longest pause, and the time of an ordinary step. The other systems are set up for short pauses: see
`SETTINGS`.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torch.distributed import TCPStore

from convoy.comm.environment import listen_at

WAYS = ("convoy", "torchrun-1", "torchrun-10", "torchrun-hosts", "torchft")
SETTLED = 4
"""Steps between a device's beginning, or a loss, and the next kill."""

LIMIT_S = 90.0
"""For a job to begin, and to go on after a kill."""

AGENT = (
    "-m",
    "torch.distributed.run",
    "--max-restarts",
    "100",
    "--monitor-interval",
    "0.1",
    "--local-addr",
    "127.0.0.1",
)
RENDEZVOUS = "is_host=false,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
LIGHTHOUSE = (
    "--min_replicas",
    "1",
    "--join_timeout_ms",
    "500",
    "--quorum_tick_ms",
    "20",
    "--heartbeat_timeout_ms",
    "1000",
)
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SETTINGS = (AGENT, RENDEZVOUS, OWN_STORE, LIGHTHOUSE)
"""torchrun looks at its workers every 0.1 s; an agent that says nothing for 3 s is gone (default: 15 s), and who has come to a
meeting waits 1 s for more (30 s; whole seconds only). The agents meet at a store that is none of theirs, so any of them may be
lost. Workers that start again do not use their agent's store (pytorch#135712): there they find gloo's addresses of those
that were ended, and never get beyond `init_process_group`. torchft's lighthouse takes a replica for dead after 1 s of silence
(5 s), and looks 50 times in a second (10 times)."""


# ------------------------------------------------------------------------------------------------ a job


@dataclass
class Job:
    """A training that runs in the background.

    Attributes:
        groups: of processes that began it, to be ended with it.
        kills_parents: whoever started a device is lost with it.
    """

    folder: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    kills_parents: bool = False

    def start(self, command: Sequence[str], **variables: str) -> None:
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with (self.folder / "output").open("ab") as out:
            self.processes.append(
                subprocess.Popen(
                    command, stdout=out, stderr=out, env=os.environ | own | variables, start_new_session=True
                )
            )

    def strike(self, device: int) -> None:
        parent = _parent(device) if self.kills_parents else None
        if parent is not None:
            os.kill(parent, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may end with its parent
            os.kill(device, signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(5)
        for pid in [*marks(self.folder), *(process.pid for process in self.processes)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def job(way: str, net: str, batch: int, devices: int, folder: Path, torchft: str) -> Iterator[Job]:
    """Start a training in the background."""
    every = "save 10" if way == "torchrun-10" else "save 1"
    worker = ("benchmarks.restarts_worker", way if way in ("convoy", "torchft") else every)
    arguments = (net, str(batch), str(devices), str(folder))
    found, python = Job(folder), sys.executable
    with ExitStack() as stack:
        stack.callback(found.end)
        if way == "convoy":
            script = folder / "script.py"
            script.write_text('import runpy\n\nrunpy.run_module("benchmarks.restarts_worker", run_name="__main__")\n')
            names = ",".join(["cpu"] * devices)
            found.start(
                [python, "-m", "convoy", "run", "--goes-on", "--devices", names, str(script), worker[1], *arguments]
            )
        elif way == "torchft":
            port = _free_port()
            bin_folder = Path(torchft).parent
            found.start([str(bin_folder / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", *LIGHTHOUSE])
            for replica in range(devices):
                place = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "REPLICA": str(replica)}
                found.start([torchft, "-m", *worker, *arguments], **place)
        elif way == "torchrun-hosts":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            found.kills_parents = True
            meeting = ("--rdzv-backend", "c10d", "--rdzv-id", "restarts", "--rdzv-endpoint", f"127.0.0.1:{store.port}")
            fleet = ("--nnodes", f"1:{devices}", "--nproc-per-node", "1", "--rdzv-conf", RENDEZVOUS)
            for _ in range(devices):
                found.start([python, *AGENT, *meeting, *fleet, "-m", *worker, *arguments], **OWN_STORE)
        else:
            all_here = ("--standalone", "--nproc-per-node", str(devices))
            found.start([python, *AGENT, *all_here, "-m", *worker, *arguments], **OWN_STORE)
        try:
            yield found
        except BaseException:
            sys.stderr.write((folder / "output").read_text(errors="replace")[-3000:])
            raise


def _free_port() -> int:
    with listen_at("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


# ------------------------------------------------------------------------------------------------ and what happens to it


def marks(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """Read from each process when it completed each step."""
    found = {}
    for path in folder.glob("marks-*"):
        whole = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name.partition("-")[2])] = [(float(at_s), int(step)) for at_s, step in whole]
    return found


def pauses(job: Job, kills: int, dice: random.Random) -> tuple[list[float], list[float]]:
    """Kill devices of the job one after another; return the seconds of each pause and of the steps in between."""
    found, steps, folder, killed, since_s = [], [], job.folder, set[int](), 0.0
    for _ in range(kills):
        alive = _settled(folder, killed, since_s)
        rows = marks(folder)[min(alive)][-SETTLED:]
        steps += [b - a for (a, _), (b, _) in pairwise(rows)]
        time.sleep(dice.uniform(0.0, 2 * statistics.median(steps)))
        victim = dice.choice(sorted(alive))
        job.strike(victim)
        since_s = time.time()
        killed.add(victim)
        done = max(step for rows in marks(folder).values() for at_s, step in rows if at_s <= since_s)
        found.append(_went_on(folder, done, since_s) - since_s)
    return found, steps


def _went_on(folder: Path, done: int, since_s: float) -> float:
    """Return when the first step after `done` was completed."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        ends = [at_s for rows in marks(folder).values() for at_s, step in rows if step > done and at_s > since_s]
        if ends:
            return min(ends)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing went on within {LIMIT_S:g} s")
        time.sleep(0.02)


def _settled(folder: Path, killed: set[int], since_s: float) -> set[int]:
    """Return the training processes once each has completed a few steps."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        rows = {pid: each for pid, each in marks(folder).items() if pid not in killed and _parent(pid) is not None}
        new = [[step for at_s, step in each if at_s > since_s] for each in rows.values()]
        if new and all(len(each) >= SETTLED for each in new):
            last = {each[-1] for each in new}
            if max(last) - min(last) <= 1:
                return set(rows)
        time.sleep(0.1)
    raise RuntimeError(f"no {SETTLED} steps within {LIMIT_S:g} s")


def _parent(pid: int) -> int | None:
    """Return the parent of a live process."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def report_line(way: str, paused_s: Sequence[float], steps_s: Sequence[float]) -> str:
    return (
        f"{way}: {len(paused_s)} kills, median {statistics.median(paused_s):.2f} s, worst {max(paused_s):.2f} s; "
        f"a step {statistics.median(steps_s):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet18:16")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=None, help=f"of {','.join(WAYS)}")
    parser.add_argument("--torchft", default="", help="a Python with torchft and Convoy's dependencies")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the jobs end with it
    ways = given.ways.split(",") if given.ways else [way for way in WAYS if way != "torchft" or given.torchft]
    dice = random.Random(0)
    found: Mapping[str, list[float]] = {way: [] for way in ways}
    steps: Mapping[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.rounds):
        for way in ways:
            try:
                with (
                    tempfile.TemporaryDirectory() as name,
                    job(way, given.net, given.batch, given.devices, Path(name), given.torchft) as running,
                ):
                    paused, between = pauses(running, given.devices - 1, dice)
            except RuntimeError as error:  # the others are measured all the same
                print(f"{way}: {error}", flush=True)
                continue
            found[way].extend(paused)
            steps[way].extend(between)
            print(f"{way}: paused {', '.join(f'{s:.2f}' for s in paused)} s", flush=True)
    for way in (way for way in ways if found[way]):
        print(report_line(way, found[way], steps[way]))


if __name__ == "__main__":
    main()
