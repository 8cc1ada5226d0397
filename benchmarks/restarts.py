"""How long a training stands still when a device is killed: Convoy's survivors beside torchrun's restart.

    python -m benchmarks.restarts [--rounds 5] [--net resnet18] [--batch 24] [--devices 3]

The same net, batches and processes of this machine. By turns: Convoy (`convoy run --goes-on`, the step in `members.step()`),
and DistributedDataParallel under `torchrun --max-restarts`, which loads the last of its checkpoints, saved after every step or
after every tenth. A device is killed (SIGKILL) at a random moment, again and again; each time from the kill to the end of the
next step that nobody had finished before. Medians and the longest; what a step takes beside it.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from convoy.model.nets import build_net

WAYS = ("convoy", "torchrun, saved every step", "torchrun, saved every 10th")
IMAGE, CLASSES = (3, 32, 32), 10
SETTLED = 4
"""Steps between a device's beginning, or a loss, and the next kill."""

LIMIT_S = 240.0


# ------------------------------------------------------------------------------------------------ one device


def work(way: str, net: str, batch: int, folder: Path) -> None:
    """Train until somebody ends it, and note when each step was done."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights and data on every device
    marks = (folder / f"marks-{os.getpid()}").open("a")

    def mark(step: int) -> None:
        marks.write(f"{time.time()} {step}\n")
        marks.flush()

    model, data = (
        build_net(net, IMAGE, CLASSES),
        TensorDataset(torch.randn(batch * 8, *IMAGE), torch.randint(CLASSES, (batch * 8,))),
    )
    if way == "convoy":
        _by_convoy(model, data, batch, mark)
    else:
        _by_torchrun(model, data, batch, mark, folder / "saved.pt", 10 if way.endswith("10th") else 1)


def _by_convoy(net: Any, data: TensorDataset, batch: int, mark: Any) -> None:
    import convoy
    from convoy.train import Members

    group = convoy.join()
    example = torch.zeros(2, *IMAGE)
    model = convoy.distribute(
        net, convoy.make_plan("data", net, example, batch, group, speeds=[1.0] * group.devices), group, example
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    members, train = Members(model, optimizer, tell=convoy.print), convoy.loader(data, batch, model)
    while True:
        for x, y in train:
            with members.step() as attempt:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            if attempt.finished:
                mark(members.steps)


def _by_torchrun(net: Any, data: TensorDataset, batch: int, mark: Any, saved: Path, every: int) -> None:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    step = 0
    if saved.exists():
        state = torch.load(saved)
        net.load_state_dict(state["net"])
        step = state["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if saved.exists():
        optimizer.load_state_dict(state["optimizer"])
    own = batch // ranks
    while True:
        first = (step * batch) % len(data) + rank * own
        x, y = data[first : first + own]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % every == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.part")
            Path(f"{saved}.part").rename(saved)
        mark(step)


# ------------------------------------------------------------------------------------------------ and its end


def marks(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """Of each process: when which step was done."""
    found = {}
    for path in folder.glob("marks-*"):
        lines = [line.split() for line in path.read_text().splitlines()[:-1]] + [
            line.split() for line in path.read_text().splitlines(keepends=True)[-1:] if line.endswith("\n")
        ]
        found[int(path.name.partition("-")[2])] = [(float(at_s), int(step)) for at_s, step in lines]
    return found


@contextmanager
def job(way: str, net: str, batch: int, devices: int, folder: Path) -> Iterator[None]:
    """A training that runs meanwhile."""
    worker = [
        "-m",
        "benchmarks.restarts",
        "--worker",
        way,
        "--net",
        net,
        "--batch",
        str(batch),
        "--folder",
        str(folder),
    ]
    if way == "convoy":
        script = folder / "script.py"
        script.write_text("from benchmarks.restarts import main\n\nmain()\n")
        command = [
            sys.executable,
            "-m",
            "convoy",
            "run",
            "--goes-on",
            "--devices",
            ",".join(["cpu"] * devices),
            str(script),
            *worker[2:],
        ]
    else:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices),
            "--max-restarts", "100", *worker,
        ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield
    except BaseException:
        sys.stderr.write((folder / "output").read_text(errors="replace")[-3000:])
        raise
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for pid in [*marks(folder), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def pauses(folder: Path, kills: int, dice: random.Random) -> tuple[list[float], list[float]]:
    """Kill devices of the job one after another: the seconds of each pause, and of steps in between."""
    found, steps, killed = [], [], set[int]()
    for _ in range(kills):
        alive = _settled(folder, killed)
        rows = marks(folder)[min(alive)][-SETTLED:]
        steps += [b - a for (a, _), (b, _) in pairwise(rows)]
        time.sleep(dice.uniform(0.0, 2 * statistics.median(steps)))
        victim = dice.choice(sorted(alive))
        os.kill(victim, signal.SIGKILL)
        start_s = time.time()
        killed.add(victim)
        done = max(step for rows in marks(folder).values() for at_s, step in rows if at_s <= start_s)
        deadline_s = time.monotonic() + LIMIT_S
        while not (
            after := [at_s for rows in marks(folder).values() for at_s, step in rows if step > done and at_s > start_s]
        ):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"nothing went on within {LIMIT_S:g} s")
            time.sleep(0.02)
        found.append(min(after) - start_s)
    return found, steps


def _settled(folder: Path, killed: set[int]) -> set[int]:
    """The processes that train, once they have done a few steps."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        rows = {pid: each for pid, each in marks(folder).items() if pid not in killed and _exists(pid)}
        now_s = time.time()
        if rows and all(len(each) >= SETTLED and now_s - each[-1][0] < 30 for each in rows.values()):
            last = {each[-1][1] for each in rows.values()}
            if max(last) - min(last) <= 1:
                return set(rows)
        time.sleep(0.1)
    raise RuntimeError(f"no steps within {LIMIT_S:g} s")


def _exists(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet18")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--worker")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.worker is not None:
        work(given.worker, given.net, given.batch, given.folder)
        return
    dice, ways = random.Random(0), given.ways.split(";")
    found: dict[str, list[float]] = {way: [] for way in ways}
    steps: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as name, job(way, given.net, given.batch, given.devices, Path(name)):
                paused, between = pauses(Path(name), given.devices - 1, dice)
            found[way] += paused
            steps[way] += between
            print(
                f"{way}: paused {', '.join(f'{s:.2f}' for s in paused)} s; a step {statistics.median(between):.2f} s",
                flush=True,
            )
    for way in ways:
        print(
            f"{way}: {len(found[way])} kills, median {statistics.median(found[way]):.2f} s, worst {max(found[way]):.2f} s; "
            f"a step {statistics.median(steps[way]):.2f} s"
        )


if __name__ == "__main__":
    main()
