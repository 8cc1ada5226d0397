"""One training job as a value, and what each of its devices does with it."""

import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from convoy.auto import AUTO, BUDGET_S, Chosen, choose, read_times
from convoy.data import NAMES, Splits, load
from convoy.errors import InputError, MismatchError, unknown_name
from convoy.execute.clock import Clock
from convoy.execute.data import Loader
from convoy.execute.group import Group
from convoy.execute.module import Distributed
from convoy.execute.optimizer import mark_pieces
from convoy.execute.processes import join
from convoy.execute.rebalancing import Rebalancer
from convoy.execute.train import OPTIMIZERS, History, build_optimizer, fit
from convoy.explain import layer_rows, step_lines, work_shares
from convoy.files import write_whole
from convoy.measure.layers import given_speeds, measure_speeds
from convoy.named import PLANS, Speeds, named_plan
from convoy.nets import build_net
from convoy.plan import Plan
from convoy.prospect import working
from convoy.rebalance import Reshare
from convoy.report.log import Both, RunLog
from convoy.report.pace import Pace
from convoy.report.screen import DeviceUse, Screen
from convoy.trace import Traced, trace
from convoy.transfer import SUMS, Sum

MAX_SEED = 2**32 - 1

_SAME_EVERYWHERE = (
    *("data", "net", "plan", "batch", "epochs", "lr", "momentum", "weight_decay", "optimizer", "seed", "slowdown"),
    *("speeds", "reduce", "limit", "rebalance"),
)
"""Options that decide what is computed. The others may differ: folders, files, worker processes, the time limit."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, how, and on what. Field by field the options of `convoy train`."""

    data: str
    data_dir: Path | None
    net: str
    plan: str
    devices: tuple[str, ...]
    batch: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    optimizer: str
    seed: int
    slowdown: tuple[float, ...]
    speeds: tuple[float, ...] | None
    reduce: Sum | None
    limit: int | None
    workers: int
    timeout_s: float
    compare: bool
    explain: bool
    save_plan: Path | None
    log: Path | None
    fleet: Path | None = None
    budget_s: float = BUDGET_S
    rebalance: bool = False

    def check(self) -> None:
        """Refuse what can be refused before anything starts.

        Raises:
            InputError: with the value, the rule and the remedy.
        """
        if self.data not in NAMES:
            raise unknown_name("data set", self.data, NAMES)
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.reduce is not None and self.reduce not in SUMS:
            raise unknown_name("reduce", self.reduce, SUMS)
        for name, value, least in (("batch", self.batch, 1), ("epochs", self.epochs, 1), ("workers", self.workers, 0)):
            if value < least:
                raise InputError(f"--{name} {value}: give {least} or more")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit {self.limit}: give 1 sample or more")
        self._check_numbers()
        if len(self.slowdown) != len(self.devices) or any(not 1 <= f < math.inf for f in self.slowdown):
            raise InputError(
                f"--slowdown {_listed(self.slowdown)}: give one factor of 1 or more for each of the "
                f"{len(self.devices)} devices, e.g. --slowdown {_listed(tuple(1.0 for _ in self.devices))}"
            )
        if self.speeds is not None:
            given_speeds(self.speeds, len(self.devices))
        self._check_plan()

    def _check_numbers(self) -> None:
        for name, value in (("lr", self.lr), ("timeout", self.timeout_s), ("budget", self.budget_s)):
            if not 0 < value < math.inf:
                raise InputError(f"--{name} {value:g}: give a number above 0")
        for name, value in (("momentum", self.momentum), ("weight-decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                raise InputError(f"--{name} {value:g}: give 0 or more")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"--seed {self.seed}: give a whole number from 0 to {MAX_SEED}")

    def _check_plan(self) -> None:
        if self.fleet is not None and self.plan != AUTO:
            raise InputError(
                f"--fleet {self.fleet} with --plan {self.plan}: only --plan auto reads a fleet file; leave it out"
            )
        if self.speeds is not None and self.plan == AUTO:
            raise InputError(
                f"--speeds {_listed(self.speeds)} with --plan auto, which needs the times of every layer: leave it out, or "
                "name a plan"
            )
        if self.plan in (*PLANS, AUTO):
            return
        if not _is_file(self.plan):
            raise unknown_name("plan", self.plan, [*PLANS, AUTO, "a plan file (….json)"])
        saved = Plan.load(Path(self.plan))
        for what, given, planned in (
            ("--batch", self.batch, saved.batch),
            ("--devices", len(self.devices), saved.devices),
        ):
            if given != planned:
                raise InputError(
                    f"{what} {given}, but the plan {self.plan} is for {planned}: give {what} {planned}, or make a new plan"
                )

    def check_outputs(self) -> None:
        """Refuse files that could not be written, before the training whose results they would hold.

        Raises:
            InputError: the folder is missing or not writable, or the path is a folder.
        """
        for option, path in (("--save-plan", self.save_plan), ("--log", self.log)):
            if path is None:
                continue
            if not path.parent.is_dir():
                raise InputError(f"{option} {path}: the folder {path.parent} does not exist; make it or name another")
            if path.is_dir():
                raise InputError(f"{option} {path} is a folder: name a file in it, e.g. {option} {path / 'FILE'}")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise InputError(f"{option} {path} cannot be written: change its permissions or name another file")

    @property
    def state(self) -> str:
        """The optimizer by what it keeps, for predictions of memory."""
        if self.optimizer == "sgd":
            return "sgd-momentum" if self.momentum else "sgd"
        return "adam"

    def images(self) -> Splits:
        """The data; `limit` keeps only the first training images."""
        splits = load(self.data, self.data_dir)
        return splits if self.limit is None else splits.first(self.limit)

    def model(self, splits: Splits) -> nn.Module:
        return build_net(self.net, splits.train.image_shape, splits.train.classes, self.seed)

    def rehearse_inputs(self) -> None:
        """Load the data and build the net once, in the launching process: bad input is told once, before anything starts.

        Raises:
            InputError, DataError: as the parts say.
        """
        self.check()
        self.check_outputs()
        splits = self.images()
        model = self.model(splits)
        traced = trace(model, _example(splits))
        if self.plan == AUTO:
            if self.fleet is not None:
                read_times(self.fleet, traced.graph, len(self.devices))
        elif self.plan in PLANS:
            named_plan(self.plan, traced.graph, self.batch, Speeds((1.0,) * len(self.devices)), self.reduce)
        else:
            Plan.load(Path(self.plan)).check(traced.graph, len(self.devices))


def run_device(job: Job) -> None:
    """What each device of a job does, from joining to leaving."""
    job.check()
    torch.manual_seed(job.seed)
    with ExitStack() as stack:
        # Alone, a device named on the command line; in a job of several, the launcher has told each its own.
        named = job.devices[0] if len(job.devices) == 1 and job.devices[0] != "auto" else None
        group = stack.enter_context(join(named, timeout_s=job.timeout_s))
        _agree(job, group)
        if group.device == 0:
            job.check_outputs()
        screen = Screen(visible=group.device == 0)
        history, splits, exact = _train(job, group, screen, stack)
    # The others are free to go while device 0 trains alone beside them.
    if job.compare and screen.visible:
        _train_alone(job, splits, history, screen, exact)


def _agree(job: Job, group: Group) -> None:
    """Every device must have been started with the same options, where they decide what is computed.

    Raises:
        MismatchError: names the devices and the first option that differs.
    """
    # A plan file may lie elsewhere on each machine; what is in it is compared later.
    plan = job.plan if job.plan in (*PLANS, AUTO) else "a file"
    own = {name: getattr(job, name) for name in _SAME_EVERYWHERE} | {"plan": plan}
    rows = [json.loads(text) for text in group.agree("job", json.dumps(own))]
    for name in own:
        strangers = [f"{row[name]} on device {d}" for d, row in enumerate(rows) if row[name] != rows[0][name]]
        if strangers:
            raise MismatchError(
                f"the devices were started with different options: --{name.replace('_', '-')} is {rows[0][name]} on "
                f"device 0, but {', '.join(strangers)}; start every device with the same options"
            )


def _open_log(job: Job, screen: Screen, stack: ExitStack) -> RunLog | None:
    """The log, once nothing can refuse the job any more: until then an older file stays as it is."""
    if job.log is None or not screen.visible:
        return None
    log = stack.enter_context(RunLog(job.log))
    log.run(asdict(job))
    return log


def _train(job: Job, group: Group, screen: Screen, stack: ExitStack) -> tuple[History, Splits, bool]:
    splits = job.images()
    model, example = job.model(splits), _example(splits)
    traced = trace(model, example)
    slowdown = job.slowdown[group.device] * _imposed_slowdown()
    chosen = _choose(job, group, traced, model, slowdown, screen) if job.plan == AUTO else None
    plan, speeds = (chosen.plan, chosen.speeds) if chosen else _plan(job, group, traced, model, slowdown, screen)
    part = Distributed(model, plan, group, example, slowdown=slowdown)
    mark_pieces(part)
    if job.save_plan is not None and group.device == 0:
        write_whole(job.save_plan, plan.to_json())
    steps = part.steps(job.batch)
    screen.plan(plan, layer_rows(plan, traced.graph), work_shares(steps, traced.graph))
    if job.explain:
        screen.lines(step_lines(steps))
    train = Loader(splits.train, job.batch, part, seed=job.seed, workers=job.workers)
    test = Loader(splits.test, max(job.batch, 100), part, shuffle=False)
    optimizer = build_optimizer(job.optimizer, part, job.lr, job.momentum, job.weight_decay)
    log = _open_log(job, screen, stack)
    part.clock.reset()
    pace = Pace(job.batch)
    with screen.progress(f"{len(job.devices)} devices, plan {plan.name}", job.epochs, train.samples) as bar:
        rebalancer = Rebalancer(part, optimizer, tell=_teller(screen, log)) if job.rebalance else None
        observer = Both(pace, bar, *([log] if log else []))
        history = fit(part, train, test, optimizer, job.epochs, observer, rebalancer)
    uses = _uses(job, group, part, speeds, work_shares(part.steps(job.batch), traced.graph))
    screen.usage(uses, history)
    if chosen is not None:
        screen.lines([pace.beside(chosen.step_s)])
    if log is not None:
        if chosen is not None:
            log.write("prediction", step_s=chosen.step_s, measured_step_s=pace.step_s)
        for use in uses:
            log.write("device", **asdict(use))
    return history, splits, plan.exact


def _teller(screen: Screen, log: RunLog | None) -> Callable[[int, Reshare], None]:
    """Says what was rebalanced and why, on the screen and in the log."""

    def tell(step: int, decision: Reshare) -> None:
        screen.lines([f"  step {step}: {decision.reason}"])
        if log is not None:
            log.write("reshare", step=step, reason=decision.reason, plan=json.loads(decision.plan.to_json()))

    return tell


def _plan(
    job: Job, group: Group, traced: Traced, model: nn.Module, slowdown: float, screen: Screen
) -> tuple[Plan, Speeds]:
    saved = None if job.plan in PLANS else Plan.load(Path(job.plan))
    if saved is not None:
        # A wrong plan is found before the seconds of measuring.
        saved.check(traced.graph, group.devices)
    if job.speeds is not None:
        speeds = given_speeds(job.speeds, group.devices)
    else:
        with screen.working("every device times the model's layers"):
            speeds = measure_speeds(group, traced, model, job.batch, Clock(group.torch_device, slowdown))
    screen.fleet(_rows(job, group), speeds, measured=job.speeds is None)
    if saved is None:
        return named_plan(job.plan, traced.graph, job.batch, speeds, job.reduce), speeds
    return saved if job.reduce is None else replace(saved, reduce=job.reduce), speeds


def _choose(job: Job, group: Group, traced: Traced, model: nn.Module, slowdown: float, screen: Screen) -> Chosen:
    """Measure unless a file has the times, and plan."""
    described = os.environ.get("CONVOY_FLEET")
    with screen.working(
        "the devices are measured and planned for" if job.fleet is None else "the planner reads the fleet"
    ):
        chosen = choose(
            group, traced, model, job.batch, net=job.net, file=job.fleet, described=Path(described) if described else None,
            budget_s=job.budget_s, slowdown=slowdown, optimizer=job.state, reduce=job.reduce,
        )  # fmt: skip
    screen.fleet(_rows(job, group), chosen.speeds, measured=True)
    idle = [str(d) for d in range(group.devices) if d not in working(chosen.plan, traced.graph)]
    if idle:
        screen.lines(
            [f"auto gives device{'s' * (len(idle) > 1)} {', '.join(idle)} nothing to compute: it is faster so."]
        )
    return chosen


def _rows(job: Job, group: Group) -> list[tuple[str, str, float]]:
    """Device, host and slow-down of every device."""
    own = json.dumps([str(group.torch_device), os.uname().nodename, torch.get_num_threads()])
    rows = [json.loads(text) for text in group.agree("fleet", own)]
    return [
        (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
        for (device, host, threads), slowdown in zip(rows, job.slowdown, strict=True)
    ]


def _uses(job: Job, group: Group, part: Distributed, speeds: Speeds, shares: tuple[float, ...]) -> list[DeviceUse]:
    own = json.dumps([part.clock.compute_s, part.clock.exchange_s, sum(group.sent_bytes)])
    rows = [json.loads(text) for text in group.agree("use", own)]
    total = sum(speeds.devices)
    return [
        DeviceUse(device, job.slowdown[device], speeds.devices[device] / total, shares[device], *row)
        for device, row in enumerate(rows)
    ]


def _train_alone(job: Job, splits: Splits, history: History, screen: Screen, exact: bool) -> None:
    """The same training by plain PyTorch on one device: what Convoy must equal."""
    model = job.model(splits)
    train = Loader(splits.train, job.batch, seed=job.seed, workers=job.workers)
    test = Loader(splits.test, max(job.batch, 100), shuffle=False)
    optimizer = build_optimizer(job.optimizer, model, job.lr, job.momentum, job.weight_decay)
    with screen.progress("one device, plain PyTorch", job.epochs, train.samples) as bar:
        alone = fit(model, train, test, optimizer, job.epochs, bar)
    screen.comparison(history, alone, exact=exact)


def _imposed_slowdown() -> float:
    """What a rehearsal asks of this device (its fleet file's `slowdown`)."""
    return float(os.environ.get("CONVOY_SLOWDOWN", "1"))


def _example(splits: Splits) -> Tensor:
    return splits.train[0][0][None]


def _is_file(text: str) -> bool:
    return text.endswith(".json") or Path(text).is_file()


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{n:g}" for n in numbers)
