"""Emulated fleets: the command's environment on its host, and complete cleanup."""

import fcntl
import io
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from convoy.emulate import machine as emulated_machine
from convoy.emulate import namespaces, run
from convoy.emulate.machine import RunName
from convoy.emulate.run import emulate
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Link, NetworkSegment, Nic
from convoy.launch import supervisor
from convoy.launch.supervisor import Interrupts, Signalled
from tests.support.programs import needs

ROOT = Path(__file__).parent.parent.parent
HANG_S = 30.0
FAST = Nic(125e6, 125e6, 5e-5)


def needs_root(function: Callable[..., None]) -> Callable[..., None]:
    marked = pytest.mark.root(pytest.mark.usefixtures("untouched_machine")(function))
    return needs("ip", "tc", root=True)(marked)


def fleet_of(cores: Sequence[float | None], network: Nic = FAST) -> Fleet:
    hosts = tuple(Host("abcdefgh"[index]) for index in range(len(cores)))
    devices = (Device(f"{host.name}-cpu", host.name, "cpu", each) for host, each in zip(hosts, cores, strict=True))
    return Fleet(hosts, tuple(devices), network)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def machine() -> dict[str, object]:
    """Return the traces of an emulation on this machine, except those of other live ones."""
    routes = [subprocess.check_output(["ip", "-json", *family, "route"], text=True) for family in ([], ["-6"])]
    nics = json.loads(subprocess.check_output(["ip", "-json", "address"], text=True))
    return {
        "nics": [(nic["ifname"], nic["flags"], nic["addr_info"]) for nic in nics],
        "routes": routes,
        "namespaces": ours(namespaces.namespaces()),
        "groups": ours(path.name for path in emulated_machine.cpu_controller().root.iterdir()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def ours(names: Iterable[str]) -> list[str]:
    runs = ((name, RunName.parse(name)) for name in names)
    return sorted(name for name, each in runs if each and (each.pid == os.getpid() or not each.alive()))


@pytest.fixture
def untouched_machine() -> Iterator[None]:
    # The orphans that one test makes on purpose would be removed by another run of the tests.
    with (Path(tempfile.gettempdir()) / "convoy-emulate-tests.lock").open("w") as lock:
        assert eventually(lambda: locked(lock.fileno())), "another run of these tests holds the lock"
        run.remove_orphans()
        before = machine()
        yield
        assert machine() == before


def locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(what: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + HANG_S
    while not what():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


# --- what the command finds ---------------------------------------------------------------------------------------

MEETING = """
import json, os, pathlib, subprocess, sys
def ask(*words): return json.loads(subprocess.check_output(words))
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
         "OMP_NUM_THREADS", "CONVOY_DEVICE", "CONVOY_SLOWDOWN", "CONVOY_CPU_QUOTA", "CONVOY_FLEET"]
seen = {"environment": {name: os.environ.get(name) for name in names},
        "port": int(os.environ["MASTER_PORT"]),
        "nics": {nic["ifname"]: [each["local"] for each in nic["addr_info"]] for nic in ask("ip", "-j", "address")},
        "states": {nic["ifname"]: nic["flags"] for nic in ask("ip", "-j", "address")},
        "rate": [each["options"]["rate"] for each in ask("tc", "-j", "qdisc", "show", "dev", "eth0")]}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(seen))
print("I am", os.environ["RANK"])
"""


@needs_root
def test_every_device_finds_its_host_and_torchruns_environment(tmp_path: Path) -> None:
    fleet = Fleet(
        hosts=(Host("a", card=Nic(12.5e6, 25e6, 5e-5)), Host("b")),
        devices=(
            Device("b-cpu", "b", "cpu", cores=1.2),
            Device("a-cpu", "a", "cpu", cores=0.3),
            Device("b-gpu", "b", "cuda", slowdown=2.0),
        ),
        network=FAST,
    )
    output = io.StringIO()
    fleet_path = tmp_path / "fleet.toml"
    command = [*python(MEETING), str(tmp_path)]
    assert emulate(fleet, command, timeout_s=HANG_S, output=output, fleet_path=fleet_path) == 0
    assert "I am 0\n" in output.getvalue()
    assert "I am 1" not in output.getvalue()
    seen = [json.loads((tmp_path / str(index)).read_text()) for index in range(3)]
    shared = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "10.77.0.2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CONVOY_FLEET": str(fleet_path),
    }
    own = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CONVOY_DEVICE", "CONVOY_SLOWDOWN"]
    own.append("CONVOY_CPU_QUOTA")
    values = [
        ("0", "0", "2", "2", "cpu", "1.0", "1.2"),
        ("1", "0", "1", "1", "cpu", "1.0", "0.3"),
        ("2", "1", "2", os.environ.get("OMP_NUM_THREADS"), "cuda", "2.0", None),
    ]
    for index, (mine, address, rate) in enumerate(
        zip(values, ("10.77.0.2", "10.77.0.1", "10.77.0.2"), (125_000_000, 12_500_000, 125_000_000), strict=True)
    ):
        assert seen[index]["environment"] == shared | dict(zip(own, mine, strict=True))
        assert seen[index]["port"] > 0
        assert seen[index]["nics"]["eth0"] == [address]
        assert "UP" in seen[index]["states"]["lo"]
        assert seen[index]["rate"] == [rate]


def test_rates_are_limited_where_traffic_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's own end sends, the switch's end of its cable is what it receives. An uplink is a cable between two bridges."""
    limits: dict[tuple[str, str], str] = {}

    def call(_program: str, *words: str) -> str:
        if "qdisc" in words:
            limits[words[1].rpartition("-")[2], words[words.index("dev") + 1]] = words[words.index("rate") + 1]
        return ""

    monkeypatch.setattr(namespaces, "call", call)
    segment = NetworkSegment("east", ("b",), Nic(1e6, 2e6, 0))
    nics = {"a": Nic(3e6, 4e6, 0), "b": Nic(5e6, 1e12, 0)}
    namespaces.shape(namespaces.wire(RunName(1, 2), ["a", "b"], [segment]), nics.__getitem__)
    assert limits == {
        ("a", "eth0"): "24000000bit", ("_switch", "port1"): "32000000bit", ("b", "eth0"): "40000000bit",
        ("_switch", "in1"): "8000000bit", ("_switch", "out1"): "16000000bit",
    }  # fmt: skip


@needs_root
def test_emulated_hosts_use_the_usual_congestion_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under BBR a slow NIC busy in both directions reached four fifths of the prediction."""
    monkeypatch.setattr("convoy.emulate.namespaces._CONGESTION_CONTROL", "reno")
    command = ["sh", "-c", f"cat /proc/sys/net/ipv4/tcp_congestion_control > {tmp_path}/$RANK"]
    assert emulate(fleet_of([None, None], FAST), command, timeout_s=HANG_S, output=io.StringIO()) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["reno\n"] * 2
    monkeypatch.setattr("convoy.emulate.namespaces._CONGESTION_CONTROL", "none-such")
    assert emulate(fleet_of([None, None], FAST), command, timeout_s=HANG_S, output=io.StringIO()) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["reno\n"] * 2


@needs_root
def test_devices_get_their_cores_as_quotas() -> None:
    controller = emulated_machine.cpu_controller()
    with emulated_machine.groups(controller, RunName.mine(), [0.8, 0.1, None]) as groups:
        names = ["cpu.max"] if controller.version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        found = [" ".join((group / name).read_text().strip() for name in names) for group in groups]
    assert found[:2] == ["8000 10000", "1000 10000"]
    assert found[2].split()[0] in ("max", "-1")


@needs_root
def test_one_host_alone_needs_no_network() -> None:
    fleet = Fleet((Host("here"),), (Device("cpu", "here", "cpu", cores=0.5),))
    assert emulate(fleet, ["true"], timeout_s=HANG_S, output=io.StringIO()) == 0


# --- how it ends --------------------------------------------------------------------------------------------------


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_GRACE_S", 0.3)
    monkeypatch.setattr(supervisor, "TERMINATE_S", 0.3)


@needs_root
def test_first_failure_gives_the_status_and_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Device 1 is the cause, device 2 fails in its wake with another status, device 0 would go on for ever.
    monkeypatch.setattr(run, "_GRACE_S", 1.0)
    script = f"""
for line in $(seq 50); do echo line $line of $RANK; done
case $RANK in
0) sleep 600;;
1) echo the cause >&2; touch {tmp_path}/gone; exit 3;;
2) until [ -e {tmp_path}/gone ]; do sleep 0.02; done; sleep 0.2; exit 9;;
esac
"""
    output = io.StringIO()
    assert emulate(fleet_of([0.4] * 3), ["sh", "-c", script], timeout_s=HANG_S, output=output) == 3
    text = output.getvalue()
    assert "device 1 (b-cpu on host b) ended with status 3\n" in text
    assert "convoy emulate: b: line 50 of 1\nconvoy emulate: b: the cause\n" in text
    assert "line 20 of 1\n" not in text, "only the last lines"
    assert "device 2 (c-cpu on host c) ended with status 9\n" in text
    assert text.index("device 1 (") < text.index("device 2 (")
    assert "device 0 (" not in text, "it was ended by us"


@needs_root
@pytest.mark.usefixtures("short_grace")
def test_a_process_that_is_killed_counts_as_a_failure() -> None:
    command = ["sh", "-c", "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 600"]
    assert emulate(fleet_of([0.4] * 2), command, timeout_s=HANG_S, output=io.StringIO()) == 128 + 9


@needs_root
def test_the_others_continue_without_a_device_and_all_print(tmp_path: Path) -> None:
    script = f"""
if [ $RANK = 0 ]; then echo from 0; touch {tmp_path}/gone; kill -9 $$; fi
until [ -e {tmp_path}/gone ]; do sleep 0.02; done
sleep 0.3
echo from $RANK
sleep 0.$RANK
"""
    output = io.StringIO()
    fleet = fleet_of([0.4] * 3)
    assert emulate(fleet, ["sh", "-c", script], timeout_s=HANG_S, output=output, continues=True) == 0
    text = output.getvalue()
    assert "from 0\n" in text
    assert "from 1\n" in text
    assert "from 2\n" in text
    assert "device 0 (a-cpu on host a) ended with status 137\n" in text
    command = ["sh", "-c", "exit 3"]
    assert emulate(fleet_of([0.4] * 2), command, timeout_s=HANG_S, output=io.StringIO(), continues=True) == 3


@needs_root
@pytest.mark.usefixtures("short_grace")
def test_time_limit_ends_stubborn_processes(tmp_path: Path) -> None:
    command = ["sh", "-c", f"trap '' TERM; sleep 600 & echo $! $$ > {tmp_path}/$RANK; echo stuck; wait; sleep 600"]
    output = io.StringIO()
    assert emulate(fleet_of([0.4] * 2), command, timeout_s=1.0, output=output) == run.TIMED_OUT
    assert "device 1 (b-cpu on host b) was still running after 1 s\nconvoy emulate: b: stuck\n" in output.getvalue()
    pids = [int(pid) for index in (0, 1) for pid in (tmp_path / str(index)).read_text().split()]
    assert len(pids) == 4
    assert not any(alive(pid) for pid in pids)


@needs_root
def test_a_child_left_behind_by_the_command_is_ended(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/$RANK"]
    assert emulate(fleet_of([0.4] * 2), command, timeout_s=HANG_S, output=io.StringIO()) == 0
    assert not any(alive(int((tmp_path / str(index)).read_text())) for index in (0, 1))


@needs_root
def test_failed_setup_is_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "bucket", lambda _: namespaces.TokenBucket(1_000_000, 0, 65_536))
    with pytest.raises(InputError, match=r"`tc .* burst 0b .*` ended with status \d+: .*burst"):
        emulate(fleet_of([0.4] * 2), ["true"], timeout_s=HANG_S, output=io.StringIO())


@needs_root
def test_closed_output_is_cleaned_up() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        emulate(fleet_of([0.4] * 2), ["sh", "-c", "echo hello; sleep 600"], timeout_s=HANG_S, output=Gone())


EMULATE = """
import sys
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.emulate.run import emulate
devices = Device("a-cpu", "a", "cpu", 0.4), Device("b-cpu", "b", "cpu", 0.4)
fleet = Fleet((Host("a"), Host("b")), devices, Nic(125e6, 125e6, 0))
sys.exit(emulate(fleet, ["sh", "-c", sys.argv[1]], timeout_s=60))
"""


def start_and_wait(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start an emulation in its own process; return the ids of the running command's processes."""
    command = f"sleep 600 & echo $! $$ > {folder}/$RANK.new; echo ready; mv {folder}/$RANK.new {folder}/$RANK; wait"
    process = subprocess.Popen(
        [*python(EMULATE), command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the first device writes to this process's own output"
    files = [folder / "0", folder / "1"]
    assert eventually(lambda: all(file.exists() for file in files))
    return process, [int(pid) for file in files for pid in file.read_text().split()]


@needs_root
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_cleanly(signum: signal.Signals, tmp_path: Path) -> None:
    process, pids = start_and_wait(tmp_path)
    assert all(alive(pid) for pid in pids)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signum
    assert errors == f"convoy emulate: ended by {signum.name}\n"
    assert not any(alive(pid) for pid in pids)


@needs_root
def test_signal_during_setup_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def shape_and_signal(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(namespaces, "shape", shape_and_signal)
    command = ["touch", str(tmp_path / "started")]
    assert emulate(fleet_of([0.4] * 2), command, timeout_s=HANG_S, output=io.StringIO()) == 128 + signal.SIGINT
    assert not (tmp_path / "started").exists()


@needs_root
def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    process, pids = start_and_wait(tmp_path)
    process.kill()
    process.wait(HANG_S)
    for pipe in (process.stdout, process.stderr):  # not read to their end: the first device still holds them
        assert pipe is not None
        pipe.close()
    assert all(alive(pid) for pid in pids), "nobody was there to end them"
    output = io.StringIO()
    assert emulate(fleet_of([0.4] * 2), ["true"], timeout_s=HANG_S, output=output) == 0
    (line,) = output.getvalue().splitlines()
    assert line.startswith(f"convoy emulate: removed leftovers of killed runs: convoy-{process.pid}-")
    assert [name.rsplit("-", 1)[1] for name in sorted(line.split(", ")[1:])] == ["_switch", "a", "b"]
    assert not any(alive(pid) for pid in pids)


@needs_root
def test_running_emulation_is_left_alone(tmp_path: Path) -> None:
    process, pids = start_and_wait(tmp_path)
    try:
        output = io.StringIO()
        assert emulate(fleet_of([0.4] * 2), ["true"], timeout_s=HANG_S, output=output) == 0
        assert output.getvalue() == ""
        assert all(alive(pid) for pid in pids)
    finally:
        process.terminate()
        process.communicate(timeout=HANG_S)


# --- what cannot run ----------------------------------------------------------------------------------------------


def refuse(message: str, fleet: Fleet | None = None, command: Sequence[str] = ("true",), timeout_s: float = 1) -> None:
    with pytest.raises(InputError, match=message):
        emulate(fleet or fleet_of([0.5, 0.5]), command, timeout_s=timeout_s, output=io.StringIO())


def test_bad_calls_are_refused() -> None:
    refuse("the command is empty: give", command=[])
    refuse("command 'no-such-program' is not on this machine", command=["no-such-program"])
    refuse("timeout_s = 0: must be", timeout_s=0)
    refuse("timeout_s = inf: must be", timeout_s=float("inf"))


def test_unsupported_machine_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "system", lambda: "Darwin")
        refuse("this is Darwin: use a Linux machine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        refuse("this is user 1000: run it with sudo")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "tc" else which(name, **more) or name)
    refuse(r"program 'tc' is not on this machine, .* install iproute2")


@needs_root
def test_fleets_that_no_machine_can_emulate_are_refused() -> None:
    refuse("cores = 0.0005: the smallest quota is 0.001 cores", fleet_of([0.5, 0.0005]))
    hosts = tuple(Host(f"h{index}") for index in range(255))
    devices = tuple(Device(host.name, host.name, "cpu") for host in hosts)
    refuse("255 hosts: .* 254", Fleet(hosts, devices, FAST))


# --- the parts, without a machine ---------------------------------------------------------------------------------


def test_emulation_limits_are_reported() -> None:
    fleet = fleet_of([0.8, 0.2])
    assert run.caveats(fleet, machine_cores=1) == []
    assert run.caveats(fleet_of([0.8, 0.4]), machine_cores=1) == [
        "the fleet asks for 1.2 cores, this machine has 1: devices will run too slowly"
    ]
    assert "without a limit" in run.caveats(fleet_of([0.8, None]), machine_cores=1)[0]
    assert "0.002 s is not emulated" in run.caveats(fleet_of([0.8, 0.2], Nic(1e6, 1e6, 2e-3)), 1)[0]
    assert "1 measured links" in run.caveats(replace(fleet, links=(Link("a", "b", 1e6, 0),)), 1)[0]
    slow = replace(fleet, devices=(fleet.devices[0], replace(fleet.devices[1], slowdown=3.0)))
    assert "slowdown of b-cpu is passed on" in run.caveats(slow, 1)[0]


@pytest.mark.parametrize(
    ("cores", "quota_us", "period_us"),
    [(0.45, 4500, 10_000), (1.2, 12_000, 10_000), (0.1, 1000, 10_000), (0.08, 1000, 12_500), (0.001, 1000, 1_000_000)],
)
def test_quotas_respect_the_kernel_minimum(cores: float, quota_us: int, period_us: int) -> None:
    assert emulated_machine.quota_us(cores) == (quota_us, period_us)


def test_version_2_quotas_are_written_as_the_kernel_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    (tmp_path / "cgroup.subtree_control").touch()
    controller = emulated_machine.cpu_controller(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert controller == emulated_machine.CpuController(2, tmp_path)
    written: list[tuple[str, str]] = []
    mkdir = Path.mkdir

    def with_files(path: Path) -> None:
        mkdir(path)
        (path / "cgroup.subtree_control").touch()

    monkeypatch.setattr(Path, "mkdir", with_files)
    monkeypatch.setattr(
        emulated_machine, "_write", lambda file, text: written.append((str(file.relative_to(tmp_path)), text))
    )
    monkeypatch.setattr(emulated_machine, "remove", lambda _: None)
    run_name = RunName(1, 2)
    with emulated_machine.groups(controller, run_name, [0.45, None]):
        switches = [("cgroup.subtree_control", "+cpu"), (f"{run_name}/cgroup.subtree_control", "+cpu")]
        assert written == [*switches, (f"{run_name}/0/cpu.max", "4500 10000")]


def test_the_controller_is_found_among_mounts(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset io\n")
    without = f"cgroup2 {tmp_path} cgroup2 rw 0 0\ncgroup /c/acct cgroup rw,cpuacct 0 0\n"
    with pytest.raises(InputError, match=r"no cpu controller .* mount one .mount -t cgroup2"):
        emulated_machine.cpu_controller(without)
    version_1 = emulated_machine.cpu_controller(without + "cgroup /c/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n")
    assert version_1 == emulated_machine.CpuController(1, Path("/c/cpu,cpuacct"))


@pytest.mark.parametrize("bytes_per_s", [1e3, 12.5e6, 125e6, 5e9])
def test_token_bucket_holds_a_whole_packet(bytes_per_s: float) -> None:
    """Regression: with a smaller bucket the kernel cut every packet up, and a ring of four hosts reached half the rate."""
    bucket = namespaces.bucket(bytes_per_s)
    assert bucket is not None
    assert bucket.rate_bit_per_s == 8 * bytes_per_s
    frames = math.ceil(bucket.packet_bytes / 1448)
    assert frames >= 2
    assert bucket.burst_bytes >= bucket.packet_bytes + 66 * frames
    assert bucket.burst_bytes <= max(1e-3 * bytes_per_s, 6000), "a millisecond of the link, or a few frames"


def test_names_distinguish_live_and_dead_runs() -> None:
    mine = RunName.mine()
    assert mine.pid == os.getpid()
    assert RunName.parse(mine.of("host-1.lan")) == RunName.parse(str(mine)) == mine
    assert mine.alive()
    assert not replace(mine, started=mine.started + 1).alive(), "the id was given to another process"
    assert RunName.parse("convoy") is RunName.parse("convoy-1-host") is RunName.parse("my-convoy-1-2") is None
    child = subprocess.Popen(["true"])
    name = RunName(child.pid, mine.started)
    assert eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert not name.alive()
    child.wait(HANG_S)
    assert not name.alive()


def test_signals_are_recorded_and_handlers_restored() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        for signum in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(Signalled) as caught:
                interrupts.check()
            assert (caught.value.signum, caught.value.status) == (signum, 128 + signum), "the first one first"
        interrupts.check()
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
