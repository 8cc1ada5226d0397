"""A user-written loop produces the log of `convoy train` and informs observers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.plan.presets import Speeds
from convoy.report.page import write_report
from convoy.runlog.reader import read_log
from convoy.train import EpochResult, Evaluation, Observer, StepResult
from convoy.train.rebalance import Reshard
from tests.support import nets
from tests.support.one_device import by_name
from tests.support.threads import run_on_threads

X = torch.zeros(1, 3, 8, 8, dtype=torch.float64)


class Noted(Observer):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, result: StepResult) -> None:
        self.told.append(result)

    def on_evaluation(self, result: Evaluation) -> None:
        self.told.append(result)

    def on_epoch(self, result: EpochResult) -> None:
        self.told.append(result)


def part_of(group: Group, model: torch.nn.Module) -> Any:
    plan = by_name("data", "two-conv", speeds=Speeds((1.0, 1.0)))
    return convoy.distribute(model, plan, group, X)


def test_user_loop_on_two_devices_makes_a_page(tmp_path: Path) -> None:
    def work(group: Group) -> tuple[list[float], list[Any], str]:
        torch.manual_seed(0)
        part = part_of(group, nets.build("two-conv"))
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        losses, noted = [], Noted()
        with convoy.record(
            part, optimizer, observers=[noted], settings={"data": "made up", "path": Path("x")}, folder=tmp_path / "run"
        ) as run:
            for epoch in range(2):
                for number in range(3):
                    loss = torch.tensor(float(10 * epoch + number))
                    run.step(loss, None if number < 2 else 4)
                    losses.append(float(loss))
                    if number == 1:
                        run.evaluation(0.25)
                optimizer.param_groups[0]["lr"] *= 0.5
                run.epoch(0.5 - 0.1 * epoch)
            run.tell(5, Reshard(part.plan, (), "because"))
        return losses, noted.told, str(run.folder)

    (losses, told, place), other = run_on_threads(2, work)
    assert place == other[2] == str(tmp_path / "run")
    assert [type(each) for each in told] == [
        StepResult,
        StepResult,
        Evaluation,
        StepResult,
        Evaluation,
        EpochResult,
    ] * 2
    steps, theirs = ([each for each in all_of if not isinstance(each, EpochResult)] for all_of in (told, other[1]))
    assert steps == theirs, "every device's observers are told the same; only the seconds of an epoch are its own"
    record = read_log(tmp_path / "run" / "log.jsonl")
    assert [row.loss for row in record.steps] == losses
    assert [row.lr for row in record.steps] == [0.1] * 3 + [0.05] * 3
    batch = record.plan.plan.batch if record.plan is not None else 0
    assert [row.samples for row in record.steps] == [batch, batch, 4] * 2
    assert [(row.step, row.accuracy, row.best) for row in record.evaluations] == [
        (2, 0.25, True), (3, 0.5, True), (5, 0.25, False), (6, 0.4, False),
    ]  # fmt: skip
    assert record.epochs[0].loss == pytest.approx((0 * batch + 1 * batch + 2 * 4) / (2 * batch + 4))
    assert [each.line.what for each in record.plans] == ["plan", "reshare"]
    assert len(record.utilization) == 2
    assert record.system
    assert record.end is not None
    text = write_report(tmp_path / "run").read_text()
    assert " on made up</h1>" in text
    assert "Finished: 6 steps." in text


def test_failing_loop_leaves_a_log_without_an_end(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        part = part_of(group, nets.build("two-conv"))

        def loop() -> None:
            with convoy.record(part, torch.optim.SGD(part.parameters(), lr=0.1), folder=tmp_path) as run:
                run.step(1.0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            loop()

    run_on_threads(2, work)
    record = read_log(tmp_path / "log.jsonl")
    assert (len(record.steps), record.end) == (1, None)


def test_uncreatable_folder_is_reported_on_every_device(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(group: Group) -> str:
        part = part_of(group, nets.build("two-conv"))
        with pytest.raises(InputError) as refused:
            convoy.record(part, torch.optim.SGD(part.parameters(), lr=0.1), folder=tmp_path / "file" / "run")
        return str(refused.value)

    assert all("cannot make the folder" in words for words in run_on_threads(2, work))
