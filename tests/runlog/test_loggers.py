"""Loggers pass numbers to other tools: a slow, broken or missing one does not affect training."""

import json
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import convoy.cli.train_job  # noqa: F401 - before the first look at open files
from convoy import cli
from convoy.data import load
from convoy.runlog import loggers
from convoy.runlog.loggers import Logger, MetricRow, to_mlflow, to_wandb
from convoy.runlog.reader import read_log
from convoy.runlog.schema import SystemLine
from convoy.train.record import EpochResult, Evaluation, StepResult
from tests.support.processes import PLACE

load("digits")  # imports scikit-learn, likewise

TINY = ["--net", "two-conv:4:6", "--limit", "80", "--batch", "32", "--speeds", "1"]
"""Epochs of three steps: 32, 32, 16."""

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONVOY_RUNS", str(tmp_path / "runs"))


def train(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["convoy", "train", *TINY, *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def rows_of(log: Path, what: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, log.read_text().splitlines()) if row["what"] == what]


def step(number: int) -> StepResult:
    return StepResult(number, 0, 2.0 - number, 32, 0.1)


class Recording:
    """A sink that stores its input."""

    def __init__(self) -> None:
        self.rows: list[MetricRow] = []
        self.ended: list[bool] = []
        self.threads: set[int] = set()

    def write(self, rows: Sequence[MetricRow]) -> None:
        self.threads.add(threading.get_ident())
        self.rows += rows

    def close(self, *, failed: bool) -> None:
        self.ended.append(failed)


# --------------------------------------------------------------------------------------------------------- the interface


def test_a_sink_gets_every_number_in_order() -> None:
    """It runs on a separate thread. The first step after an evaluation has no rate."""
    sink, told = Recording(), list[str]()
    with Logger("it", lambda: sink, told.append) as logger:
        for number in range(3):
            logger.on_step(step(number))
        logger.on_evaluation(Evaluation(0, 3, 0.25, True, True))
        logger.on_epoch(EpochResult(0, 1.0, 0.25, 1.0, 32.0, 0.1))
        logger.on_step(step(3))
        logger.on_system(SystemLine(
            step=4, s=1.0, cores=(0.5, 1.0), host_processor=(0.75, None), memory_bytes=(10, 20), accelerator_bytes=(None, 5),
            sent_bytes_per_s=(1.0, 2.0), received_bytes_per_s=(2.0, 1.0),
        ))  # fmt: skip
    assert [row.step for row in sink.rows] == [0, 1, 2, 3, 3, 4]
    names = [set(row.numbers) for row in sink.rows]
    each = {"loss", "learning rate"}
    assert names[:5] == [each, {*each, "samples per s"}, {*each, "samples per s"}, {"accuracy"}, each]
    assert [row.numbers["loss"] for row in sink.rows if "loss" in row.numbers] == [2.0, 1.0, 0.0, -1.0]
    used = sink.rows[-1].numbers
    assert used["device 0/cores"] == 0.5
    assert used["device 1/sent bytes per s"] == 2.0
    assert "device 0/accelerator bytes" not in used
    assert "device 1/host processor" not in used
    assert (sink.ended, told) == ([False], [])
    assert threading.get_ident() not in sink.threads
    with pytest.raises(ZeroDivisionError), Logger("it", lambda: sink, told.append):
        raise ZeroDivisionError
    assert sink.ended == [False, True], "a run that failed is told as one"


@pytest.mark.parametrize("where", ["make", "write", "close"])
def test_a_sink_that_fails_is_reported_once(where: str) -> None:
    class Broken(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.fail("make")

        def write(self, rows: Sequence[MetricRow]) -> None:
            super().write(rows)
            self.fail("write")

        def close(self, *, failed: bool) -> None:  # noqa: ARG002
            self.fail("close")

        def fail(self, here: str) -> None:
            if here == where:
                raise RuntimeError("no such host\nand much more")

    told: list[str] = []
    with Logger("it", Broken, told.append) as logger:
        for number in range(100):
            logger.on_step(step(number))
            time.sleep(0.0005)
    assert told == ["WARNING: it failed (no such host): training continues without it"]


def test_hanging_sink_delays_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "CLOSE_S", 0.2)
    monkeypatch.setattr(loggers, "MAX_ROWS", 50)
    go_on, told = threading.Event(), list[str]()

    class Hanging(Recording):
        def write(self, rows: Sequence[MetricRow]) -> None:
            go_on.wait(LIMIT_S)
            super().write(rows)

    sink = Hanging()
    with Logger("it", lambda: sink, told.append) as logger:
        for number in range(1000):
            logger.on_step(step(number))
    assert told == ["WARNING: it is slower than the training: some numbers are dropped"]
    go_on.set()
    logger._thread.join(LIMIT_S)
    assert 50 <= len(sink.rows) <= 101, "what it held, and what waited"


def test_training_continues_when_its_logger_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the command calls it, with a package of that name that is broken."""
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("raise ImportError('libsomething is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    log = tmp_path / "log"
    assert train(monkeypatch, "--log", str(log), "--mlflow", "http://127.0.0.1:9") == 0
    shown = capsys.readouterr().out
    assert shown.count("WARNING: MLflow failed (libsomething is missing): training continues without it") == 1
    assert read_log(log).end is not None


@pytest.mark.parametrize(("argv", "words"), [
    (["--wandb", "mine"], "wandb is not installed: pip install 'convoy-train[wandb]', or leave it out"),
    (["--mlflow", "http://host"], "mlflow is not installed: pip install 'convoy-train[mlflow]', or leave it out"),
    (["--tensorboard", "."], "tensorboard is not installed: pip install 'convoy-train[tensorboard]', or leave it out"),
])  # fmt: skip
def test_a_logger_that_cannot_work_is_refused_before_anything_starts(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("convoy.cli.train_job.run_device", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert train(monkeypatch, *argv) == 2
    assert words in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- real loggers


def test_tensorboard_reads_back_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log, board = tmp_path / "log", tmp_path / "deep" / "board"
    schedule = ["--schedule", "step", "--drop-epochs", "1", "--epochs", "2"]
    assert train(monkeypatch, *schedule, "--log", str(log), "--tensorboard", str(board)) == 0
    events = accumulator.EventAccumulator(str(board))
    events.Reload()
    assert {"accuracy", "learning rate", "loss", "samples per s", "device 0/cores"} <= set(events.Tags()["scalars"])

    def told(name: str) -> list[tuple[int, Any]]:
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]

    steps = rows_of(log, "step")
    assert [(row["step"], row["loss"]) for row in steps] == told("loss")
    assert [(row["step"], row["lr"]) for row in steps] == told("learning rate")
    assert [row["lr"] for row in steps] == pytest.approx([0.01] * 3 + [0.001] * 3)
    assert [(row["step"], row["accuracy"]) for row in rows_of(log, "evaluation")] == told("accuracy")
    assert [event.step for event in events.Scalars("samples per s")] == [1, 2, 4, 5], "not the first after a test"
    assert all(event.value > 0 for event in events.Scalars("samples per s"))


@pytest.mark.filterwarnings("default")  # of its own libraries
def test_wandb_offline_reads_back_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'convoy-train[wandb]'")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loggers, "CLOSE_S", 60.0)
    told: list[str] = []
    with to_wandb("convoy-tests", "a run", {"lr": 0.1}, tmp_path, told.append) as logger:
        for number in range(5):
            logger.on_step(step(number))
        logger.on_evaluation(Evaluation(0, 5, 0.5, True, True))
    assert told == []
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for name in (b"loss", b"learning rate", b"samples per s", b"accuracy", b"convoy-tests"):
        assert name in content
    import wandb

    wandb.teardown()


@pytest.mark.filterwarnings("default")  # of its own libraries
def test_mlflow_reads_back_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: pip install 'convoy-train[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="needs a store in sqlite: pip install mlflow")
    monkeypatch.setattr(loggers, "CLOSE_S", 60.0)
    monkeypatch.chdir(tmp_path)  # it makes a folder for artifacts
    told: list[str] = []
    store = tmp_path / "store.db"
    try:
        with to_mlflow(f"sqlite:///{store}", "a run", {"lr": 0.1, "net": "x"}, told.append) as logger:
            for number in range(5):
                logger.on_step(step(number))
            logger.on_evaluation(Evaluation(0, 5, 0.5, True, True))
    finally:
        monkeypatch.undo()
    assert told == []
    with sqlite3.connect(store) as database:
        assert database.execute("select name, status from runs").fetchall() == [("a run", "FINISHED")]
        assert set(database.execute("select key, value from params")) == {("lr", "0.1"), ("net", "x")}
        losses = database.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
        assert losses == [(number, 2.0 - number) for number in range(5)]
        assert database.execute("select step, value from metrics where key = 'accuracy'").fetchall() == [(5, 0.5)]
    database.close()
