"""A training of one device that is asked to leave or stop finishes the step and saves it."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

import convoy
from convoy.checkpoint import Checkpointer
from convoy.checkpoint.run_folder import latest
from convoy.comm.group import AloneGroup
from convoy.elastic.members import StoppedError
from convoy.machine.process import END, LEAVE, LEAVE_TOO, handle_signals
from convoy.runtime.module import Distributed
from convoy.train import Members
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from convoy.train.record import Observer, StepResult
from tests.support import nets
from tests.train.test_training import Samples, made_optimizer

LAST = 5
"""The step in which the signal comes; an epoch has three."""


class Killing(Observer):
    """An observer that signals this process during step `LAST`."""

    def __init__(self, signum: signal.Signals) -> None:
        self.signum = signum
        self.told: list[StepResult] = []

    def on_step(self, result: StepResult) -> None:
        self.told.append(result)

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        if step + 1 == LAST:
            os.kill(os.getpid(), self.signum)


def distributed() -> Distributed:
    model = nets.build("two-conv")
    example = Samples()[0][0].unsqueeze(0).expand(2, -1, -1, -1)
    group = AloneGroup(torch.device("cpu"), 20.0)
    return convoy.distribute(model, convoy.make_plan("data", model, example, 20, group), group, example)


@pytest.mark.parametrize("signum", [LEAVE, END, LEAVE_TOO])
def test_a_signal_ends_the_training_after_the_step_and_saves_it(signum: signal.Signals, tmp_path: Path) -> None:
    model = distributed()
    training = Training(model, made_optimizer(model))
    keeper = Checkpointer(tmp_path / "run", model, training.optimizer)
    keeper.begin(resume=False)
    members, observer = Members(model, training.optimizer), Killing(signum)
    says = f"the training was stopped after step {LAST}, as requested; --resume continues from there"
    loaders = Loader(Samples(), 20, model), Loader(Samples(), 23, model, shuffle=False)
    with handle_signals(members), pytest.raises(StoppedError, match=f"^{re.escape(says)}$"):
        fit(training, *loaders, 10, observer, None, keeper, members=members)
    assert [result.step + 1 for result in observer.told] == [*range(1, LAST + 1)]
    found = latest(tmp_path / "run")
    assert found is not None
    assert found.name.endswith(f"-step-{LAST}")
    weights = {name: value.clone() for name, value in model.full_state_dict().items()}

    resumed = distributed()
    again = Checkpointer(tmp_path / "run", resumed, made_optimizer(resumed))
    assert (again.begin(resume=True).step, again.progress.epoch, again.progress.batch) == (LAST, 1, 2)
    for name, value in resumed.full_state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_script_of_one_device_ends_after_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = distributed()
    optimizer = made_optimizer(model)
    members = Members(model, optimizer)

    def script() -> None:
        for _ in range(10):
            for x, y in Loader(Samples(), 20, model):
                with members.step() as attempt:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    if members.steps + 1 == LAST:
                        os.kill(os.getpid(), LEAVE)
                    optimizer.step()
                assert attempt.finished

    with pytest.raises(SystemExit, match="2"):
        script()
    assert capsys.readouterr().err == f"error: the training was stopped after step {LAST}, as requested\n"
    members.close()


def test_before_the_first_step_a_signal_ends_the_process() -> None:
    members = Members(model := distributed(), made_optimizer(model))
    assert members.generation is None, "the signal ends the process then"
    members.begin()
    assert members.generation is not None
