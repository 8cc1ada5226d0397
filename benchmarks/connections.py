"""What authenticated, encrypted connections cost beside plain ones, and what strangers at the doors cost them.

    python -m benchmarks.connections [--rounds 5]

Two hosts and a stranger's, as network namespaces with cards of 1 Gbit/s (Linux, root). The two exchange tensors, and do steps
that compute and exchange; by turns encrypted, over a trusted network (plain), and encrypted among strangers who never stop:
half-open connections by the hundred, random bytes in place of a handshake and after one. Medians over the rounds, of the slower
host.
"""

import argparse
import json
import os
import secrets
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from convoy.comm.changing import present
from convoy.comm.group import Group, Message
from convoy.comm.job_key import write_key_file
from convoy.comm.processes import JoinedGroup, join
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from convoy.fleet import Card
from convoy.simulate.described import ENCRYPTION_S_PER_BYTE

GIGABIT = Card(125e6, 125e6, 5e-5)
SECONDS = 3.0
HALF_OPEN = 1000


def exchange(group: Group, size_bytes: int, both: bool) -> tuple[float, float]:
    """Bytes/s one way, and processor seconds per byte sent or received here."""
    peer, out, arrived = 1 - group.device, torch.ones(size_bytes // 4), torch.zeros(size_bytes // 4)
    sends = [Message(peer, out)] if both or group.device == 0 else []
    receives = [Message(peer, arrived)] if both or group.device == 1 else []
    group.exchange(sends, receives)
    count = max(3, int(SECONDS * 100e6 / size_bytes / (2 if both else 1)))
    group.agree("begin", "")
    start_s, used_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        group.exchange(sends, receives)
    group.agree("end", "")
    moved = count * size_bytes
    return moved / (time.perf_counter() - start_s), (time.process_time() - used_s) / moved / (2 if both else 1)


def steps(group: Group) -> float:
    """Steps per second: a product of matrices, and 1 MB to and fro."""
    peer, x = 1 - group.device, torch.randn(500, 500)
    out, arrived, count = torch.ones(250_000), torch.zeros(250_000), 100
    group.agree("begin", "")
    start_s = time.perf_counter()
    for _ in range(count):
        pending = group.start([Message(peer, out)], [Message(peer, arrived)])
        for _ in range(4):
            x @ x
        pending.wait()
    group.agree("end", "")
    return count / (time.perf_counter() - start_s)


def work(doors: Path) -> None:
    """What one host does."""
    torch.set_num_threads(1)
    with join("cpu", timeout_s=60) as group:
        joined = present(group)
        assert isinstance(joined, JoinedGroup)
        doors.write_text(json.dumps(joined._health.addresses))
        group.agree("the stranger knows the doors", "")
        time.sleep(1.0)
        told: dict[str, float] = {"steps_per_s": steps(group)}
        told["one_way_bytes_per_s"], told["one_way_s_per_byte"] = exchange(group, 64 << 20, both=False)
        told["both_ways_bytes_per_s"], told["both_ways_s_per_byte"] = exchange(group, 64 << 20, both=True)
        told["strangers"] = group.rejected
    print(json.dumps(told), flush=True)


def disturb(doors: Path) -> None:
    """Strangers at both doors until this process is ended."""
    while not doors.exists() or not doors.read_text():
        time.sleep(0.05)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    addresses = [(host, port) for host, port in json.loads(doors.read_text())]
    held: list[socket.socket] = []
    while True:
        for address in addresses:
            with suppress(OSError):
                held.append(socket.create_connection(address, timeout=1))
                held[: -HALF_OPEN // 2] = []
            with suppress(OSError), socket.create_connection(address, timeout=1) as connection:
                connection.sendall(secrets.token_bytes(1000))
            with suppress(OSError), socket.create_connection(address, timeout=1) as connection:
                connection.settimeout(1)
                with context.wrap_socket(connection) as sealed:
                    sealed.sendall(secrets.token_bytes(1000))
        time.sleep(0.01)


def round_of(wiring: namespaces.Wiring, mode: str, folder: Path, port: int) -> dict[str, float]:
    """One round: of each figure, that of the slower host; of strangers, all."""
    doors = folder / f"doors-{port}"
    own = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    own |= {"CONVOY_TRUST_NETWORK": "1"} if mode == "trusted" else {"CONVOY_JOB_KEY": str(folder / "job.key")}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": wiring.port("a").address, "MASTER_PORT": str(port)}

    def started(host: str, *words: str, **variables: str) -> "subprocess.Popen[str]":
        command = ["ip", "netns", "exec", wiring.port(host).namespace, sys.executable, "-m", "benchmarks.connections"]
        environment = os.environ | own | place | variables
        return subprocess.Popen([*command, *words], env=environment, stdout=subprocess.PIPE, text=True)

    with ExitStack() as stack:
        if mode == "strangers":
            stranger = started("c", "--disturb", str(doors))
            stack.callback(stranger.wait, 5)
            stack.callback(stranger.kill)
        hosts = [started(host, "--work", str(doors), RANK=str(rank)) for rank, host in enumerate("ab")]
        outputs = [json.loads(host.communicate(timeout=120)[0]) for host in hosts]
    told = {key: (min if "per_s" in key else max)(each[key] for each in outputs) for key in outputs[0]}
    return told | {"strangers": sum(each["strangers"] for each in outputs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--disturb", type=Path)
    options = parser.parse_args()
    if options.work or options.disturb:
        work(options.work) if options.work else disturb(options.disturb)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed all the same
    wiring = namespaces.wire(RunName.mine(), ("a", "b", "c"))
    found: dict[str, list[dict[str, float]]] = {"encrypted": [], "trusted": [], "strangers": []}
    with namespaces.network(wiring), tempfile.TemporaryDirectory() as name:
        namespaces.shape(wiring, lambda _: GIGABIT)
        write_key_file(Path(name) / "job.key")
        for number in range(options.rounds):
            for place, mode in enumerate(found):
                found[mode].append(round_of(wiring, mode, Path(name), 29_600 + 3 * number + place))
    for mode, rounds in found.items():
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        print(f"{mode:10}", json.dumps({key: float(f"{value:.4g}") for key, value in medians.items()}))
    for way in ("one_way", "both_ways"):
        rows = zip(found["encrypted"], found["trusted"], strict=True)
        more = statistics.median(x[f"{way}_s_per_byte"] - y[f"{way}_s_per_byte"] for x, y in rows)
        print(
            f"processor seconds that encrypting takes, {way}: {more:.2g} a byte, predicted {ENCRYPTION_S_PER_BYTE:.2g}"
        )
    for key in ("steps_per_s", "one_way_bytes_per_s", "both_ways_bytes_per_s"):
        for mode, beside in (("encrypted", "trusted"), ("strangers", "encrypted")):
            ratios = [x[key] / y[key] for x, y in zip(found[mode], found[beside], strict=True)]
            print(f"{mode} / {beside}, {key}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
