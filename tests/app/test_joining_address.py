"""The addresses that newcomers are told are ones that they reach, whatever the devices met at."""

import pytest
import torch

from convoy.app.joining import home_of
from convoy.app.joining_address import listening
from convoy.comm.environment import LISTENER
from convoy.comm.processes import JoinedGroup
from convoy.config.settings import Settings
from convoy.elastic.regroup import door_address
from convoy.errors import InputError


def group(device: int, address: str) -> JoinedGroup:
    made = object.__new__(JoinedGroup)
    made.device, made.devices, made.torch_device, made.address = device, 2, torch.device("cpu"), address
    made.credentials, made.token, made.staged, made._process = None, "a token", False, -1  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(("device", "port"), [(0, 7000), (1, 0)])
def test_devices_that_met_on_this_machine_answer_at_the_address_that_was_given(
    device: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a fleet file whose only host is this machine met at 127.0.0.1, answered there, and newcomers were told that."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(LISTENER, raising=False)
    home = home_of(Settings(listen="192.168.1.5:7000"), group(device, "127.0.0.1"))
    assert home is not None
    assert (home.address, home.port) == ("192.168.1.5", port)


def test_devices_of_several_machines_answer_where_they_speak() -> None:
    assert door_address("192.168.1.5", "192.168.1.5", first=True) == "192.168.1.5"
    assert door_address("192.168.1.5", "192.168.1.6", first=False) == "192.168.1.6"
    with pytest.raises(
        InputError, match=r"--listen 10.0.0.5: the devices communicate at 192.168.1.5 .* --listen 192.168.1.5"
    ):
        door_address("10.0.0.5", "192.168.1.5", first=True)


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "0.0.0.0", "[::]:7000", "*:7000"])
def test_no_address_to_ask_at(text: str) -> None:
    """It was taken, and others were told to ask at 0.0.0.0."""
    with pytest.raises(InputError, match=r"means all addresses of this machine, .* give that"):
        listening(Settings(listen=text))
