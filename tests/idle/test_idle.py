"""A machine that takes part while nobody uses it, and machines that are woken up."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convoy.comm.job_key import write_key_file
from convoy.emulate.run import emulate
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.idle import WINDOW, MachineUse, UseMeter, take_part, use
from tests.support.processes import PLACE, ROOT, free_port
from tests.support.programs import needs

QUIET = [MachineUse()] * WINDOW


@pytest.mark.parametrize(
    ("readings", "takes_part", "why"),
    [
        (QUIET, False, ""),
        (QUIET[:5], False, "not observed"),
        (QUIET[:1], True, ""),
        ([*QUIET[1:], MachineUse(input_age_s=299.0)], True, "somebody uses it"),
        ([*QUIET[1:], MachineUse(input_age_s=300.0)], True, ""),
        ([MachineUse(input_age_s=1.0), *QUIET[1:]], False, ""),
        ([*QUIET[1:], MachineUse(gpu=True)], True, "GPU"),
        ([*QUIET[1:], MachineUse(cores=8.0)], True, ""),  # a short task: 0.67 cores on average
        ([*QUIET[1:], MachineUse(cores=8.0)], False, "0.7 cores"),  # reason enough not to join
        ([MachineUse(cores=1.1)] * WINDOW, True, "1.1 cores"),
    ],
)
def test_input_gpus_and_lasting_load_are_use(readings: list[MachineUse], takes_part: bool, why: str) -> None:
    found = use(readings, takes_part)
    assert why in found
    assert bool(why) == bool(found)


def test_processor_time_of_children_is_not_use_by_others() -> None:
    meter = UseMeter()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        read = meter.read()
        assert read.cores < os.cpu_count() - 0.3  # type: ignore[operator]
        assert read.input_age_s >= 0
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_device_leaves_when_somebody_comes_back_and_joins_again(tmp_path: Path) -> None:
    """The losses of all steps are those of one device."""
    kept = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    key, place, script = tmp_path / "key", f"127.0.0.1:{free_port()}", str(ROOT / "tests/support/members_script.py")
    write_key_file(key)
    convoy, options = [sys.executable, "-m", "convoy", "run"], ["--job-key", str(key), script, "1000000"]
    output = tmp_path / "output"
    with output.open("wb") as out:
        job = subprocess.Popen(
            [*convoy, "--listen", place, *options], cwd=tmp_path, env=environment, stdout=out, stderr=out
        )

    def count(word: str) -> int:
        return output.read_text().count(word)

    def read() -> MachineUse:
        """Somebody is there after the first admission, until the device has left. After the second one the job ends."""
        joined = count(" joined; 2 continue")
        if joined == 2:
            job.send_signal(signal.SIGUSR1)
        return MachineUse(input_age_s=0.0 if joined == 1 and not count("left the job") else math.inf)

    try:
        while job.poll() is None and not count("Others may join"):
            time.sleep(0.1)
        before = dict(os.environ)
        os.environ.update(environment)
        for name in (*PLACE, "CONVOY_DEVICE"):
            os.environ.pop(name, None)
        try:
            status = take_part([*convoy, "--join", place, *options], read, poll_s=0.2)
        finally:
            os.environ.clear()
            os.environ.update(before)
    finally:
        job.terminate()
        job.wait(60)
    assert status == 2, output.read_text()
    assert count("left the job") >= 1
    losses = [json.loads(line)["loss"] for line in output.read_text().splitlines() if line[:1] == "{"]
    epochs = str(len(losses) // 4 + 1)
    alone = subprocess.check_output([sys.executable, script, epochs], text=True, env=environment)
    expected = [json.loads(line)["loss"] for line in alone.splitlines() if line[:1] == "{"][: len(losses)]
    assert losses == pytest.approx(expected, rel=1e-10, abs=1e-12)


WAKES = """
import os, socket, sys, time
from convoy.launch.survey import send_magic_packet
if os.environ["RANK"] == "0":
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("", 9))
    receiver.settimeout(60)
    print(receiver.recv(200).hex())
else:
    for _ in range(30):
        send_magic_packet("00:1a:2B:3c-4d-5e")
        time.sleep(0.5)
"""


@pytest.mark.slow
@pytest.mark.root
@needs("ip", "tc", root=True)
def test_magic_packet_reaches_the_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    output, hosts = io.StringIO(), (Host("a"), Host("b"))
    devices = tuple(Device(f"{host.name}-cpu", host.name, "cpu") for host in hosts)
    fleet = Fleet(hosts, devices, Nic(125e6, 125e6, 5e-5))
    assert emulate(fleet, [sys.executable, "-c", WAKES], timeout_s=100.0, output=output) == 0
    assert "ff" * 6 + "001a2b3c4d5e" * 16 in output.getvalue()
