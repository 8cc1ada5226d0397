"""Prints the fleet, the plan, progress and usage of `convoy train`: plain lines if there is no terminal."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from convoy.model.graph import Graph
from convoy.plan.compile import compile_all
from convoy.plan.device_program import program_lines
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.plan.steps import micro_batches
from convoy.plan.text import LayerRow, step_lines
from convoy.report.numbers import in_bytes, seconds
from convoy.runlog.schema import DeviceLine
from convoy.train.record import EpochResult, Evaluation, History, Observer, StepResult

FILE_WIDTH = 250  # of tables in a file or a pipe, so that nothing is cut off
LINE_EVERY_S = 10.0  # between lines of progress if there is no terminal

Row = Sequence[str]


def print_table(
    console: Console, title: str, columns: Row, rows: Iterable[Row], texts: Row = (), total: Row = ()
) -> None:
    """Print a table, with `total` below a line. The columns `texts` are left-aligned; the others hold numbers."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if total:
        table.add_section()
        table.add_row(*total)
    console.print(table)


class Wait:
    """A display of the current task: a spinner on a terminal, otherwise a line every ten seconds. Call it with the task.

    `about_s` are the expected seconds, `first_s` those without output at first if there is no terminal.
    """

    def __init__(self, console: Console, text: str, about_s: float | None = None, first_s: float = 0.0) -> None:
        self.console, self.next_s, self.start_s = console, first_s, time.monotonic()
        self.text = text if about_s is None else f"{text}, about {seconds(about_s)}"
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        live = console.is_terminal and not console.quiet
        self.progress = Progress(*columns, console=console, transient=True, disable=not live)
        self.task, self.is_live, self.is_introduced = self.progress.add_task(self.text), live, False

    def __call__(self, task: str) -> None:
        self.progress.update(self.task, description=f"{self.text}: {task}")
        if not self.is_live and (waited_s := time.monotonic() - self.start_s) >= self.next_s:
            self.next_s = waited_s + LINE_EVERY_S
            self._line(f"  {seconds(waited_s)}: {task}" if self.is_introduced else f"{self.text}: {task} ...")

    def __enter__(self) -> Self:
        self.start_s = time.monotonic()
        self.progress.start()
        if not self.is_live and not self.next_s:
            self.next_s = LINE_EVERY_S
            self._line(f"{self.text} ...")
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def _line(self, line: str) -> None:
        self.is_introduced = True
        self.console.print(line, markup=False, soft_wrap=True)


class Screen:
    """The console of one device. Only that of device 0 is visible."""

    def __init__(self, visible: bool, console: Console | None = None) -> None:
        self.visible = visible
        # Names from models and files may contain brackets and colons, which are not markup.
        self.console = console or Console(quiet=not visible, highlight=False, markup=False, emoji=False)
        if console is None and not self.console.is_terminal and "COLUMNS" not in os.environ:
            self.console.width = FILE_WIDTH

    def show(self, visible: bool) -> None:
        self.visible, self.console.quiet = visible, not visible

    def fleet(self, devices: Sequence[tuple[str, str, float]], speeds: Speeds) -> None:
        """Print a row per device: kind, host, slowdown, speed with this model."""
        if len(devices) == 1 and not speeds.measured:
            ((kind, host, _),) = devices
            self.line(f"One device, {kind} on {host}: nothing to split, so no speed is measured.")
            return
        how = "measured on the model's own layers" if speeds.measured else "given by --speeds"
        speed_name, total = "samples/s" if speeds.measured else "speed", sum(speeds.devices)
        rows = [
            (str(index), kind, host, _slowed(slowdown), f"{speed:,.4g}", f"{speed / total:.1%}")
            for index, ((kind, host, slowdown), speed) in enumerate(zip(devices, speeds.devices, strict=True))
        ]
        print_table(
            self.console, f"Fleet: {len(devices)} devices, speeds {how}",
            ("device", "on", "host", "slowed down", speed_name, "of the fleet"), rows, texts=("device", "on", "host"),
            total=("", "", "", "", f"{total:,.4g}", "100.0%"),
        )  # fmt: skip

    def plan(
        self, plan: Plan, rows: Sequence[LayerRow], shares: Sequence[float], ids: Sequence[int] | None = None
    ) -> None:
        """Print a row per layer with its split and traffic.

        Args:
            ids: of the devices; None: 0, 1, ...
        """
        wire = "" if plan.wire == "exact" else f", wire {plan.wire}"
        outputs = "" if plan.outputs == "everywhere" else ", outputs stay where they are computed"
        texts, devices = ("layer", "kind", "split by"), [f"dev {device}" for device in ids or range(plan.devices)]
        print_table(
            self.console, f"Plan {plan.name}: batch {plan.batch}, sums by {plan.reduce}{wire}{outputs}",
            (*texts, *devices, "sent per step"),
            [(r.layer + " *" * bool(r.note), r.kind, r.strategy, *r.parts, in_bytes(r.bytes_)) for r in rows], texts,
            ("arithmetic", "", "", *(f"{share:.1%}" for share in shares), in_bytes(sum(row.bytes_ for row in rows))),
        )  # fmt: skip
        self.lines([f"* {row.layer}: {row.note}" for row in rows if row.note])
        if plan.inexact:
            self.line(f"INEXACT: {plan.inexact}.")

    def programs(self, plan: Plan, graph: Graph, accumulate: int) -> None:
        """Print the step list of the last micro-batch, and every device program."""
        steps = lower(plan, graph, micro_batch=[*micro_batches(accumulate)][-1])
        self.lines(step_lines(steps))
        for program in compile_all(steps, graph):
            self.lines(program_lines(program))

    def settings(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Print name, value and source of each setting."""
        columns = ("setting", "value", "from")
        print_table(self.console, "Settings in force", columns, rows, texts=columns)

    def lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)

    def line(self, line: str) -> None:
        self.lines([line])

    @contextmanager
    def progress(self, title: str, epochs: int, samples: int, seen: int = 0, tests: int = 0) -> Iterator["Bar"]:
        """Show a progress bar with training loss, samples/s and time left. Without a terminal, print lines.

        Args:
            samples: per epoch.
            seen: samples trained on before, if the run is resumed.
            tests: images of an evaluation.
        """
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%  loss {task.fields[loss]}  {task.fields[rate]} samples/s  left"),
            TimeRemainingColumn(),
        )
        live = self.visible and self.console.is_terminal
        with Progress(*columns, console=self.console, disable=not live, transient=True) as progress:
            tested = f", tested on {tests:,}" if tests else ""
            self.line(f"Training on {title}: {epochs} epoch{'s' * (epochs > 1)} of {samples:,} images{tested}")
            yield Bar(self, progress, title, epochs, samples, seen)

    def usage(self, uses: Sequence[DeviceLine], history: History) -> None:
        """Print each device's share, and its seconds by activity, which add up to the total in the title."""
        train_s, wall_s = sum(epoch.train_s for epoch in history.epochs), max(use.wall_s or 0.0 for use in uses)
        rows = []
        for use in uses:
            else_s = max(0.0, (use.wall_s or 0.0) - use.compute_s - use.exchange_s)
            rows.append((
                str(use.device), _slowed(use.slowdown), f"{use.speed_share:.1%}", f"{use.work_share:.1%}",
                f"{use.compute_s:.1f} s", f"{use.exchange_s:.1f} s", f"{else_s:.1f} s", in_bytes(use.sent_bytes),
            ))  # fmt: skip
        rest_s = max(0.0, wall_s - train_s)
        print_table(
            self.console,
            f"Devices over {wall_s:.1f} s: {train_s:.1f} s of training, {rest_s:.1f} s of evaluation and saving",
            ("device", "slowed down", "of speed", "of arithmetic", "busy", "exchange and wait", "all else", "sent"),
            rows,
        )

    def best(self, history: History) -> None:
        """Print the best test accuracy if there were several evaluations, and whether the training diverged."""
        if history.best is not None and len(history.evaluations) > 1:
            at = f"step {history.best.step}, in epoch {history.best.epoch + 1}"
            self.line(f"Best test accuracy: {history.best.accuracy:.2%} after {at}")
        if history.diverged is not None:
            self.line(f"WARNING: the training has diverged: its loss is not finite since step {history.diverged}")

    def comparison(
        self, together: History, alone: History, devices: Sequence[tuple[str, str, float]], reason: str
    ) -> None:
        """Compare a training on all devices with the same one on one device.

        Args:
            devices: kind, host and slowdown of each.
            reason: why losses differ.
        """
        rows = [
            (
                str(index + 1), f"{a.loss:.5f}", f"{b.loss:.5f}",
                *("-" if each.accuracy is None else f"{each.accuracy:.2%}" for each in (a, b)),
                f"{a.samples_per_s:,.0f}", f"{b.samples_per_s:,.0f}",
            )
            for index, (a, b) in enumerate(zip(together.epochs, alone.epochs, strict=True))
        ]  # fmt: skip
        pairs = (f"{name}\n{who}" for name in ("loss", "accuracy", "samples/s") for who in ("all", "one"))
        print_table(self.console, "The same training on one device (plain PyTorch)", ("epoch", *pairs), rows)
        apart = max(abs(a - b) for a, b in zip(together.losses, alone.losses, strict=True))
        self.line(f"Loss curves over {len(alone.losses)} steps: at most {apart:.2g} apart ({reason}).")
        if len(devices) == 1:
            return
        times = sum(epoch.train_s for epoch in alone.epochs) / sum(epoch.train_s for epoch in together.epochs)
        if times <= 1:
            self.line("One device alone was faster. convoy measure and convoy plan predict this before training.")
            return
        same = "" if reason.startswith("INEXACT") else f", with the same losses (to {apart:.1g})"
        slowdowns = [slowdown for _, _, slowdown in devices]
        possible = sum(min(slowdowns) / slowdown for slowdown in slowdowns)
        limit = f": {times / possible:.0%} of the {possible:.1f} that their speeds add up to"
        # Other devices' solo speeds are not known.
        is_known = len({(kind, host) for kind, host, _ in devices}) == 1 and devices[0][0].startswith("cpu")
        self.line(
            f"{len(devices)} devices trained {times:.1f} times as fast as "
            f"{f'the fastest of them alone{limit}' if is_known else 'one CPU alone'}{same}."
        )


def _slowed(slowdown: float) -> str:
    return f"{slowdown:g}x" if slowdown != 1 else "-"


class Bar(Observer):
    """The progress bar of one training."""

    def __init__(self, screen: Screen, progress: Progress, title: str, epochs: int, samples: int, seen: int) -> None:
        self.screen, self.progress = screen, progress
        self.epochs, self.samples, self.seen = epochs, samples, seen
        self.task = progress.add_task(title, total=epochs * samples, completed=seen, loss="-", rate="-")
        self.start = self.shown = self.last = time.monotonic()
        self.done, self.train_s = 0, 0.0

    def on_step(self, result: StepResult) -> None:
        self.done += result.samples
        now = time.monotonic()
        self.train_s, self.last = self.train_s + now - self.last, now
        rate = f"{self.done / max(self.train_s, 1e-9):,.0f}"
        self.progress.update(self.task, advance=result.samples, loss=f"{result.loss:.4f}", rate=rate)
        if not self.screen.console.is_terminal and now - self.shown > LINE_EVERY_S:
            self.shown = now
            seen, whole = self.seen + self.done, self.epochs * self.samples
            left_s = (now - self.start) / self.done * (whole - seen)
            self.screen.line(
                f"  epoch {result.epoch + 1}, {seen / whole:.0%}: loss {result.loss:.4f}, {rate} samples/s, {left_s:.0f} s left"
            )

    def on_evaluation(self, result: Evaluation) -> None:
        self.last = time.monotonic()  # evaluation does not count for samples/s
        if not result.ends_epoch:  # at the end of an epoch, its line shows the accuracy
            best = ", the best so far" if result.is_best else ""
            self.screen.line(f"  step {result.step}: test accuracy {result.accuracy:.2%}{best}")

    def on_epoch(self, result: EpochResult) -> None:
        self.last = time.monotonic()
        tested = "" if result.accuracy is None else f"test accuracy {result.accuracy:.2%}, "
        self.screen.line(
            f"  epoch {result.epoch + 1}/{self.epochs}: loss {result.loss:.4f}, {tested}"
            f"{result.samples_per_s:,.0f} samples/s, {result.train_s:.1f} s"
        )
