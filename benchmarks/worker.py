"""What every device of a fleet runs: one process for all its nets, batches and plans, since importing torch takes a slow
device many seconds.

    python -m benchmarks.worker JOB.json        # under convoy emulate or torchrun; benchmarks.drive starts it

Net by net: measure, predict, write the predictions down, then run case by case. The time of a step is that of several in a
row: every device takes the time from a common start to the end of its last step, and the largest of these, divided by the
number of steps, counts. So a step that overlaps the next one counts only once, as for a user who waits for an epoch, and a
device that lags behind counts in full. Loading the batch, the loss and the optimizer are inside; building, the first batch
after a change of plan, and Python's garbage collector are not.
"""

import datetime
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from benchmarks.configurations import ALONE, AUTO, FSDP, IN_TURN, PEERS, Case, Series
from benchmarks.ddp import ddp_turn, fsdp_turn, leave
from benchmarks.hardware import Ground
from benchmarks.predictions import Predictions, predict, rows_of, strategies
from benchmarks.quiet import others_share, read_usage
from benchmarks.reference import Reference
from benchmarks.results import FleetResult, NetResult, Row, still_to_run, write_result
from benchmarks.rounds import Pair, Turn, run_rounds
from benchmarks.runners import AloneRunner, ConvoyRunner
from benchmarks.score import KNOWN_TO, TUNED
from benchmarks.tasks import Data, images_of, task_of
from benchmarks.tuning import Setting
from benchmarks.wire import Wire
from convoy.comm.group import Group
from convoy.comm.processes import join
from convoy.errors import ConvoyError, InputError
from convoy.files import write_whole
from convoy.fleet import Fleet
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.graph import Graph
from convoy.model.nets import build_net
from convoy.model.tracing import TracedModel, trace
from convoy.plan.plan import Plan
from convoy.simulate.costs import Costs
from convoy.simulate.table import Measurement, read_fleet_file

GROUP_LIMIT_S = 900.0
"""How long a device waits for another: a slow one alone on a large batch takes minutes."""

LEAST_SETTLING, MOST_SETTLING = 9, 18
"""Steps with the rebalancer before the rounds: it looks at five fresh ones, after the first two, for each answer."""


MOST_TIMES = 8
"""`auto` and tuned DDP have so many times the rounds of all others at most, until the ratio of their speeds is known to
`KNOWN_TO`."""


@dataclass(frozen=True)
class WorkerJob:
    """The work on one fleet.

    Attributes:
        set: for the result files; "" where the cases were asked for by themselves.
        series: all of this fleet.
        output: folder of the result files.
        measurements: folder for what was measured of each net; None: not kept.
        data_dir: folder of CIFAR-10; None: random images of that shape.
        rounds: at least so many for everything.
        round_s: about the seconds of one configuration in one round, for steps shorter than that.
        alone_s: devices alone get no further round after so many seconds, once they have had two.
        budget_s, links_budget_s: for measuring one net, and the wire.
        tuning_s: about the seconds of the search for DDP's shares and options.
        case_s: no further round of a case begins after so many seconds, once there were two.
        ground, command: for the result files.
        encrypted: whether Convoy's bytes are; for the result files.
        again: whether cases are measured anew whose files are complete. Each file stays until its case begins.
    """

    set: str
    fleet: str
    series: tuple[Series, ...]
    output: Path
    measurements: Path | None
    data_dir: Path | None
    rounds: int
    round_s: float
    alone_s: float
    budget_s: float
    links_budget_s: float
    tuning_s: float
    case_s: float
    ground: Ground
    command: str
    again: bool = False
    encrypted: bool = False

    def empty_result(self, devices: Sequence[tuple[str, float | None]], net: str) -> FleetResult:
        """Return a result without measurements for this net."""
        names = ("rounds", "round_s", "alone_s", "budget_s", "links_budget_s", "tuning_s", "case_s", "encrypted")
        return FleetResult(
            set=self.set, fleet=self.fleet, devices=tuple(devices), ground=self.ground, command=self.command,
            data=task_of(net).data(self.data_dir),
            settings={name: float(getattr(self, name)) for name in names},
        )  # fmt: skip

    def path(self, case: Case) -> Path:
        return self.output / f"{case.name}.json"

    def still_to_run(self, case: Case, empty: FleetResult) -> Case | None:
        """Return the unmeasured part of a case; see `benchmarks.results.still_to_run`."""
        return case if self.again else still_to_run(self.path(case), empty, case)


JOB = TypeAdapter(WorkerJob)

Say = Callable[[str], None]


def run_fleet(group: Group, job: WorkerJob, fleet: Fleet | None, say: Say) -> None:
    """Measure, predict and run every case of this fleet. All devices call it; device 0 writes the result files.

    A case whose plans were all measured before, by the same code on the same machine, is not run again.

    Args:
        fleet: the description; None: the devices describe themselves.

    Raises:
        InputError, DeviceLostError: as the parts say; the files hold all cases that were finished.
    """
    devices = [(d.name, d.cores) for d in fleet.devices] if fleet else [(f"d{i}", None) for i in range(group.devices)]
    run = _FleetRun(group, job, fleet, devices, say)
    try:
        for series in job.series:
            cases = run.open_cases(series)
            if cases:
                run.measure_and_run(series.net, cases)
            else:
                say(f"{series.net}: was done before")
    finally:
        leave()


class _FleetRun:
    """The run of one fleet through its series."""

    def __init__(
        self, group: Group, job: WorkerJob, fleet: Fleet | None, devices: Sequence[tuple[str, float | None]], say: Say
    ) -> None:
        self.group, self.job, self.fleet, self.devices, self.say = group, job, fleet, devices, say
        self.wire: Measurement | None = None
        self.tuned: dict[tuple[str, str], Setting] = {}

    def open_cases(self, series: Series) -> list[Case]:
        """Return the cases that device 0's files lack."""
        own = []
        if self.group.device == 0:
            empty = self.job.empty_result(self.devices, series.net)
            own = [each for case in series.cases() if (each := self.job.still_to_run(case, empty))]
        agreed = json.loads(self.group.agree("open cases", json.dumps([[each.batch, each.plans] for each in own]))[0])
        return [Case(series.fleet, series.net, batch, tuple(names)) for batch, names in agreed]

    def measure_and_run(self, net: str, cases: Sequence[Case]) -> None:
        task = task_of(net)
        images = images_of(task, self.job.data_dir)
        model = build_net(net, task.image, task.classes)
        traced = trace(model, torch.zeros(1, *task.image))
        self.say(f"{net}: measuring")
        reference = Reference(self.group)
        before = reference.read()
        measured = self._measured(net, model, traced, max(case.batch for case in cases))
        reference.rebase(before, reference.read())
        self.say(f"{net}: predicting")
        costs = measured.costs(traced.graph)
        every = [self._predictions(case, traced.graph, costs, measured.fleet) for case in cases]
        for case, predictions in zip(cases, every, strict=True):
            # The file is the witness that predictions came first.
            self._write(case, self._net_result(case, predictions, measured.date))
        for case, predictions in zip(cases, every, strict=True):
            self._run(case, model, images, predictions, measured, reference)

    def _measured(self, net: str, model: nn.Module, traced: TracedModel, batch: int) -> Measurement:
        job, first = self.job, self.wire
        options = MeasureOptions(
            net,
            fleet=self.fleet,
            budget_s=job.budget_s,
            links_budget_s=job.links_budget_s if first is None else min(1.0, job.links_budget_s),
        )
        measured = measure_job(self.group, traced, model, batch, options)
        if first is None:
            self.wire = measured
        else:
            # Layers differ from net to net; the wire, the copies and the optimizer do not: they are measured well once.
            measured = replace(measured, fleet=first.fleet, link=first.link, device=first.device)
        if job.measurements is not None and self.group.device == 0:
            write_whole(job.measurements / f"{job.fleet}.{net.replace(':', '-')}.toml", measured.to_toml())
        return measured

    def _predictions(self, case: Case, graph: Graph, costs: Costs, fleet: Fleet) -> Predictions:
        """Return device 0's predictions, so that all devices use the same."""
        own = predict(case, graph, costs, fleet).to_json() if self.group.device == 0 else ""
        return Predictions.from_json(self.group.agree("predictions", own)[0])

    def _net_result(self, case: Case, predictions: Predictions, measured: str) -> NetResult:
        rows = rows_of(case, predictions, self.job.round_s)
        plan_s, solo_s = {case.batch: predictions.plan_s}, {case.batch: predictions.solo_s}
        return NetResult(case.net, measured, _today(), "", plan_s, solo_s, rows)

    def _write(self, case: Case, net: NetResult) -> None:
        if self.group.device == 0:
            write_result(self.job.path(case), self.job.empty_result(self.devices, case.net).with_net(net))

    def _run(
        self,
        case: Case,
        model: nn.Module,
        images: Data,
        predictions: Predictions,
        measured: Measurement,
        reference: Reference,
    ) -> None:
        begin, net = read_usage(), self._net_result(case, predictions, measured.date)
        name = f"{case.net}, batch {case.batch}"
        turns = self._turns(case, model, images, net.rows, predictions, measured.fleet)
        rows = run_rounds(
            self.group, turns, self.job.rounds, lambda text: self.say(f"{name}: {text}"), reference, self.job.case_s,
            _pair(turns, MOST_TIMES * self.job.rounds),
        )  # fmt: skip
        others = others_share(self.group, begin)
        self._write(case, replace(net, rows=rows, finished=_today(), others=others))

    def _turns(
        self, case: Case, model: nn.Module, images: Data, rows: Sequence[Row], predictions: Predictions, fleet: Fleet
    ) -> list[Turn]:
        """Return all turns after the searches.

        Args:
            fleet: with its NICs and links as measured.
        """
        group, job = self.group, self.job
        speeds = [case.batch / step_s for step_s in predictions.solo_s]
        turns = []
        for name in case.plans:
            own = [row for row in rows if row.plan == name]
            if name == ALONE:
                alone = AloneRunner(model, images, case.batch, predictions.solo_s[group.device])
                turns.append(Turn(tuple(own), alone, most_s=job.alone_s))
            elif name == IN_TURN:
                for row in own:
                    mine = model if row.device == group.device else None
                    alone = AloneRunner(mine, images, case.batch, row.predicted_s or 1.0)
                    turns.append(Turn((row,), alone, most_s=job.alone_s))
            elif name == FSDP:
                turns.append(fsdp_turn(group, own[0], model, images, speeds))
            elif name in PEERS:
                self.say(f"{case.net}, batch {case.batch}: tuning {name}")
                known = self.tuned.get((case.net, name))
                turn, self.tuned[case.net, name] = ddp_turn(
                    group, own[0], model, images, speeds, job.tuning_s, known, Wire.of(fleet)
                )
                turns.append(turn)
            else:
                plan = Plan.from_json(predictions.plans[name].plan)
                runner = ConvoyRunner(model, plan, group, images, case.batch)
                if name == AUTO and set(PEERS) & set(case.plans):
                    # Beside peers that are tuned by search; without any, a prediction is judged by its own plan.
                    self.say(f"{case.net}, batch {case.batch}: rebalancing auto")
                    own = [self._settled(own[0], runner, predictions)]
                turns.append(Turn(tuple(own), runner))
            # Tracing leaves copies of the model in cycles, and nobody else collects here: six plans of a large net were 6 GB.
            gc.collect()
        return turns

    def _settled(self, row: Row, runner: ConvoyRunner, predictions: Predictions) -> Row:
        """Return the row of the plan that autotuning leaves, with its prediction and settled shares."""
        found = [predictions.plans[AUTO], *predictions.others]
        autotune, settled = runner.settle(
            self._settling(row), [Plan.from_json(each.plan) for each in predictions.others]
        )
        won = found[autotune.running]
        tried = tuple(
            (each.step_s, entry.step_s) for each, entry in zip(found, autotune.entries, strict=True) if entry.seen_s
        )
        return replace(
            row, predicted_s=won.step_s, foreseen=won.where, card_s=won.card_s, bound=won.bound,
            strategies=strategies(settled), tried=tried,
        )  # fmt: skip

    def _settling(self, row: Row) -> int:
        """Return the rebalancing steps: enough for two responses, within the time of the DDP search."""
        return max(LEAST_SETTLING, min(MOST_SETTLING, round(self.job.tuning_s / (row.predicted_s or 1.0))))


def _pair(turns: Sequence[Turn], most: int) -> Pair | None:
    plans = [turn.rows[0].plan for turn in turns]
    return Pair(plans.index(TUNED), plans.index(AUTO), KNOWN_TO, most) if {TUNED, AUTO} <= set(plans) else None


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main(path: Path) -> None:
    """Read the job, join the group, run."""
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
