"""What every device of a fleet runs: one process for all its nets, batches and plans, since importing torch takes a slow
device many seconds.

    python -m benchmarks.worker JOB.json        # under convoy rehearse or torchrun; benchmarks.validate starts it

Net by net: measure, predict, write the predictions down, then run. The time of a step is that of several in a row: every
device takes the time from a common start to the end of its last step, and the largest of these, divided by the number of
steps, counts. So a step that overlaps the next one counts only once, as for a user who waits for an epoch, and a device that
lags behind counts in full. Loading the batch, the loss and the optimizer are inside; building, the first batch after a change
of plan, and Python's garbage collector are not.
"""

import datetime
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from benchmarks.configurations import PEERS, Series, series_of
from benchmarks.ddp import ddp_turn, leave
from benchmarks.hardware import Ground
from benchmarks.predictions import Predictions, predict, strategies
from benchmarks.quiet import others_share, read
from benchmarks.reference import Reference
from benchmarks.results import FleetResult, NetResult, Row, read_result, write_result
from benchmarks.rounds import Turn, run_rounds
from benchmarks.runners import AloneRunner, ConvoyRunner
from convoy.data import Images, load
from convoy.errors import ConvoyError, InputError
from convoy.execute.group import Group
from convoy.execute.processes import join
from convoy.files import write_whole
from convoy.fleet import Fleet
from convoy.graph import Graph
from convoy.measure.run import measure_job
from convoy.measurement import Measurement, read_fleet_file
from convoy.nets import build_net
from convoy.trace import trace

GROUP_LIMIT_S = 900.0
"""How long a device waits for another: a slow one alone on a large batch takes minutes."""

KEPT_IMAGES = 4096


@dataclass(frozen=True)
class WorkerJob:
    """What to run on one fleet.

    Attributes:
        output: the result file.
        measurements: folder for what was measured of each net; None: not kept.
        data_dir: folder of CIFAR-10; None: random images of that shape.
        rounds: at least so many for everything.
        round_s: about the seconds of one configuration in one round, for steps shorter than that.
        alone_s: a device alone gets no further round after so many seconds, once it has had two.
        budget_s, links_budget_s: for measuring one net, and the wire.
        tuning_s: about the seconds of the search for DDP's shares and options.
        ground, command: for the result file.
    """

    set: str
    fleet: str
    output: Path
    measurements: Path | None
    data_dir: Path | None
    rounds: int
    round_s: float
    alone_s: float
    budget_s: float
    links_budget_s: float
    tuning_s: float
    ground: Ground
    command: str

    def empty_result(self, devices: Sequence[tuple[str, float | None]]) -> FleetResult:
        """A result file without nets."""
        names = ("rounds", "round_s", "alone_s", "budget_s", "links_budget_s", "tuning_s")
        return FleetResult(
            set=self.set, fleet=self.fleet, devices=tuple(devices), ground=self.ground, command=self.command,
            data="random images" if self.data_dir is None else "CIFAR-10",
            settings={name: float(getattr(self, name)) for name in names},
        )  # fmt: skip


JOB = TypeAdapter(WorkerJob)

Say = Callable[[str], None]


def run_fleet(group: Group, job: WorkerJob, fleet: Fleet | None, say: Say) -> None:
    """Measure, predict and run every series of this job's fleet. All devices call it; device 0 writes the result file.

    A net whose runs are in the file already, from the same code on the same machine, is not run again.

    Args:
        fleet: the description; None: the devices describe themselves.

    Raises:
        InputError, DeviceLostError: as the parts say; the file holds all nets that were finished.
    """
    images = _images(job.data_dir)
    devices = [(d.name, d.cores) for d in fleet.devices] if fleet else [(f"d{i}", None) for i in range(group.devices)]
    result = _begin(group, job, devices)
    wire: Measurement | None = None
    try:
        for series in series_of(job.set, job.fleet):
            if series.net in result.nets:
                say(f"{series.net}: was done before")
            else:
                result, wire = _run_series(group, job, series, images, fleet, wire, result, say)
    finally:
        leave()


def _begin(group: Group, job: WorkerJob, devices: Sequence[tuple[str, float | None]]) -> FleetResult:
    """The result so far, by what device 0 finds in the file; only finished nets, and none of other code."""
    result = job.empty_result(devices)
    finished: dict[str, NetResult] = {}
    if group.device == 0 and job.output.exists() and result.continues(old := read_result(job.output)):
        finished = {each.net: old.nets[each.net] for each in series_of(job.set, job.fleet) if old.holds(each)}
    names = json.loads(group.agree("finished nets", json.dumps(list(finished)))[0])
    empty = NetResult("", "", "", "", {}, {}, ())
    return replace(result, nets={name: finished.get(name, empty) for name in names})


def _run_series(
    group: Group,
    job: WorkerJob,
    series: Series,
    images: Images,
    fleet: Fleet | None,
    wire: Measurement | None,
    result: FleetResult,
    say: Say,
) -> tuple[FleetResult, Measurement]:
    model = build_net(series.net, images.image_shape, images.classes)
    traced = trace(model, torch.zeros(1, *images.image_shape))
    say(f"{series.net}: measuring")
    reference = Reference(group)
    before = reference.read()
    measured = measure_job(
        group, traced, model, max(series.batches), net=series.net, fleet=fleet, budget_s=job.budget_s,
        links_budget_s=job.links_budget_s if wire is None else min(1.0, job.links_budget_s),
    )  # fmt: skip
    reference.rebase(before, reference.read())
    if wire is not None:
        measured = _with_wire_of(measured, wire)
    say(f"{series.net}: predicting")
    predictions = _predictions(group, series, traced.graph, measured)
    rows = _rows(series, predictions, job.round_s, group.devices)
    net = NetResult(
        series.net, measured.date, _today(), "", dict(zip(series.batches, predictions.plan_s, strict=True)),
        dict(zip(series.batches, predictions.solo_s, strict=True)), rows,
    )  # fmt: skip
    if group.device == 0:
        # The file is the witness that predictions came first.
        write_result(job.output, result.with_net(net))
        if job.measurements is not None:
            name = f"{series.fleet}.{series.net.replace(':', '-')}.toml"
            write_whole(job.measurements / name, measured.to_toml())
    turns = _turns(group, job, model, images, rows, predictions, say)
    begin = read()
    done = run_rounds(group, turns, job.rounds, lambda text: say(f"{series.net}: {text}"), reference)
    result = result.with_net(replace(net, rows=done, finished=_today(), others=others_share(group, begin)))
    if group.device == 0:
        write_result(job.output, result)
    return result, wire or measured


def _with_wire_of(measured: Measurement, first: Measurement) -> Measurement:
    """Layers differ from net to net; the wire, the copies and the optimizer do not: they are measured well once."""
    return replace(measured, fleet=first.fleet, link=first.link, host=first.host, device=first.device)


def _predictions(group: Group, series: Series, graph: Graph, measured: Measurement) -> Predictions:
    """Those of device 0: one planner, one answer."""
    own = predict(series, graph, measured.costs(graph)).to_json() if group.device == 0 else ""
    return Predictions.from_json(group.agree("predictions", own)[0])


def _rows(series: Series, predictions: Predictions, round_s: float, devices: int) -> tuple[Row, ...]:
    """A row per configuration, and one per device for `one-device`; nothing is measured yet."""
    planned = {(p.batch, p.plan.name): p for p in predictions.plans}
    rows: list[Row] = []
    for index, batch in enumerate(series.batches):
        alone_s = predictions.solo_s[index]
        # For DDP, a guess of how long a step takes, only to choose how many make a round.
        guess_s = batch / sum(batch / each for each in alone_s)
        for name in series.plans:
            if name == "one-device":
                for device in range(devices):
                    steps = _steps(round_s, alone_s[device])
                    rows.append(Row(series.fleet, series.net, batch, name, device, alone_s[device], {}, steps))
            elif name in PEERS:
                rows.append(Row(series.fleet, series.net, batch, name, None, None, {}, _steps(round_s, guess_s)))
            else:
                found = planned[batch, name]
                rows.append(
                    Row(series.fleet, series.net, batch, name, None, found.step_s, strategies(found.plan),
                        _steps(round_s, found.step_s))
                )  # fmt: skip
    return tuple(rows)


def _steps(round_s: float, step_s: float) -> int:
    return max(1, min(100, math.ceil(round_s / step_s)))


def _turns(
    group: Group,
    job: WorkerJob,
    model: nn.Module,
    images: Images,
    rows: Sequence[Row],
    predictions: Predictions,
    say: Say,
) -> list[Turn]:
    plans = {(p.batch, p.plan.name): p.plan for p in predictions.plans}
    speeds = {row.batch: [1 / r.predicted_s for r in rows if r.batch == row.batch and r.device is not None and r.predicted_s]
              for row in rows}  # fmt: skip
    turns = []
    for row in rows:
        if row.plan == "one-device":
            mine = model if row.device == group.device else None
            alone = AloneRunner(mine, images, row.batch, row.predicted_s or 1.0)
            turns.append(Turn(row, alone, most_s=job.alone_s))
        elif row.plan in PEERS:
            say(f"{row.net}: tuning {row.plan} at batch {row.batch}")
            turns.append(ddp_turn(group, row, model, images, speeds[row.batch], job.tuning_s))
        else:
            turns.append(Turn(row, ConvoyRunner(model, plans[row.batch, row.plan], group, images, row.batch)))
        # Tracing leaves copies of the model in cycles, and nobody else collects here: six plans of a large net were 6 GB.
        gc.collect()
    return turns


def _images(data_dir: Path | None) -> Images:
    """Training images: the first of CIFAR-10, or random ones of that shape."""
    if data_dir is not None:
        return load("cifar10", data_dir).first(KEPT_IMAGES).train
    generator = torch.Generator().manual_seed(0)
    x_NCHW = torch.randint(0, 256, (KEPT_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y_N = torch.randint(0, 10, (KEPT_IMAGES,), generator=generator)
    return Images(x_NCHW, y_N, 10, (0.5,) * 3, (0.29,) * 3)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main(path: Path) -> None:
    """Read the job, meet the others, run."""
    job = JOB.validate_json(path.read_bytes())
    if float(os.environ.get("CONVOY_SLOWDOWN", "1")) != 1:
        raise InputError(
            f"fleet {job.fleet} has devices with a slowdown, which plain PyTorch knows nothing of: give them fewer cores"
        )
    named = os.environ.get("CONVOY_FLEET")
    fleet = read_fleet_file(Path(named))[0] if named else None
    gc.disable()  # the rounds collect between their turns
    with join(timeout_s=GROUP_LIMIT_S) as group:
        run_fleet(group, job, fleet, (lambda text: print(text, flush=True)) if group.device == 0 else lambda _: None)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
