"""Valid files of every kind that commands read, for tests that damage them, and a check of refusals."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from convoy.config.run_file import to_toml
from convoy.config.train_options import Settings
from convoy.errors import ConvoyError
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.plan.presets import Speeds, named_plan
from convoy.simulate.costs import Overheads
from convoy.simulate.table import DeviceCosts, LayerPoint, Measurement
from tests.support.run_logs import whole_run

MOST_CHARACTERS = 20_000
"""Of a message: what fits a screen's history. One line of it is shorter."""

LIMIT_S = 60

NET, IMAGE = "two-conv:4:6", (1, 8, 8)


class Hangs(BaseException):
    """A timeout. Not an Exception, so that no handler swallows it."""


@contextlib.contextmanager
def bounded_time() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise Hangs(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def used_or_refused(work: Callable[[], object]) -> str:
    """Return the refusal message, or an empty string if the file was used. Any other error fails the test."""
    try:
        with bounded_time():
            work()
    except ConvoyError as error:
        message = str(error)
        assert 10 < len(message) < MOST_CHARACTERS
        assert max(map(len, message.split("\n"))) < 2000
        message.encode("utf-8", "backslashreplace")
        return message
    return ""


def graph() -> Graph:
    return graph_of(NET, IMAGE)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def make_plan(folder: Path) -> Path:
    plan = named_plan("master", graph(), 32, Speeds((2.0, 1.0)))
    return written(folder / "plan.json", plan.to_json())


HOSTS = """
[network]
send_bytes_per_s = 125e6
receive_bytes_per_s = 125_000_000
latency_s = 1e-4

[[host]]
name = "attic"
address = "192.168.1.20"

[[host]]
name = "cellar"
card = { send_bytes_per_s = 12.5e6, receive_bytes_per_s = 25e6, latency_s = 2e-4 }

[[device]]
name = "attic-cpu"
host = "attic"
kind = "cpu"
cores = 0.45
"""

LINK = """
[[link]]
source = "attic"
target = "cellar"
bandwidth_bytes_per_s = 11e6
latency_s = 3e-4
"""

FLEET = f"""{HOSTS}
peak_flop_per_s = 1e11
memory_bytes_per_s = 2e10
[[device]]
name = "cellar-gpu"
host = "cellar"
kind = "cuda"
memory_bytes = 8_000_000_000
peak_flop_per_s = 1e13
memory_bytes_per_s = 5e11
idle_w = 20
busy_w = 180
{LINK}"""

CLASSES = """
[network]
send_bytes_per_s = "1 Gbit/s"
receive_bytes_per_s = "110 MB/s"
latency_s = "450 us"

[[host]]
name = "desk"
address = "192.168.1.20"
user = "ann"
ssh_port = 2222
[[host]]
name = "shelf"

[[device]]
name = "desk-gpu"
host = "desk"
class = "rtx3060"
[[device]]
name = "desk-cpu"
host = "desk"
class = "laptop-cpu"
cores = 4
memory_bytes = "12 GB"
[[device]]
name = "shelf-pi"
host = "shelf"
class = "raspberry-pi-5"
peak_flop_per_s = "80 GFLOP/s"
busy_w = "12 W"
"""


ANSWER = """Welcome to attic!
survey 1
system Linux
cores 16
memory_kib 65771234
memory_bytes
processor AMD Ryzen 7 5700X 8-Core Processor
gpu NVIDIA GeForce RTX 3060
gpu NVIDIA GeForce RTX 9999
server 192.168.1.20 22
mbit_per_s 1000
"""


def make_measurement(folder: Path) -> Path:
    fleet, layers = Fleet.from_toml(FLEET), tuple(graph().layers)
    costs = tuple(
        DeviceCosts(
            each.name, 2e-10, 6e-10, 1e-9, **(dict.fromkeys(Overheads.__dataclass_fields__, 1e-6) | {"live_bytes": 8})
        )
        for each in fleet.devices
    )
    points = tuple(
        LayerPoint(each.name, layer, samples, outputs, 3, 1e-3, 2e-3, 0.1)
        for each in fleet.devices
        for layer in layers
        for samples in (1, 16)
        for outputs in (2, 4)
    )
    measured = Measurement(fleet, NET, graph().fingerprint, 16, "0", "2", "2026-01-01", costs, points)
    return written(folder / "measured.toml", measured.to_toml())


def make_run_file(folder: Path) -> Path:
    settings = Settings(data="digits", net=NET, batch=32, limit=80, devices="2", slowdown=(1.0, 2.0), augment="crop:1,flip",
                        checkpoint=folder / "run", log=folder / "log", tensorboard=None, ema=0.9)  # fmt: skip
    return written(folder / "run.toml", to_toml(settings))


def make_log(folder: Path) -> Path:
    return written(folder / "log.jsonl", "".join(json.dumps(row) + "\n" for row in whole_run()))
