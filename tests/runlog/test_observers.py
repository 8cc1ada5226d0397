"""Measurements of training devices: time by cause and system usage."""

import json
from pathlib import Path

import psutil
import pytest
import torch

from convoy.comm.group import AloneGroup, Group
from convoy.runlog.observers import Meters, Utilization
from convoy.runlog.schema import SystemLine
from convoy.runlog.writer import RunLog
from convoy.runtime.clock import Clock
from convoy.train.record import EpochResult, Evaluation
from tests.support.threads import run_on_threads


def test_evaluation_and_the_first_step_after_it_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calculated by hand with a fake clock: two steps of 2 s and a test of 100 s."""
    now_s = 0.0
    monkeypatch.setattr("convoy.runlog.observers.time.perf_counter", lambda: now_s)
    clock = Clock(torch.device("cpu"))
    with RunLog(tmp_path / "log") as log:
        busy = Utilization(AloneGroup(torch.device("cpu")), clock, log)
        for kind, wall_s, compute_s, exchange_s in (
            ("step", 5.0, 5.0, 0.0), ("step", 2.0, 1.0, 0.5), ("step", 2.0, 1.5, 0.25), ("test", 100.0, 90.0, 5.0),
            ("step", 7.0, 3.0, 3.0), ("step", 2.0, 0.5, 1.0),
        ):  # fmt: skip
            now_s += wall_s
            clock.add(compute_s, {"layer": 1.0}, "forward")
            clock.exchange_s += exchange_s
            if kind == "step":
                busy.on_step_end(0, 10)
            else:
                busy.on_evaluation(Evaluation(0, 3, 0.5, ends_epoch=False, is_best=True))
        busy.on_epoch(EpochResult(0, 1.0, None, 1.0, 1.0, 0.1))
        busy.on_epoch(EpochResult(1, 1.0, None, 1.0, 1.0, 0.1))
    first, second = [
        row for row in map(json.loads, (tmp_path / "log").read_text().splitlines()) if row["what"] == "busy"
    ]
    assert (first["steps"], first["wall_s"], first["compute_s"], first["exchange_s"]) == (3, [6.0], [3.0], [1.75])
    assert (second["steps"], second["wall_s"]) == (0, [0.0]), "an epoch counts by itself"


def test_devices_report_their_system_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by hand. A line follows the first step, then as many steps as last 5 s."""
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: type("Info", (), {"rss": 7_000_000})())
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda _: 150.0)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 25.0)

    class Counted(Meters):
        """A second per step, in which device 0 sends 1,000 bytes and device 1 twice as many."""

        seconds = 0

        def _read_use(self) -> tuple[float, float]:
            use = super()._read_use()
            sent = [0, 0]
            sent[1 - self.group.device] = 1000 * self.seconds * (1 + self.group.device)
            self.last_s, self.last_sent = float(self.seconds), tuple(sent)
            return use

    def work(group: Group) -> list[SystemLine]:
        lines: list[SystemLine] = []
        meters = Counted(group, lines.append, 10)
        for number in range(10, 22):
            meters.seconds += 1
            meters.on_step_end(number, 8)
        meters.on_epoch(EpochResult(0, 1.0, None, 1.0, 1.0, 0.1))
        meters.on_epoch(EpochResult(1, 1.0, None, 1.0, 1.0, 0.1))
        return lines

    ours, theirs = run_on_threads(2, work)
    assert [line.step for line in ours] == [11, 16, 21, 22] == [line.step for line in theirs]
    for line in ours:
        assert line.cores == (1.5, 1.5)
        assert line.host_processor == (0.25, 0.25)
        assert line.memory_bytes == (7_000_000, 7_000_000)
        assert line.accelerator_bytes == (None, None)
        assert line.sent_bytes_per_s == pytest.approx((1000.0, 2000.0))
        assert line.received_bytes_per_s == pytest.approx((2000.0, 1000.0))
