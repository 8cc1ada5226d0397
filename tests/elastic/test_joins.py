"""Devices that join a training change no number: losses, weights, batch norm statistics, optimizer state."""

import copy
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from convoy.api import distribute, loader, make_plan
from convoy.comm.connection import Connection, Credentials, Fields, credentials_of
from convoy.comm.environment import ProcessEnv, listen_at
from convoy.comm.group import AloneGroup, ChangingGroup, Group
from convoy.comm.job_key import make_key
from convoy.comm.processes import meet
from convoy.comm.store import close_store, host_store
from convoy.elastic.admission import AdmissionThread, ScriptAdmission, Verdict, facts_of
from convoy.elastic.entrance import MOST_ADDRESSES, Entrance
from convoy.elastic.members import JoinOptions, LeftError, Members, StoppedError, may_leave
from convoy.elastic.regroup import Home, Membership
from convoy.errors import ConvoyError, InputError
from convoy.runlog.reader import read_log
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from convoy.train.adopt import AdoptedLoader
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Training, accuracy, fit
from convoy.train.record import Observer, StepResult
from lab.chaos import TIGHT, Case, build, make_data, make_net, whole_state
from tests.support.losses import Poisoned
from tests.support.torch_seed import torch_seed

CPU = torch.device("cpu")
EXAMPLE = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
TIMEOUT_S = 30.0
ALONE = ProcessEnv(0, 1, 0, 1, "127.0.0.1", 1, hosted=False, attempt=0)


class Everybody:
    """An admission policy that admits every device, or keeps some as spares."""

    def __init__(self, spare: Callable[[Fields, Sequence[int]], str] = lambda _facts, _members: "") -> None:
        self.spare, self.came_as, self.learned = spare, [], None

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
        reason = self.spare(facts, members)
        return ("spare", reason) if reason else ("wanted", "")

    def note_joined(self, device: int, facts: Fields) -> None:  # noqa: ARG002
        self.came_as.append(device)

    def knowledge(self) -> Any:
        return {"a": 1}

    def learn(self, knowledge: Any) -> None:
        self.learned = knowledge


@dataclass
class Job:
    """A training whose devices are threads of this process."""

    case: Case
    joining: Sequence[str] = ()
    judge: Callable[[], Everybody] = Everybody
    built: dict[str, Distributed] = field(default_factory=dict)
    net: nn.Module = field(init=False)
    told: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, tuple[list[float], dict[str, Tensor]]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    address: tuple[str, int] | None = None
    members: dict[str, Membership] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)  # after that step all wait until this device is wanted
    strikes: dict[tuple[str, int], Callable[[Members], None]] = field(default_factory=dict)
    entrances: dict[str, Entrance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with torch_seed(self.case.seed):
            self.net = make_net()
        for name in self.joining:  # torch cannot be traced while other threads train
            self.built[name] = self.build(
                ChangingGroup(AloneGroup(CPU, TIMEOUT_S)), copy.deepcopy(self.net).apply(_zeroed)
            )

    def device(
        self, name: str, group: Group, entrance: tuple[Entrance, Fields] | None = None, home: Home | None = None
    ) -> None:
        try:
            self._train(name, group, entrance, home)
        except BaseException as error:
            self.errors.append(error)
            group.close(error)
            if name in self.members and not isinstance(error, LeftError | SystemExit):  # a process would have ended
                self.members[name].depart(ConvoyError(str(error)))

    def build(self, group: Group, net: nn.Module) -> Distributed:
        plan = make_plan(
            self.case.plan, net, EXAMPLE, self.case.batch, group, speeds=[1.0 + d for d in range(group.devices)]
        )
        return distribute(net, plan, group, EXAMPLE)

    def made(self, model: nn.Module, part: Distributed | None) -> tuple[Training, Any, Any]:
        """Return the training and its loaders, for a distributed model (`part`) or an ordinary one."""
        return build(self.case, model, part)

    def _train(self, name: str, group: Group, entrance: Any, home: Home | None) -> None:
        part = self.built[name] if name in self.built else self.build(group, copy.deepcopy(self.net))
        training, train, test = self.made(part, part)
        others = [each for each in (training.schedule, training.scaler) if each is not None]
        told = self.told.setdefault(name, [])
        members = Members(
            part, training.optimizer, others=others, every=self.case.every, tell=told.append,
            joins=JoinOptions(self.judge(), home, entrance),
        )  # fmt: skip
        job = self

        class Marks(Observer):
            def on_step(self, result: StepResult) -> None:
                done = result.step + 1
                job.steps[name] = done
                if members.membership is not None:
                    members.membership.offer = {"case": "this one"}
                    job.address = members.membership.addresses[0]
                if (strike := job.strikes.pop((name, done), None)) is not None:
                    strike(members)
                if (expected := job.expected.get(done)) is not None and members.admissions is not None:
                    job.expect(members.admissions, expected)

        if members.membership is not None:
            members.membership.offer = {"case": "this one"}
            self.members[name] = members.membership
        rebalancer = Rebalancer(part, training.optimizer) if self.case.rebalance else None
        history = fit(training, train, test, self.case.epochs, Marks(), rebalancer, members=members)
        state = state_of(training)
        members.close()
        group.close()
        self.results[name] = history.losses, state

    def expect(self, admissions: AdmissionThread, name: str) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        if admissions.membership.generation.members[0] == admissions.membership.me:
            while name not in self.steps and not admissions.wanted():
                assert time.monotonic() < until_s
                time.sleep(0.02)

    def wait(self, known: Callable[[], Any]) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not (self.errors or known()):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        if self.errors:
            raise self.errors[0]


def _zeroed(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


@contextmanager
def started(job: Job, devices: int) -> Iterator[list[threading.Thread]]:
    """Start the job's first devices; end all threads afterwards."""
    port = host_store("127.0.0.1", credentials_of(ALONE))  # which all threads of this process find
    env = [ProcessEnv(d, devices, d, devices, "127.0.0.1", port, hosted=False, attempt=0) for d in range(devices)]

    def begin(device: int) -> None:
        group = meet(env[device], CPU, TIMEOUT_S, number=0) if devices > 1 else AloneGroup(CPU, TIMEOUT_S)
        home = Home("127.0.0.1", 0, credentials_of(env[0]), "members of a test") if devices == 1 else None
        job.device(str(device), ChangingGroup(group), home=home)

    threads = [threading.Thread(target=begin, args=(d,), name=f"device-{d}", daemon=True) for d in range(devices)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(TIMEOUT_S)
        close_store("127.0.0.1", port)
        assert not any(thread.is_alive() for thread in threads)


def join_job(job: Job, name: str, threads: list[threading.Thread], **facts: Any) -> None:
    """Start one more device that asks to join."""
    job.wait(lambda: job.address)
    assert job.address is not None
    entrance = job.entrances[name] = Entrance([job.address], credentials_of(ALONE))
    assert entrance.hello(5.0) == {"case": "this one"}
    arguments = (name, job.built[name].group, (entrance, {"title": name, **facts}))
    threads.append(threading.Thread(target=job.device, args=arguments, name=f"joining-{name}", daemon=True))
    threads[-1].start()


def alone(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    training, train, test = job.made(copy.deepcopy(job.net), None)
    history = fit(training, train, test, job.case.epochs)
    return history.losses, state_of(training)


def state_of(training: Training) -> dict[str, Tensor]:
    scale = {} if training.scaler is None else {"scale": torch.tensor(training.scaler.get_scale())}
    return {**whole_state(training.model, training.optimizer), **scale}


def check(job: Job, names: Sequence[str]) -> None:
    if job.errors:
        raise job.errors[0]
    losses, state = alone(job)
    assert sorted(job.results) == sorted(names)
    for name in names:
        found, held = job.results[name]
        assert found == pytest.approx(losses[-len(found) :], rel=TIGHT)
        assert held.keys() == state.keys()
        for key in state:
            assert float((held[key] - state[key]).abs().max()) < TIGHT * max(1.0, float(state[key].abs().max())), key
    assert len(job.results["0"][0]) == len(losses)


@pytest.mark.parametrize(
    ("plan", "optimizer", "devices", "every"),
    [("data", "adam", 1, 1), ("model", "sgd", 2, 3), pytest.param("hybrid", "adam", 2, 1, marks=pytest.mark.slow)],
)
def test_joining_devices_change_no_number(plan: str, optimizer: str, devices: int, every: int) -> None:
    job = Job(Case(3, devices, plan, optimizer, epochs=3, every=every), ["first", "second"])
    job.expected = {**dict.fromkeys(range(2, 7), "first"), **dict.fromkeys(range(13, 18), "second")}  # after a test
    with started(job, devices) as threads:
        join_job(job, "first", threads)
        job.wait(lambda: "first" in job.steps)
        join_job(job, "second", threads)
        job.wait(lambda: "second" in job.steps)
    check(job, [*map(str, range(devices)), "first", "second"])
    assert sum("joined" in line for line in job.told["0"]) == 2, job.told
    assert re.match(rf"joined as device \d+; {devices + 1} train after step ", job.told["first"][0])


@dataclass
class Scaled(Job):
    """A training with loss scaling that skips some steps."""

    def made(self, model: nn.Module, part: Distributed | None) -> tuple[Training, Any, Any]:
        training, train, test = super().made(model, part)
        scaler = GradScaler(model, init_scale=8.0, growth_interval=2)
        return Poisoned(**{**vars(training), "scaler": scaler}), train, test


ALL = Case(
    12, 2, "sharded", "adam", epochs=3, average=True, accumulate=2, clip_norm=1.0, schedule="step", rebalance=True, every=3
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [replace(ALL, rebalance=False, every=1), pytest.param(replace(ALL, plan="model"), marks=pytest.mark.slow)]
)
def test_averages_scales_and_micro_batches_continue_when_a_device_joins(case: Case) -> None:
    job = Scaled(case, ["first"])
    job.expected = dict.fromkeys(range(2, 7), "first")
    with started(job, case.devices) as threads:
        join_job(job, "first", threads)
    check(job, ["0", "1", "first"])
    assert any("joined" in line for line in job.told["0"]), job.told


def test_neighbours_leave_one_after_another() -> None:
    assert may_leave([True, True, False]) == [1]
    assert may_leave([True, False, True, False]) == [0, 2]
    assert may_leave([True, True]) == [], "a job that ends"


def test_a_joined_device_continues_when_all_others_leave() -> None:
    job = Job(Case(4, 1, "model", "adam", epochs=2), ["first"])
    job.expected = dict.fromkeys(range(2, 7), "first")
    job.strikes = {("0", 8): lambda members: members.leave()}
    with started(job, 1) as threads:
        join_job(job, "first", threads)
    left = [error for error in job.errors if isinstance(error, LeftError)]
    assert job.errors == left
    losses, state = alone(job)
    found, held = job.results["first"]
    assert found == pytest.approx(losses, rel=TIGHT), "it joined in the first epoch, and knows all of its losses"
    assert all(float((held[key] - state[key]).abs().max()) < TIGHT for key in state)


def test_a_stopped_training_ends_on_all_devices_after_the_same_step() -> None:
    job = Job(Case(8, 2, "hybrid", "adam", epochs=2), ["first"])
    job.expected = dict.fromkeys(range(2, 7), "first")
    job.strikes = {("first", 8): lambda members: members.end()}
    with started(job, 2) as threads:
        join_job(job, "first", threads)
    assert [type(error) for error in job.errors] == [StoppedError] * 3, job.errors
    assert len({str(error) for error in job.errors}) == 1
    assert re.match(r"the training was stopped after step (9|10), as requested$", str(job.errors[0]))


def test_a_training_that_all_leave_ends_after_the_same_step() -> None:
    job = Job(Case(8, 2, "hybrid", "adam", epochs=2))
    job.strikes = {(name, 5): lambda members: members.leave() for name in "01"}
    with started(job, 2):
        pass
    assert [type(error) for error in job.errors] == [StoppedError] * 2, job.errors
    assert len({str(error) for error in job.errors}) == 1


def test_messages_name_a_device_by_its_first_id() -> None:
    def fails(_: Members) -> None:
        raise ValueError("no such image")

    job = Job(Case(8, 3, "data", "sgd", epochs=2))
    job.strikes = {("0", 3): lambda members: members.leave(), ("2", 8): fails}
    with started(job, 3):
        pass
    assert sorted(type(error).__name__ for error in job.errors) == ["LeftError", "ValueError"]
    left, lost = job.told["1"]
    assert left.startswith("device 0 left the job; 2 continue after step")
    assert re.match(
        r"device 2 \(host \S+, cpu\) left because of its own error: ValueError: no such image; 1 continue after step",
        lost,
    )


def test_joining_device_that_misses_the_regroup_is_ignored() -> None:
    job = Job(Case(5, 2, "hybrid", "sgd", epochs=2))
    job.expected = {3: "nobody"}
    with started(job, 2):
        job.wait(lambda: job.address)
        assert job.address is not None
        entrance = Entrance([job.address], credentials_of(ALONE))
        entrance.hello(5.0)
        words = {"do": "ask", "mark": "a mark", "address": ["127.0.0.1", 9], "facts": {}}
        until_s = time.monotonic() + TIMEOUT_S
        while "call" not in entrance._request(job.address, words):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        job.expected.clear()
        entrance._disconnect()
    check(job, ["0", "1"])
    assert len(job.told["0"]) == 1


def test_a_spare_joins_when_the_devices_have_changed() -> None:
    def spare(facts: Fields, members: Sequence[int]) -> str:
        return "too slow" if facts["title"] == "slow" and 0 in members else ""

    job = Job(Case(6, 2, "data", "sgd", epochs=2), ["slow"], lambda: Everybody(spare))
    job.strikes[("0", 2)] = lambda members: job.wait(lambda: members.admissions.wanted() or job.told.get("slow"))
    job.strikes[("0", 4)] = lambda members: members.leave()
    job.expected = dict.fromkeys(range(6, 12), "slow")  # device 1 admits it after device 0 has left
    with started(job, 2) as threads:
        join_job(job, "slow", threads)
    assert [type(error) for error in job.errors] == [LeftError]
    assert job.told["slow"][0] == "waits as a spare: too slow"
    assert re.match(r"joined as device \d+; 2 train after step ", job.told["slow"][1])
    losses, _ = alone(job)
    assert job.results["1"][0] == pytest.approx(losses, rel=TIGHT)


def test_each_regroup_uses_a_new_store() -> None:
    home = Home("127.0.0.1", 0, credentials_of(ALONE), "members of a test")
    membership = Membership(ChangingGroup(AloneGroup(CPU, TIMEOUT_S)), home)
    with closing(membership), socket.socket() as connected:
        membership.offer, membership._store = {}, ("127.0.0.1", 9)  # of the meeting that this generation came from
        words = {"do": "ask", "mark": "a mark", "address": ["127.0.0.1", 8], "facts": {}}
        connection = Connection(connected, None, b"", answers=True)
        waits = {"wait": True, "addresses": membership.addresses}
        assert membership._answer_join(words, connection) == waits
        (applicant,) = membership.applicants.waiting("none")
        applicant.verdict = "wanted"
        membership.grant(membership.number([applicant]))
        assert membership._state.called is not None
        assert membership._answer_join(words, connection) == waits


@dataclass
class OwnLoop(Job):
    """A script's loop, with each device's losses by step, test results and weights."""

    rows: dict[str, tuple[dict[int, float], list[float], dict[str, Tensor]]] = field(default_factory=dict)

    def _train(self, name: str, group: Group, entrance: Any, home: Home | None) -> None:
        part = self.built[name] if name in self.built else self.build(group, copy.deepcopy(self.net))
        optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        has_epochs: Callable[[], bool] = lambda: members._epoch is not None  # noqa: E731
        members = Members(
            part, optimizer, others=[schedule], tell=self.told.setdefault(name, []).append,
            joins=JoinOptions(ScriptAdmission(part, None, has_epochs), home, entrance),
        )  # fmt: skip
        if members.membership is not None:
            self.members[name] = members.membership
        train, test = self.loaders(part)
        losses: dict[int, float] = {}
        tests: list[float] = []
        for _ in members.epochs(self.case.epochs):
            part.train()
            for x, y in train:
                with members.step() as attempt:
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(part(x), y)
                    loss.backward()
                    optimizer.step()
                if not attempt.finished:  # the batch comes again
                    continue
                losses[members.steps] = float(loss.detach())
                self.steps[name] = members.steps
                if members.membership is not None and members.membership.offer is not None:
                    self.address = members.membership.addresses[0]
                if (strike := self.strikes.pop((name, members.steps), None)) is not None:
                    strike(members)
                if (expected := self.expected.get(members.steps)) is not None and members.admissions is not None:
                    self.expect(members.admissions, expected)
                if members.steps % 4 == 0:  # between two steps, within an epoch
                    members.repeated(lambda: accuracy(part, test))
            schedule.step()
            tests.append(members.repeated(lambda: accuracy(part, test)))
        state = members.repeated(part.full_state_dict)
        members.close()
        group.close()
        self.rows[name] = losses, tests, state

    def loaders(self, part: Distributed | None) -> tuple[Loader, Loader]:
        data = make_data(self.case)
        return loader(data, self.case.batch, part), loader(data, self.case.batch, part, shuffle=False)

    def come(self, name: str, threads: list[threading.Thread], address: tuple[str, int] | None = None) -> None:
        self.wait(lambda: self.address)
        entrance = Entrance([address or self.address or ("", 0)], credentials_of(ALONE))
        assert entrance.hello(5.0)["script"] is True
        arguments = (name, self.built[name].group, (entrance, facts_of(self.built[name])))
        threads.append(threading.Thread(target=self.device, args=arguments, name=f"joining-{name}", daemon=True))
        threads[-1].start()


def own_loop_alone(job: OwnLoop) -> tuple[dict[int, float], list[float], dict[str, Tensor]]:
    net, losses, tests = copy.deepcopy(job.net), {}, []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    train, test = job.loaders(None)
    for _ in range(job.case.epochs):
        net.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses[len(losses) + 1] = float(loss.detach())
        schedule.step()
        tests.append(accuracy(net, test))
    return losses, tests, net.state_dict()


@pytest.mark.parametrize(
    ("plan", "devices", "first"),
    [("data", 1, 8), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("model", 2, 6), ("hybrid", 2, 11)))],
)  # step 6 ends an epoch, step 8 is followed by a test within one; devices join before steps 7, 13, 19
def test_devices_join_a_script_at_the_start_of_an_epoch(plan: str, devices: int, first: int) -> None:
    job = OwnLoop(Case(12, devices, plan, "sgd", epochs=5), ["first", "second"])
    length = len(job.loaders(None)[0])
    job.expected = {**dict.fromkeys(range(first - 1, 13), "first"), **dict.fromkeys(range(13, 19), "second")}
    with started(job, devices) as threads:
        job.come("first", threads)
        job.wait(lambda: "first" in job.steps)
        job.come("second", threads)
    if job.errors:
        raise job.errors[0]
    losses, tests, state = own_loop_alone(job)
    assert sorted(job.rows) == sorted([*map(str, range(devices)), "first", "second"])
    for name, (found, tested, held) in job.rows.items():
        assert list(found) == list(range(min(found), 5 * length + 1)), "every step from the first on, once"
        assert found == pytest.approx({step: losses[step] for step in found}, rel=TIGHT)
        assert tested == pytest.approx(tests[-len(tested) :], rel=TIGHT)
        assert min(found) == 1 + length * (5 - len(tested)), f"{name} joined at the start of an epoch"
        for key, tensor in state.items():
            assert float((held[key] - tensor).abs().max()) < TIGHT * max(1.0, float(tensor.abs().max())), key
    assert min(job.rows["0"][0]) == 1
    assert 1 < min(job.rows["first"][0]) < min(job.rows["second"][0])


@dataclass
class OwnDataLoader(OwnLoop):
    """A script with a DataLoader that has its own generator."""

    def loaders(self, part: Distributed | None) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(3)
        source = DataLoader(make_data(self.case), self.case.batch, shuffle=True, generator=generator)
        if part is not None:
            part.takes_whole = True
        test = DataLoader(make_data(self.case), self.case.batch)
        return AdoptedLoader(source, part), AdoptedLoader(test, part)


def test_a_joined_device_continues_the_order_of_a_generator_when_the_others_leave() -> None:
    job = OwnDataLoader(Case(14, 1, "data", "sgd", epochs=5), ["first"])
    job.expected = dict.fromkeys(range(2, 13), "first")
    job.strikes[("0", 15)] = lambda members: members.leave()
    with started(job, 1) as threads:
        job.come("first", threads)
    assert [type(error.__cause__) for error in job.errors] == [LeftError]
    losses, _, state = own_loop_alone(job)
    found, _, held = job.rows["first"]
    assert max(found) == len(losses)
    assert found == pytest.approx({step: losses[step] for step in found}, rel=TIGHT)
    assert all(float((held[key] - state[key]).abs().max()) < TIGHT for key in state)


def test_a_script_without_epochs_refuses_joining_devices() -> None:
    part = OwnLoop(Case(13, 1, "data", "sgd", epochs=2), ["first"]).built["first"]
    verdict, reason = ScriptAdmission(part, None, lambda: False).decide(facts_of(part), (0,), 1)
    assert verdict == "refused"
    assert "members.epochs" in reason


def test_a_joining_device_trains_within_epochs_only() -> None:
    part = OwnLoop(Case(13, 1, "data", "sgd", epochs=2), ["first"]).built["first"]
    entrance = Entrance([("127.0.0.1", 9)], credentials_of(ALONE)), facts_of(part)
    members = Members(part, torch.optim.SGD(part.parameters(), lr=0.1), joins=JoinOptions(entrance=entrance))
    assert members.repeated(lambda: 1) is None, "the others did it before this device joined"
    with pytest.raises(InputError, match=r"members\.epochs"), members.step():
        pass


def test_a_joining_device_with_another_model_is_refused() -> None:
    job = OwnLoop(Case(13, 1, "data", "sgd", epochs=2), ["first"])
    refused: list[str] = []
    job.strikes = {("0", 2): lambda members: job.wait(lambda: members.admissions.wanted() or refused)}
    with started(job, 1):
        job.wait(lambda: job.address)
        assert job.address is not None
        entrance = Entrance([job.address], credentials_of(ALONE))
        entrance.hello(5.0)
        facts = facts_of(job.built["first"])
        facts["same"]["model"] = "another"
        group = job.built["first"].group
        assert isinstance(group, ChangingGroup)
        with pytest.raises(InputError, match=r"its model is another, that of the job is \w+: it must be the same"):
            entrance.enter(group, facts)
        refused.append("first")
    assert job.errors == []


@contextmanager
def lone_membership() -> Iterator[Membership]:
    home = Home("127.0.0.1", 0, credentials_of(ALONE), "members of a test")
    membership = Membership(ChangingGroup(AloneGroup(CPU, TIMEOUT_S)), home)
    try:
        yield membership
    finally:
        membership.close()


def test_a_join_request_to_a_wrong_address_is_refused() -> None:
    with lone_membership() as membership:
        with pytest.raises(InputError, match=r"no job that can be joined answers at 127\.0\.0\.1:9"):
            Entrance([("127.0.0.1", 9)], credentials_of(ALONE)).hello(0.1)
        with pytest.raises(InputError, match="this training admits no devices"):
            Entrance([membership.addresses[0]], credentials_of(ALONE)).hello(0.1)
        membership.offer = {}
        with pytest.raises(InputError, match="has another key"):
            Entrance([membership.addresses[0]], Credentials(make_key())).hello(0.1)


def test_an_early_join_request_is_repeated() -> None:
    with lone_membership() as membership:
        opened = threading.Timer(0.3, lambda: setattr(membership, "offer", {"version": "1"}))
        entrance = Entrance([membership.addresses[0]], credentials_of(ALONE))
        try:
            opened.start()
            assert entrance.hello(5.0) == {"version": "1"}
        finally:
            opened.join()
            entrance._disconnect()


def test_addresses_that_answer_are_asked_first() -> None:
    a, b, c = ("a", 1), ("b", 2), ("c", 3)
    joining = Entrance([a, b], Credentials(make_key()))
    joining._ask_next()
    assert joining.addresses == [b, a]
    joining._ask_first([c, b])
    assert joining.addresses == [c, b, a]
    joining._ask_first([])
    assert joining.addresses == [b, a, c]
    joining._ask_first([("host", port) for port in range(200)])
    assert len(joining.addresses) == MOST_ADDRESSES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_convoy_join_joins_convoy_train(tmp_path: Path) -> None:
    convoy = [sys.executable, "-m", "convoy"]
    with listen_at("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    subprocess.run(
        [*convoy, "fleet", "key", "job.key"], cwd=tmp_path, check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    options = (
        "--data digits --net two-conv:6:12 --plan hybrid --speeds 1,1 --devices cpu,cpu --epochs 40 --log log.jsonl"
    )
    command = [*convoy, "train", *options.split(), "--listen", address, "--job-key", "job.key"]
    with (tmp_path / "printed").open("wb") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path)
    try:
        come = [*convoy, "join", address, "--job-key", "job.key"]
        done = subprocess.run(come, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        printed = (tmp_path / "printed").read_text()
        assert done.returncode == 0, done.stderr + printed
        assert job.wait(300) == 0, printed
    finally:
        job.kill()
        job.wait()
    assert "joined as device 2; 3 train after step " in done.stdout
    assert re.search(rf"Others may join: convoy join {address},127.0.0.1:\d+ --job-key FILE", printed)
    record = read_log(tmp_path / "log.jsonl")
    assert [line.step for line in record.steps] == list(range(40 * 23))
    assert record.fleet is not None
    assert len(record.fleet.devices) == 3
