"""Measure the cost of encryption and snapshots in a training without failures, predicted and measured.

    python -m benchmarks.standby [--rounds 5] [--net two-conv:50:500] [--batch 128] [--plans data,hybrid]

Two hosts, as network namespaces with cards of 1 Gbit/s (Linux, root), each with one process on a core of its own. Both have two
groups at once, one encrypted and one of a trusted network, and train by each plan, some steps in turn:

    trusted     on the trusted network, no state is kept
    encrypted   no state is kept
    spares      encrypted, and the state is kept as `--spare auto` does

Ratios are medians over the rounds, each of neighbours in time. Predictions are by what the same processes measured first: for
encryption, the step with and without the seconds per byte that it is described with; for spares, what `convoy plan` says.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.quiet import others_share
from convoy.api import distribute, loader, make_plans
from convoy.comm.group import Group
from convoy.comm.job_key import KEY_FILE, TRUST, write_key_file
from convoy.comm.processes import join
from convoy.elastic.members import Members
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.measure.device_info import read_usage
from convoy.model.graph import Graph
from convoy.model.nets import build_net
from convoy.plan.plan import Plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import SparePrice, predict_plan, spare_price
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import ENCRYPTION_S_PER_BYTE
from convoy.simulate.table import Measurement

GIGABIT = Nic(125e6, 125e6, 5e-5)
HOSTS = ("a", "b")
IMAGE, CLASSES = (3, 32, 32), 10
STRETCH_S = 2.0
"""So long, about, a way has its turn; in whole periods of keeping."""

TIMEOUT_S = 200.0
"""A host may be silent for a twentieth of it before it counts as lost."""

MODES = ("trusted", "encrypted", "spares")


def predicted(measured: Measurement, graph: Graph, batch: int, name: str) -> tuple[Plan, float, float, SparePrice]:
    """Predict a named plan: step seconds, encryption factor and snapshot cost."""
    costs, fleet = measured.costs(graph), measured.fleet
    context = PlanRequest(graph, batch, FleetKnowledge(fleet, given=costs))
    plan = context.named(name)
    row = predict_plan(plan, context)

    def step_s(more_s: float) -> float:
        """Add seconds per byte sent or received compared with a trusted network."""
        bare = (max(0.0, each - ENCRYPTION_S_PER_BYTE) for each in costs.network.processor_s_per_byte)
        network = replace(costs.network, processor_s_per_byte=tuple(each + more_s for each in bare))
        return predict_plan(
            plan, PlanRequest(graph, batch, FleetKnowledge(fleet, given=replace(costs, network=network)))
        ).step_s

    return plan, row.step_s, step_s(ENCRYPTION_S_PER_BYTE) / step_s(0.0), spare_price(row, context)


class Training:
    """A model that trains by a plan, some steps per turn.

    Args:
        every: steps from one kept state to the next; None: none is kept.
    """

    def __init__(self, net: str, batch: int, plan: Plan, every: int | None, group: Group) -> None:
        self.model = distribute(build_net(net, IMAGE, CLASSES, 0), plan, group, torch.zeros(1, *IMAGE))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        own = torch.Generator().manual_seed(1)
        x, y = torch.randn(4 * batch, *IMAGE, generator=own), torch.randint(CLASSES, (4 * batch,), generator=own)
        self.batches = _endless(loader(TensorDataset(x, y), batch, self.model))
        self.members = None if every is None else Members(self.model, self.optimizer, every=every)
        if self.members is not None:
            self.members.begin()

    def run(self, count: int) -> float:
        """Return the seconds of each step."""
        self.model.group.agree("begin", "")
        start_s = time.perf_counter()
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.members is not None:
                self.members.after_step()
        self.model.group.agree("end", "")
        return (time.perf_counter() - start_s) / count

    def close(self) -> None:
        if self.members is not None:
            self.members.finish()
            self.members.close()


def _endless(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


def work(net: str, batch: int, names: list[str], rounds: int, budget_s: float) -> None:
    """Run one host; the first one prints."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        encrypted = stack.enter_context(join("cpu", timeout_s=TIMEOUT_S))
        os.environ[TRUST], os.environ["MASTER_PORT"] = "1", os.environ["OTHER_PORT"]
        del os.environ[KEY_FILE]
        trusted = stack.enter_context(join("cpu", timeout_s=TIMEOUT_S))
        plans = make_plans(
            build_net(net, IMAGE, CLASSES, 0), torch.zeros(1, *IMAGE), batch, encrypted, budget_s=budget_s
        )
        assert plans.request.fleet.measured is not None
        for name in names:
            probe = distribute(build_net(net, IMAGE, CLASSES, 0), plans[0], encrypted, torch.zeros(1, *IMAGE))
            plan, step_s, dearer, price = predicted(plans.request.fleet.measured, probe.traced[True].graph, batch, name)
            made = {"trusted": (None, trusted), "encrypted": (None, encrypted), "spares": (price.every, encrypted)}
            ways = {mode: Training(net, batch, plan, *made[mode]) for mode in MODES}
            first_s = {mode: way.run(3) for mode, way in ways.items()}["encrypted"]  # memory is new
            turn_s = float(encrypted.agree("how long a turn is", str(first_s))[0]) * price.every
            periods = max(1, round(STRETCH_S / turn_s))
            begin, found = read_usage(), {mode: list[float]() for mode in MODES}
            for number in range(rounds):
                for mode in MODES if number % 2 else reversed(MODES):
                    found[mode].append(ways[mode].run(periods * price.every))
            others = others_share(encrypted, begin)
            if encrypted.device == 0:
                print_overheads(name, step_s, dearer, price, found, others)
            for way in ways.values():
                way.close()


def print_overheads(
    name: str, step_s: float, dearer: float, price: SparePrice, found: dict[str, list[float]], others: float
) -> None:
    median = {mode: statistics.median(rows) for mode, rows in found.items()}
    print(
        f"{name}: a step {median['encrypted']:.4f} s (predicted {step_s:.4f}); others had {others:.0%} of the processors"
    )
    for mode, base, expected in (("encrypted", "trusted", dearer), ("spares", "encrypted", 1 + price.part)):
        ratios = sorted(a / b for a, b in zip(found[mode], found[base], strict=True))
        print(
            f"  {mode} / {base}: {statistics.median(ratios):.4f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), predicted "
            f"{expected:.4f}" + (f"; the state after every {price.every} steps" if mode == "spares" else "")
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="two-conv:50:500")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--plans", default="data,hybrid")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=10.0, help="measuring time in seconds")
    parser.add_argument("--limit", type=float, default=300.0, help="time limit in seconds")
    given = parser.parse_args()
    if "RANK" in os.environ:
        work(given.net, given.batch, given.plans.split(","), given.rounds, given.budget)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed all the same
    wiring, cores = namespaces.wire(RunName.mine(), HOSTS), sorted(os.sched_getaffinity(0))
    fleet = Fleet(
        tuple(Host(host) for host in HOSTS), tuple(Device(f"{host}-cpu", host, "cpu", None) for host in HOSTS), GIGABIT
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(namespaces.network(wiring))
        namespaces.shape(wiring, lambda _: GIGABIT)
        write_key_file(folder / "key")
        (folder / "fleet.toml").write_text(fleet.to_toml())
        own = {
            "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": wiring.ports[0].address, "MASTER_PORT": "29611",
            "OTHER_PORT": "29612", KEY_FILE: str(folder / "key"), "CONVOY_FLEET": str(folder / "fleet.toml"),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        processes = []
        for rank, port in enumerate(wiring.ports):
            command = ["ip", "netns", "exec", port.namespace, sys.executable, "-m", "benchmarks.standby", *sys.argv[1:]]
            pinned = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
            processes.append(subprocess.Popen(pinned, env=os.environ | own | {"RANK": str(rank)}))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        until_s = time.monotonic() + given.limit
        statuses = [process.wait(max(0.1, until_s - time.monotonic())) for process in processes]
    if any(statuses):
        raise SystemExit(f"the hosts ended with {json.dumps(statuses)}")


if __name__ == "__main__":
    main()
