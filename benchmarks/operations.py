"""What a step takes of a device's processor, by kind of operation of its program: in Python, in torch, in system calls.

    python -m benchmarks.operations [--devices 4] [--trusted | --sealed] [--net resnet:8:16 --batch 64 --steps 60]

Devices are processes of this machine, each with one thread of torch, and share the samples of a batch (`data-by-speed`). Each
second of processor time counts once, under what was begun last. Processor time knows nothing of waiting, so other programs on
the machine hardly change it. The steps run twice: first kinds of operations alone are told apart, which costs next to nothing;
then every call into torch, the kernel and OpenSSL is timed as well, which makes Python slower, so of these steps only the time
inside such calls counts, and Python is the rest of the first. With --sealed messages are encrypted, as between machines.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.hardware import stamp
from convoy.api import distribute
from convoy.comm import streams
from convoy.comm.group import Group
from convoy.comm.job_key import write_key_file
from convoy.comm.processes import join
from convoy.data import Images
from convoy.files import write_whole
from convoy.launch.host_job import memory_environment
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.device_program import ExchangeRound
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime import executor, gradients
from convoy.runtime.exchange import Lane
from convoy.runtime.executor import Executor
from convoy.runtime.gradients import Sums
from convoy.train.loader import Loader

CASES = (("resnet:8:16", 64, 60), ("resnet18:64", 64, 8))
"""Net, global batch, steps."""

IMAGE = (3, 32, 32)
WARM = 4
LIMIT_S = 170.0

REST = "autograd, rest"
KINDS: dict[tuple[Any, str], str] = {
    (Executor, "_fused_forward"): "layers, fused",
    (Executor, "_fused_backward"): "layers, fused",
    (Executor, "_forward"): "layers, one by one",
    (Executor, "_backward"): "layers, one by one",
    (Executor, "_statistics"): "batch norm: sums",
    (Executor, "_backward_statistics"): "batch norm: sums",
    (Executor, "_run_forward"): "executor",
    (Executor, "_run_backward"): "executor",
    (Lane, "_make"): "make, view",
    (Lane, "_view"): "make, view",
    (Lane, "_copy"): "copy, add",
    (Lane, "_add"): "copy, add",
    (Lane, "_merge"): "copy, add",
    (Lane, "_start"): "send, receive",
    (Lane, "_wait"): "wait for a round",
    (Sums, "begin"): "gradient sums: begin",
    (Sums, "finish"): "gradient sums: wait",
    (executor, "packed"): "gradient sums: join",
    (gradients, "packed"): "gradient sums: join",
    (executor, "unpack"): "gradient sums: give back",
}
"""What is timed, and as which kind; on the second lane a kind has the lane's name before it."""

SORTS = ("python", "torch", "system calls", "encryption")
_MODULES = {
    "_socket": "system calls", "socket": "system calls", "_thread": "system calls", "_queue": "system calls",
    "select": "system calls",
    "_ssl": "encryption", "torch": "torch", "pybind11_builtins": "torch",
}  # fmt: skip


class Ledger:
    """Processor seconds of one thread by (kind, sort)."""

    def __init__(self, first: str) -> None:
        self.lane = "" if threading.current_thread() is threading.main_thread() else f"{first}: "
        self.open = [(first, "python")]
        self.spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sorted: list[bool] = []
        self.last_s = time.thread_time()

    def enter(self, kind: str, sort: str) -> None:
        now_s = time.thread_time()
        self.spent[self.open[-1]] += now_s - self.last_s
        self.open.append((kind, sort))
        self.calls[kind, sort] += 1
        self.last_s = time.thread_time()

    def leave(self) -> None:
        now_s = time.thread_time()
        self.spent[self.open.pop()] += now_s - self.last_s
        self.last_s = time.thread_time()

    def profile(self, _frame: object, event: str, called: Any) -> None:
        """As `sys.setprofile` wants it: calls of functions that are not Python's own."""
        if event == "c_call":
            sort = _sort_of(called)
            self.sorted.append(sort is not None and sort != self.open[-1][1])
            if self.sorted[-1]:
                self.enter(self.open[-1][0], str(sort))
        elif event in ("c_return", "c_exception") and self.sorted and self.sorted.pop():
            self.leave()


def _sort_of(called: Any) -> str | None:
    owner = getattr(called, "__self__", None)
    module = getattr(called, "__module__", None) or type(owner).__module__ or ""
    return _MODULES.get(str(module).split(".")[0])


class Books:
    """The ledgers of all threads; deep: with every call into torch, the kernel and OpenSSL."""

    def __init__(self, deep: bool) -> None:
        self.local = threading.local()
        self.all: list[Ledger] = []
        self.deep = deep

    def own(self, first: str = REST) -> Ledger:
        """The ledger of this thread."""
        if not hasattr(self.local, "ledger"):
            self.local.ledger = Ledger(first)
            self.all.append(self.local.ledger)
        ledger: Ledger = self.local.ledger
        return ledger

    def clear(self) -> None:
        for ledger in self.all:
            ledger.spent.clear()
            ledger.calls.clear()

    def wrapped(self, work: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The function, whose processor time is of this kind."""

        def timed(*arguments: Any, **named: Any) -> Any:
            ledger = self.own()
            ledger.enter(ledger.lane + kind, "python")
            try:
                return work(*arguments, **named)
            finally:
                ledger.leave()

        return timed

    def thread(self, work: Callable[..., Any], first: str) -> Callable[..., Any]:
        """The function of a thread, whose processor time is of this kind where it is of no other."""

        def run(*arguments: Any) -> Any:
            ledger = self.own(first)
            with self.every_call() if self.deep else nullcontext():
                try:
                    return work(*arguments)
                finally:
                    ledger.enter(first, "python")
                    ledger.leave()

        return run

    @contextmanager
    def every_call(self) -> Iterator[None]:
        """Time calls into torch, the kernel and OpenSSL, on this thread."""
        ledger = self.own()
        with _Torch(ledger):
            sys.setprofile(ledger.profile)
            try:
                yield
            finally:
                sys.setprofile(None)
                ledger.sorted.clear()


class _Torch(TorchFunctionMode):
    """Counts torch's functions, operators among them, as torch."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sys.setprofile(None)  # what torch calls inside is torch's
        self.ledger.sorted.pop()  # of the call above, whose return is not told
        self.ledger.enter(self.ledger.open[-1][0], "torch")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.ledger.leave()
            sys.setprofile(self.ledger.profile)


@dataclass(frozen=True)
class Seen:
    """What one device saw, of one net; seconds of processor time for a step.

    Attributes:
        wall_s: of a step.
        process_s: of all threads, and what of it the kernel took.
        switches: how often a thread of it waited.
        spent: (kind, sort, seconds).
        calls: (kind, sort, how many).
        sends, rounds: messages sent, and calls that begin messages.
        sent_bytes: payload.
        watching_s: what each call that is timed shows too much.
    """

    wall_s: float
    process_s: float
    kernel_s: float
    switches: float
    spent: list[tuple[str, str, float]]
    calls: list[tuple[str, str, float]]
    sends: float
    rounds: float
    sent_bytes: float
    watching_s: float


def watch(books: Books) -> Counter[str]:
    """Time all kinds from now on, in this process; the messages that will have been begun."""
    begun: Counter[str] = Counter()
    for (owner, name), kind in KINDS.items():
        setattr(owner, name, books.wrapped(getattr(owner, name), kind))
    started = Lane._start

    def counted(lane: Lane, messages: ExchangeRound, *rest: Any) -> Any:
        begun.update(rounds=1, sends=len(messages.sends))
        return started(lane, messages, *rest)

    setattr(Lane, "_start", counted)  # noqa: B010
    setattr(Sums, "_in_thread", books.thread(Sums._in_thread, "second lane"))  # noqa: B010
    return begun


def backward(loss: Tensor) -> None:
    """As `loss.backward()`, which to a mode is one function of torch: it would see nothing inside."""
    engine: Any = torch.autograd.graph._engine_run_backward
    engine((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def observed(group: Group, books: Books, begun: Counter[str], net: str, batch: int, steps: int) -> Seen:
    """Train so many steps. All devices call it."""
    torch.manual_seed(0)
    model = build_net(net, IMAGE, 10)
    plan = named_plan(
        "data-by-speed", trace(model, torch.zeros(1, *IMAGE)).graph, batch, Speeds((1.0,) * group.devices)
    )
    images = Images(
        torch.randint(0, 256, (8 * batch, *IMAGE), dtype=torch.uint8), torch.randint(0, 10, (8 * batch,)), 10,
        (0.5,) * 3, (0.3,) * 3,
    )  # fmt: skip
    part = distribute(model, plan, group, torch.zeros(1, *IMAGE))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
    loader = Loader(images, batch, part, drop_last=True)
    batches = (each for _ in iter(int, 1) for each in loader)
    ledger = books.own()

    @contextmanager
    def kind(name: str) -> Iterator[None]:
        ledger.enter(name, "python")
        try:
            yield
        finally:
            ledger.leave()

    def train(count: int) -> None:
        for _ in range(count):
            with kind("batch"):
                x, y = next(batches)
            output = part(x)
            with kind("loss"):
                loss = F.cross_entropy(output, y)
            with kind("optimizer"):
                optimizer.zero_grad()
            backward(loss)
            with kind("optimizer"):
                optimizer.step()
            float(loss.detach())

    train(WARM)
    group.agree("the steps begin", "")
    books.clear()
    begun.clear()
    group.clear_counters()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start_s, start_process_s = time.perf_counter(), time.process_time()
    with books.every_call() if books.deep else nullcontext():
        train(steps)
    wall_s, process_s = time.perf_counter() - start_s, time.process_time() - start_process_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent, calls = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    for each in list(books.all):
        calls.update(each.calls)
        for key, seconds in each.spent.items():
            spent[key] += seconds
    sent = sum(group.sent_bytes)
    group.agree("the steps end", "")
    return Seen(
        wall_s / steps, process_s / steps, (after.ru_stime - before.ru_stime) / steps,
        (after.ru_nvcsw - before.ru_nvcsw) / steps, [(*key, s / steps) for key, s in spent.items()],
        [(*key, n / steps) for key, n in calls.items()], begun["sends"] / steps, begun["rounds"] / steps, sent / steps,
        watching_s(),
    )  # fmt: skip


def watching_s() -> float:
    """What a call that is timed shows too much."""
    ledger = Ledger("nothing")
    for _ in range(20_000):
        ledger.enter("watched", "python")
        ledger.leave()
    return ledger.spent["watched", "python"] / 20_000


def work(cases: Sequence[tuple[str, int, int]], sealed: bool, deep: bool) -> None:
    """What one device does."""
    torch.set_num_threads(1)
    if sealed:
        # Between machines; on one, a connection is not encrypted once the two have met.
        for module in (streams, sys.modules["convoy.comm.listener"]):
            setattr(module, "is_loopback", lambda _: False)  # noqa: B010
    books = Books(deep)
    begun = watch(books)
    with join("cpu", timeout_s=60) as group:
        seen = [observed(group, books, begun, *case) for case in cases]
    print(json.dumps([each.__dict__ for each in seen]), flush=True)


def devices_of(
    module: str, words: Sequence[str], devices: int, trusted: bool, port: int, limit_s: float = LIMIT_S
) -> list[Any]:
    """What the devices of a job print as JSON, each a process of this machine that runs the module."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "job.key"
        write_key_file(key)
        place = {"WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **memory_environment(os.environ)}
        place |= {"CONVOY_TRUST_NETWORK": "1"} if trusted else {"CONVOY_JOB_KEY": str(key)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *words],
                env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(devices)
        ]
        try:
            return [json.loads(process.communicate(timeout=limit_s)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def table_of(net: str, batch: int, plain: Sequence[Seen], deep: Sequence[Seen]) -> Table:
    """Milliseconds of processor time of a step, the mean of all devices."""
    spent, calls = defaultdict[Any, float](float), defaultdict[Any, float](float)
    for each in plain:
        for kind, _, seconds in each.spent:
            spent[kind, "all"] += 1e3 * seconds / len(plain)
    for each in deep:
        for kind, sort, seconds in each.spent:
            spent[kind, sort] += 1e3 * seconds / len(deep)
        for kind, sort, number in each.calls:
            calls[kind, sort] += number / len(deep)
            spent[kind, sort] -= 1e3 * number * each.watching_s / len(deep)

    def mean(name: str) -> float:
        return float(sum(getattr(each, name) for each in plain)) / len(plain)

    title = (
        f"{net}, batch {batch}, {len(plain)} devices: {1e3 * mean('process_s'):.2f} ms of processor time a step, "
        f"{1e3 * mean('kernel_s'):.2f} in the kernel; {mean('switches'):.0f} waits, {mean('rounds'):.0f} rounds, "
        f"{mean('sends'):.0f} messages sent, {mean('sent_bytes') / 1e6:.2f} MB; {1e3 * mean('wall_s'):.1f} ms by the wall"
    )
    table = Table(title=title, title_justify="left")
    for name in ("ms a step", "all", *SORTS, "system calls, number"):
        table.add_column(name, justify="left" if name == "ms a step" else "right")
    for kind in sorted({k for k, sort in spent if sort == "all"}, key=lambda kind: -spent[kind, "all"]):
        inner = [spent[kind, sort] for sort in SORTS[1:]]
        inner = [max(0.0, value) for value in inner]
        row = [spent[kind, "all"], max(0.0, spent[kind, "all"] - sum(inner)), *inner]
        table.add_row(kind, *(f"{value:.2f}" for value in row), f"{calls[kind, 'system calls']:.0f}")
    rest = 1e3 * mean("process_s") - sum(value for (_, sort), value in spent.items() if sort == "all")
    table.add_row("threads of the connections", f"{rest:.2f}")
    return table


def main(
    devices: Annotated[int, typer.Option(min=2, help="Processes.")] = 4,
    trusted: Annotated[bool, typer.Option(help="Without a key, as with --trust-network.")] = False,
    sealed: Annotated[bool, typer.Option(help="Encrypted, as between machines.")] = False,
    net: Annotated[str | None, typer.Option(help="One net alone.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    results: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
    deep: Annotated[bool, typer.Option(hidden=True)] = False,
    port: Annotated[int, typer.Option(help="Of the meeting.")] = 29_710,
) -> None:
    """Run the devices, print a table for each net."""
    if job is not None:
        work(json.loads(job), sealed, deep)
        return
    cases = CASES if net is None else ((net, batch, steps),)
    words = ["--job", json.dumps(cases), *(["--sealed"] if sealed else [])]
    told = [
        devices_of("benchmarks.operations", [*words, *more], devices, trusted, port + place)
        for place, more in enumerate(([], ["--deep"]))
    ]
    for number, (name, samples, _) in enumerate(cases):
        plain, inside = ([Seen(**each[number]) for each in one] for one in told)
        Console(width=160).print(table_of(name, samples, plain, inside))
    if results is not None:
        write_whole(results, json.dumps({**stamp("python -m benchmarks.operations"), "devices": told}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
