"""Measure Convoy's time per step beyond layer arithmetic and communication.

    python -m benchmarks.overhead [--results FILE]

One device, one thread, the same steps (loss, backward, SGD with momentum) in plain PyTorch and in Convoy, in turns: alone, with
all layers as one fused stretch (`convoy.plan.compile`); shared, as one of two devices that share a batch of twice the size by
`data-by-speed`, with everything but the wire (batch norms over both devices, gradients joined, summed and given back).
The file also has what `convoy measure` finds for this machine: the seconds that predictions charge.
Writes results/overhead.json.
"""

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.hardware import stamp
from benchmarks.score import middle_spread
from convoy.comm.group import AloneGroup, Arrived, Group, Message, Pending, closed_error
from convoy.files import write_whole
from convoy.launch.host_job import memory_environment
from convoy.measure.overhead_probe import measure_overheads
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed

RESULTS = Path(__file__).parent / "results" / "overhead.json"
COMMAND = "python -m benchmarks.overhead"
CASES = (
    ("two-conv:50:500", (1, 28, 28), 16),
    ("resnet:8:16", (3, 32, 32), 2),
    ("resnet:8:16", (3, 32, 32), 64),
    ("resnet18:64", (3, 32, 32), 64),
    ("vgg:11:512", (3, 32, 32), 16),
)
"""Net, image, batch: from layers that take long to a step that is nearly all calls."""

WAYS = ("plain", "alone", "shared")


class SilentPeer(Group):
    """A group of two without a real peer: its messages are zeros that arrive at once."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"), 60.0)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        for message in self._admit(sends, receives, lane)[1]:
            message.tensor.zero_()
        return Arrived()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:  # noqa: ARG002
        return (text, text)

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self.failure = self.failure or closed_error()


WARM = 5  # steps


def steps_of(net: str, image: tuple[int, int, int], batch: int) -> dict[str, Callable[[], float]]:
    """Return a training step per variant on random numbers; each returns the loss."""
    plain = build_net(net, image, 10)
    x, y = torch.randn(batch, *image), torch.randint(0, 10, (batch,))
    graph = trace(plain, x[:1]).graph
    models: dict[str, nn.Module] = {"plain": plain}
    for way, devices in (("alone", 1), ("shared", 2)):
        plan = named_plan("data-by-speed", graph, devices * batch, Speeds((1.0,) * devices))
        group = AloneGroup(torch.device("cpu")) if devices == 1 else SilentPeer()
        part = Distributed(copy.deepcopy(plain), plan, group, x[:1])
        part.announce(devices * batch)
        models[way] = part
    targets = {way: torch.cat([y, y]) if way == "shared" else y for way in models}
    return {way: _step(model, x, targets[way]) for way, model in models.items()}


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> float:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def in_turns(steps: dict[str, Callable[[], float]], rounds: int, round_s: float) -> dict[str, list[float]]:
    """Return step seconds per variant, one number per round; the variants alternate within a round.

    Raises:
        AssertionError: the losses of the first steps differ, so that they are not the same training.
    """
    first = {way: [step() for _ in range(WARM)] for way, step in steps.items()}
    torch.testing.assert_close(torch.tensor(first["alone"]), torch.tensor(first["plain"]), rtol=1e-4, atol=1e-5)
    found: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            start_s, count = time.perf_counter(), 0
            while time.perf_counter() - start_s < round_s or not count:
                step()
                count += 1
            found[way].append((time.perf_counter() - start_s) / count)
    return found


def main(
    results: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns per variant.")] = 9,
    round_s: Annotated[float, typer.Option(help="Seconds of a turn.")] = 0.7,
) -> None:
    """Time all cases, write the results, print a table."""
    torch.set_num_threads(1)
    memory = memory_environment(os.environ)
    if not memory.items() <= os.environ.items():
        # The settings of a device that Convoy starts. They are read at start, and plain PyTorch has them here, too.
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], os.environ | memory)
    table = Table(title="A step on one device", title_justify="left")
    for name in ("net", "batch", "plain PyTorch", *WAYS[1:]):
        table.add_column(name)
    rows: list[dict[str, Any]] = []
    for net, image, batch in CASES:
        times = in_turns(steps_of(net, image, batch), rounds, round_s)
        middle = {way: statistics.median(each) for way, each in times.items()}
        ratios = {way: [a / b for a, b in zip(times[way], times["plain"], strict=True)] for way in WAYS[1:]}
        rows.append(
            {
                "net": net, "batch": batch, "plain_s": middle["plain"], "alone_s": middle["alone"],
                "shared_s": middle["shared"],
                "alone": statistics.median(ratios["alone"]), "shared": statistics.median(ratios["shared"]),
                "spread": middle_spread(times["plain"]), "rounds_s": times,
            }
        )  # fmt: skip
        table.add_row(net, str(batch), *(f"{1000 * middle[way]:.2f} ms" for way in WAYS))
    document = {
        **stamp(COMMAND),
        "rows": rows,
        "overheads": asdict(measure_overheads(torch.device("cpu"), time.perf_counter, 0.3)[0]),
    }
    write_whole(results or RESULTS, json.dumps(document, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
