"""Writes the log of a run line by line as it happens, so that a run that is killed keeps what it had."""

import datetime
import errno
import fcntl
import json
import os
import platform
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from convoy._version import __version__
from convoy.adapt.rebalance import Reshare
from convoy.comm.accelerator import modes
from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.runlog.rows import plan_line, plan_parts
from convoy.runlog.schema import EpochLine, EvaluationLine, Line, ReshareLine, RunLine, StepLine
from convoy.train.observer import EpochResult, Evaluation, Observer, StepResult

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where there is no room, until somebody makes some."""

MOST_WAITING_BYTES = 4 << 20
"""Of lines that wait for room."""

AT_ONCE_BYTES = 64 << 10

COPY_PAUSE_S = 10.0
"""From one attempt to copy the log of a device that is lost to the next, where there was no room for it."""


class RunLog(Observer):
    """Appends lines to a JSONL file; observes the training.

    Where the disk is full, lines wait in memory until there is room; those that are too many are left out, and counted. A disk
    that is gone ends the log and not the training. Both are told once.

    Args:
        path: the file; its folder must exist. An older file of that name is replaced, unless the run is resumed.
        step: the steps that the run has done before.
        tell: is called with a line of text when the log ends early.
        from_lost: who wrote it until now is lost, and may be stopped with the file open: a copy takes its place, as soon as
            there is room for it. Where the folder is not here, it is made.

    Raises:
        InputError: the file cannot be written, or another run writes it.
    """

    def __init__(
        self,
        path: Path,
        step: int = 0,
        tell: Callable[[str], None] = warnings.warn,
        *,
        from_lost: bool = False,
    ) -> None:
        self.path, self.tell, self.ended = path, tell, False
        self.done = step
        self.graph: Graph | None = None
        self._from_lost, self._next_s = from_lost, 0.0
        self._file: int | None = None
        self._start_s = time.perf_counter()
        self._waiting = bytearray()
        self._is_full, self._left_out = False, 0
        try:
            self._file = self._open()
        except (OSError, ValueError) as error:
            if from_lost and isinstance(error, OSError) and error.errno in FULL:
                self._wait_for_room(error)
                return
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(f"cannot write the log {path}: {why}; give a path in a folder that exists") from None

    def _open(self) -> int:
        if self._from_lost:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():
                _copied(self.path)
        return _opened(self.path, going_on=self.done > 0)

    def write(self, line: Line) -> None:
        if self.ended:
            return
        row = line.model_dump_json(by_alias=True).encode("utf-8", "backslashreplace") + b"\n"
        if self._waiting and len(self._waiting) + len(row) > MOST_WAITING_BYTES:
            self._left_out += 1
        else:
            self._waiting += row
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            if self._file is None:
                if time.monotonic() < self._next_s:
                    return
                self._file = self._open()
            while self._waiting:
                # What is written of a line stays: its rest is the first that follows.
                del self._waiting[: os.write(self._file, bytes(self._waiting[:AT_ONCE_BYTES]))]
        except OSError as error:
            self._wait_for_room(error)
            return
        except InputError as error:  # of opening
            self._end(str(error))
            return
        if self._is_full:
            missing = f"{self._left_out} lines are missing" if self._left_out else "no line is missing"
            self.tell(f"the log {self.path} goes on: {missing}")
            self._is_full, self._left_out = False, 0

    def _wait_for_room(self, error: OSError) -> None:
        """A line cannot be written now, or not any more."""
        why = error.strerror or str(error)
        if error.errno not in FULL:
            self._end(f"the log {self.path} cannot be written any more ({why})")
            return
        self._next_s = time.monotonic() + COPY_PAUSE_S
        if not self._is_full:
            self._is_full = True
            self.tell(
                f"WARNING: the log {self.path} cannot be written ({why}): make room there; the training goes on, and up to "
                f"{MOST_WAITING_BYTES:,} bytes of lines wait until then"
            )

    def _end(self, why: str) -> None:
        self.ended = True
        self.tell(f"WARNING: {why}: the training goes on without it")

    def run(self, options: Mapping[str, Any], **more: Any) -> None:
        """The first line: what runs, where, with which versions, when, from which step on.

        Args:
            more: other fields of `RunLine`.
        """
        self.write(
            RunLine(
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), convoy=__version__,
                torch=torch.__version__, python=platform.python_version(), machine=platform.machine(),
                system=platform.platform(), from_step=self.done, options=dict(options), modes=modes(), **more,
            )
        )  # fmt: skip

    def plan(self, plan: Plan, graph: Graph) -> None:
        self.graph = graph
        self.write(plan_line(plan, graph))

    def reshare(self, step: int, decision: Reshare) -> None:
        """Other shares, or another plan, after a step, and why."""
        parts = {} if self.graph is None else plan_parts(decision.plan, self.graph)
        plan = json.loads(decision.plan.to_json())
        self.write(ReshareLine(step=step, reason=decision.reason, plan=plan, **parts))

    def on_step(self, result: StepResult) -> None:
        fields = asdict(result)
        self.write(StepLine(s=round(max(0.0, fields.pop("ended_s") - self._start_s), 6), **fields))

    def on_evaluation(self, result: Evaluation) -> None:
        self.write(EvaluationLine(step=result.step, epoch=result.epoch, accuracy=result.accuracy, best=result.is_best))

    def on_epoch(self, result: EpochResult) -> None:
        self.write(EpochLine(**asdict(result)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self._next_s = 0.0
            self._write_waiting()
            if missing := self._waiting.count(b"\n") + self._left_out:
                self.tell(f"WARNING: the log {self.path} lacks its last {missing} lines: there was no room for them")
        if self._file is not None:
            os.close(self._file)


def _copied(path: Path) -> None:
    """Put a copy in the place of a file, so that whoever has it open writes no more into what others read."""
    copy = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        shutil.copyfile(path, copy)
        copy.replace(path)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise


def _opened(path: Path, *, going_on: bool) -> int:
    """A log to append to: empty, or with the whole lines that it has. OSError; InputError where another run writes it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        os.set_blocking(handle, True)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another run writes the log {path}: wait until it ends, or name another file"
                ) from None
            except OSError:
                pass  # a file system without locks
            # What a killed run left of its last line: the next one must not be joined to it.
            os.ftruncate(handle, _whole_lines_bytes(handle) if going_on else 0)
        return handle
    except BaseException:
        os.close(handle)
        raise


def _whole_lines_bytes(handle: int) -> int:
    stop = os.fstat(handle).st_size
    while stop:
        start = max(0, stop - 65_536)
        if (place := os.pread(handle, stop - start, start).rfind(b"\n")) >= 0:
            return start + place + 1
        stop = start
    return 0
