"""A joining device: the settings that it takes from the job, and the addresses where it can ask."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.cli.admitting import TrainAdmission, join_addresses
from convoy.cli.joining import run_of
from convoy.comm.environment import LISTENER
from convoy.comm.processes import JoinedGroup
from convoy.config.run_file import RunSettings, resolve_settings, to_toml
from convoy.config.train_options import read_address
from convoy.elastic.regroup import home_at, member_address
from convoy.errors import InputError
from convoy.measure.job_plans import Replanner
from convoy.plan.presets import Speeds
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.request import PlanRequest

GIVEN: dict[str, Any] = {
    "data": "digits", "net": "two-conv:4:8", "devices": "cpu,cpu", "slowdown": (1.0, 2.0), "speeds": (2.0, 1.0),
    "compare": True,
}  # fmt: skip


def admission(run: RunSettings, count: int) -> TrainAdmission:
    known = FleetKnowledge(ids=tuple(range(count)), speeds=Speeds((1.0,) * count, measured=False))
    reporter: Any = SimpleNamespace(run=run, devices=dict.fromkeys(range(count), ("cpu", "desk", 1.0)), speeds={})
    model: Any = None
    return TrainAdmission(model, "", Replanner(PlanRequest(model, 1, known, "data")), reporter)


def test_new_log_writer_logs_the_run_settings() -> None:
    """Regression: a joined device that became rank 0 logged its own join options as the run's settings."""
    run = resolve_settings(None, GIVEN)
    offer = {"run": to_toml(run.settings)}
    own = run_of(offer, {"devices": "cpu"})
    assert own.settings != run.settings
    joining = admission(own, 1)
    joining.learn(json.loads(json.dumps(admission(run, 2).knowledge())))
    assert joining.reporter.run == run
    assert joining.reporter.devices == {0: ("cpu", "desk", 1.0), 1: ("cpu", "desk", 1.0)}


def test_job_cannot_call_arbitrary_functions_of_a_joining_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    run = resolve_settings(None, GIVEN).settings

    def told(**named: str) -> dict[str, str]:
        return {"run": to_toml(run.model_copy(update=named))}

    for option in "net", "data":
        with pytest.raises(InputError, match=f"--{option} os:abort, a function outside of this folder"):
            run_of(told(**{option: "os:abort"}), {})
        assert getattr(run_of(told(**{option: "os:abort"}), {}, ["os:abort"]).settings, option) == "os:abort"
        assert getattr(run_of(told(**{option: "mine:build"}), {}).settings, option) == "mine:build"
    assert run_of(told(net="timm:resnet18"), {}).settings.net == "timm:resnet18"


def test_unwritten_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    """Only the joining device would reach the first checkpoint, and it would wait there for the others."""
    run = resolve_settings(None, GIVEN).settings
    with pytest.raises(InputError, match=re.escape(f"--checkpoint {tmp_path}: the job saves no checkpoints")):
        run_of({"run": to_toml(run)}, {"checkpoint": tmp_path})
    saved = run.model_copy(update={"checkpoint": Path("run")})
    assert run_of({"run": to_toml(saved)}, {"checkpoint": tmp_path}).settings.checkpoint == tmp_path


def test_an_address_of_each_host_is_shown() -> None:
    doors = [("10.0.0.1", 7000), ("10.0.0.1", 9), ("10.0.0.2", 7000), ("fe80::1", 7)]
    shown = join_addresses(doors)
    assert shown == "10.0.0.1:7000,10.0.0.2:7000,[fe80::1]:7"
    assert [read_address(each) for each in shown.split(",")] == [doors[0], doors[2], doors[3]]


def group(device: int, address: str) -> JoinedGroup:
    made = object.__new__(JoinedGroup)
    made.device, made.devices, made.torch_device, made.address = device, 2, torch.device("cpu"), address
    made.credentials, made.token, made._process = None, "a token", -1  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(("device", "port"), [(0, 7000), (1, 0)])
def test_local_job_listens_at_the_given_address(device: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a fleet file with only this host listened at 127.0.0.1 and sent that to joining devices."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(LISTENER, raising=False)
    home = home_at("192.168.1.5", 7000, group(device, "127.0.0.1"))
    assert (home.address, home.port) == ("192.168.1.5", port)


def test_multi_host_devices_listen_at_their_own_address() -> None:
    assert member_address("192.168.1.5", "192.168.1.5", first=True) == "192.168.1.5"
    assert member_address("192.168.1.5", "192.168.1.6", first=False) == "192.168.1.6"
    with pytest.raises(InputError, match=r"--listen 10.0.0.5: all devices.* at 192.168.1.5 .* --listen 192.168.1.5"):
        member_address("10.0.0.5", "192.168.1.5", first=True)


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "0.0.0.0", "[::]:7000", "*:7000"])
def test_wildcard_listen_address_is_refused(text: str) -> None:
    """Regression: it was accepted, and joining devices were sent to 0.0.0.0."""
    with pytest.raises(InputError, match=r"means all addresses of this machine, .* give that"):
        resolve_settings(None, {"listen": text})
