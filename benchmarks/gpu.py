"""Check Convoy on a machine with an accelerator in at most ten minutes; each check also runs alone.

    python -m benchmarks.gpu [--only parity] [--device cuda:0] [--page FILE]

On a machine without one, a simulated accelerator (tests/support/sim) tests the code; its times mean nothing.
"""

import copy
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, distributed, nn
from torch.distributed import HashStore

from benchmarks.hardware import stamp
from benchmarks.page import table
from convoy.api import distribute
from convoy.comm.backends import NcclBackend, can_use_nccl
from convoy.comm.group import AloneGroup, Group
from convoy.errors import shortened, unknown_name
from convoy.files import write_whole
from convoy.machine.accelerator import (
    accelerator,
    finish,
    hardware_name,
    in_host_memory,
    local_devices,
    memory_of,
    queued,
)
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.runtime.cuda_graphs import WARM_UP
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from tests.support.threads import run_on_threads

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python -m benchmarks.gpu"
EXACT, ROUNDED, TF32, ROUGH = 1e-10, 1e-4, 3e-2, 5e-2
"""Largest difference of a weight after five steps: in float64, in float32, with products of 10 bits. Of the loss after so
many in 16 bits."""


@dataclass(frozen=True)
class Row:
    """One finding. `good` is None if the row is not checked."""

    part: str
    what: str
    found: str
    good: bool | None = None


@dataclass(frozen=True)
class Place:
    """The device and folder of a run.

    Attributes:
        environment: of processes that are started.
    """

    name: str
    simulated: bool
    environment: dict[str, str]

    @property
    def device(self) -> torch.device:
        return torch.device(self.name)


# --- parity ---------------------------------------------------------------------------------------------------------------


def parity(place: Place) -> Iterator[Row]:
    """Compare five steps on accelerator + CPU with one CPU, in float64 and float32, for every named plan."""
    for name in PLANS:
        apart = _apart(place, name, torch.float64)
        yield Row("parity", f"float64, {name}, {place.name} + cpu", f"{apart:.1e}", apart <= EXACT)
    for word, products, most in (("TF32 off", "highest", ROUNDED), ("TF32 on", "high", TF32)):
        with _products(products):
            apart = _apart(place, "hybrid", torch.float32)
        yield Row("parity", f"float32, {word}, hybrid", f"{apart:.1e}", apart <= most)


def _apart(place: Place, plan_name: str, dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    model = build_net("resnet:8:8", (3, 16, 16), 10).to(dtype)
    batches = [(torch.randn(12, 3, 16, 16, dtype=dtype), torch.randint(0, 10, (12,))) for _ in range(5)]
    alone = copy.deepcopy(model).double()
    _train(alone, [(x.double(), y) for x, y in batches], lambda x: alone(x))
    plan = named_plan(plan_name, trace(model, batches[0][0][:2]).graph, 12, Speeds((2.0, 1.0)))

    def work(group: Group) -> float:
        here = Distributed(model, plan, group, batches[0][0][:2])
        _train(here, batches, lambda x: here(x.to(group.torch_device), whole=True))
        whole, wanted = here.full_state_dict(), alone.state_dict()
        return max(float((whole[k].cpu().double() - wanted[k].double()).abs().max()) for k in wanted)

    return max(run_on_threads(2, work, on=(place.name, "cpu")))


def _train(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    forward: Callable[[Tensor], Tensor],
    scaler: GradScaler | None = None,
) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for x, y in batches:
        out = forward(x)
        optimizer.zero_grad()
        loss = F.cross_entropy(out.float() if scaler else out, y.to(out.device))
        losses.append(loss.item())
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return losses


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Return the number formats torch uses for float32 matrix products and convolutions."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


# --- memory and streams -----------------------------------------------------------------------------------------------------


def staging(place: Place) -> Iterator[Row]:
    """Measure transfers to and from the device, with and without pinned memory."""
    there = torch.zeros(1 << (20 if place.simulated else 26), device=place.device)
    size_bytes = there.numel() * there.element_size()
    for kind, host in (("pinned", in_host_memory(there)), ("pageable", torch.empty(there.shape))):
        for way, target, source in (("from the device", host, there), ("to the device", there, host)):

            def once(target: Tensor = target, source: Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                queued(place.device).synchronize()

            yield Row("staging", f"{kind} memory, {way}", f"{size_bytes / _seconds(once) / 1e9:.2f} GB/s")


def streams(place: Place) -> Iterator[Row]:
    """Check that a step in a user stream gives the numbers of the default stream."""
    torch.manual_seed(0)
    model = build_net("resnet:8:8", (3, 16, 16), 10).double()
    x, y = torch.randn(8, 3, 16, 16).double(), torch.randint(0, 10, (8,))
    plan = named_plan("data", trace(model, x[:2]).graph, 8, Speeds((1.0, 1.0)))

    def work(group: Group, *, own: bool) -> float:
        here = Distributed(model, plan, group, x[:2])
        if own and group.torch_device.type != "cpu":
            stream = torch.Stream(group.torch_device)
            queued(group.torch_device).wait(stream)
            torch.accelerator.set_stream(stream)
        _train(here, [(x, y)] * 3, lambda x: here(x.to(group.torch_device), whole=True))
        return sum(float(w.double().sum()) for w in here.full_state_dict().values())

    found = [run_on_threads(2, lambda g, own=own: work(g, own=own), on=(place.name, "cpu"))[0] for own in (False, True)]  # type: ignore[misc]
    apart = abs(found[0] - found[1])
    yield Row(
        "streams", "three steps in a separate stream, compared with the default stream", f"{apart:.1e}", apart <= EXACT
    )


def _seconds(once: Callable[[], None], rounds: int = 7) -> float:
    once()
    times = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        once()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


# --- processes ----------------------------------------------------------------------------------------------------------------


def processes(place: Place) -> Iterator[Row]:
    """Run `convoy train --compare` on the device and a CPU, and with two processes on one device."""
    for devices in (f"{place.name},cpu", f"{place.name},{place.name}"):
        yield _compared(place, "processes", devices)


def _compared(place: Place, part: str, devices: str) -> Row:
    done = _convoy(place, "train", *TINY, "--devices", devices, "--plan", "hybrid", "--speeds", "1,1", "--compare")
    apart = re.search(r"Loss curves .*: at most (\S+) apart", done.stdout)
    if done.returncode or apart is None:
        return Row(part, devices, (done.stderr or done.stdout).strip().splitlines()[-1][:200], good=False)
    return Row(part, f"{devices}: loss curves apart", apart[1], float(apart[1]) <= ROUNDED)


def nccl(place: Place) -> Iterator[Row]:
    """Check NCCL as far as one GPU allows: start, sum and end. Two processes that share a GPU use TCP."""
    kind, device = place.device.type, place.device
    if kind != "cuda" or not distributed.is_nccl_available():
        yield Row("nccl", "NCCL", f"not here: needs an NVIDIA GPU and a torch with NCCL, not {kind}")
        return
    try:
        NcclBackend(HashStore(), 0, 1, device, 30.0).cut(broken=False)
        yield Row("nccl", "a group of one begins, sums and ends", "yes", good=True)
    except RuntimeError as error:
        yield Row("nccl", "a group of one begins, sums and ends", str(error).splitlines()[0][:200], good=False)
    shared = can_use_nccl([str(device)] * 2, [hardware_name(device)] * 2, ["here"] * 2)
    yield Row("nccl", "two processes on one GPU", "NCCL" if shared else "connections: NCCL refuses it", not shared)
    if torch.accelerator.device_count() > 1:
        yield _compared(place, "nccl", f"{kind}:0,{kind}:1")
    else:
        yield Row("nccl", "between two GPUs", "not here: there is one GPU")


def precision(place: Place) -> Iterator[Row]:
    """Compare six reduced-precision steps with float32 on one CPU: bf16 with a CPU, fp16 with loss scaling alone."""
    torch.manual_seed(0)
    model = build_net("resnet:8:8", (3, 16, 16), 10)
    batches = [(torch.randn(12, 3, 16, 16), torch.randint(0, 10, (12,)))] * 6
    plain = copy.deepcopy(model)
    wanted = _train(plain, batches, lambda x: plain(x))

    def work(group: Group, word: str) -> tuple[list[float], int]:
        plan = named_plan("data", trace(model, batches[0][0][:2]).graph, 12, Speeds((1.0,) * group.devices))
        here = distribute(model, plan, group, batches[0][0][:2], precision=word)
        # Too large at first: the steps that overflow are left out, and the scale is halved.
        scaler = GradScaler(here, init_scale=2.0**20) if word == "fp16" else None
        losses = _train(here, batches, lambda x: here(x.to(group.torch_device), whole=True), scaler)
        return losses, 0 if scaler is None else round(20 - math.log2(scaler.get_scale()))

    for word, on in (("bf16", (place.name, "cpu")), ("fp16", (place.name,))):
        losses, left_out = run_on_threads(len(on), lambda group, word=word: work(group, word), on=on)[0]  # type: ignore[misc]
        apart = abs(losses[-1] - wanted[-1 - left_out])
        scaled = f"; {left_out} steps overflowed and were left out" if left_out else ""
        good = apart <= ROUGH and losses[-1] < losses[0]
        yield Row(
            "precision",
            f"{word}, {' + '.join(on)}: loss after six steps, compared with float32",
            f"{apart:.1e}{scaled}",
            good,
        )


TINY = ("--data", "digits", "--limit", "128", "--epochs", "1", "--net", "two-conv:8:12")


ENDLESS = ("--data", "digits", "--epochs", "2000", "--net", "two-conv:8:12", "--plan", "data", "--timeout", "10")


def kill(place: Place) -> Iterator[Row]:
    """Kill a process during a step. The others must name it, and recover or end as configured."""
    for spare, word, expected in (
        ("auto", "the others continue", "continue after step"),
        ("none", "the rest ends", "was killed by"),
    ):
        lines, took_s, status = _after_kill(place, spare, expected)
        told = [line.strip() for line in lines if expected in line]
        good = bool(told) and (status is None if spare == "auto" else status not in (0, None))
        yield Row(
            "kill",
            f"kill -9 during a step, --spare {spare}: {word} after {took_s:.1f} s",
            (told or [line.strip() for line in lines[-1:]] or ["no output"])[0][:200],
            good,
        )


def _after_kill(place: Place, spare: str, expected: str) -> tuple[list[str], float, int | None]:
    """Return the output of a training after its last process is killed, and its exit status if it ended."""
    with subprocess.Popen(
        [sys.executable, "-m", "convoy", "train", *ENDLESS, "--devices", f"{place.name},cpu", "--spare", spare],
        env=place.environment, cwd=place.environment["TMPDIR"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        limit = threading.Timer(90.0, running.kill)
        limit.start()
        lines: list[str] = []
        _read_to(running.stdout, "epoch 1/", lines)
        children = [child for child in psutil.Process(running.pid).children(recursive=True) if "python" in child.name()]
        start_s = time.monotonic()
        if children:
            children[-1].kill()
        _read_to(running.stdout, expected, lines)
        took_s, status = time.monotonic() - start_s, None
        if spare == "none":
            lines += running.stdout.readlines()
            status = running.wait(30.0)
        else:
            status = running.poll()
            running.send_signal(signal.SIGINT)
            running.stdout.read()
        limit.cancel()
    return lines, took_s, status


def _read_to(output: Iterable[str], words: str, lines: list[str]) -> None:
    for line in output:
        lines.append(line)
        if words in line:
            return


def _convoy(place: Place, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "convoy", *argv], env=place.environment, cwd=place.environment["TMPDIR"], text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip


# --- speed --------------------------------------------------------------------------------------------------------------------


RESNET50 = "torchvision:resnet50"
CASES = (("resnet18:64", 32, 256), (RESNET50, 32, 256), ("resnet18:64", 224, 64), (RESNET50, 224, 64))
"""Net, side of an image, batch."""

GRAPH_CASES = (("resnet18:64", 32, 64), (RESNET50, 32, 256))
"""The host is the limit."""

ROUNDS, LEAST_ROUNDS, CASE_S = 9, 3, 12.0
"""Of a case, and about the seconds after which no further round begins: all parts together fit into ten minutes."""


def overhead(place: Place) -> Iterator[Row]:
    """Compare a step on one device in fused segments with a plain PyTorch step, alternating."""
    for net, side, batch in [("resnet:8:8", 16, 8)] if place.simulated else CASES:
        for precision in (None, torch.bfloat16):
            ratios, _ = _beside_plain(place, net, side, batch, precision)
            word = "float32" if precision is None else "bf16"
            yield Row(
                "overhead", f"{net} at {side}, batch {batch}, {word}, compared with plain PyTorch", _ratio(ratios)
            )


def graphs(place: Place) -> Iterator[Row]:
    """Do the same with `cuda_graphs=True`."""
    if place.device.type != "cuda":
        yield Row("graphs", "cuda_graphs=True", f"not here: {place.name} has no CUDA graphs")
        return
    for net, side, batch in GRAPH_CASES:
        for precision in (None, torch.bfloat16):
            ratios, told = _beside_plain(place, net, side, batch, precision, cuda_graphs=True)
            word = "float32" if precision is None else "bf16"
            yield Row(
                "graphs",
                f"{net} at {side}, batch {batch}, {word}, compared with plain PyTorch",
                f"{_ratio(ratios)}; {told}",
                "computed other values" not in told,
            )


def _ratio(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} +- {(max(ratios) - min(ratios)) / 2:.3f} of its step"


def _beside_plain(
    place: Place, net: str, side: int, batch: int, precision: torch.dtype | None, *, cuda_graphs: bool = False
) -> tuple[list[float], str]:
    """Return step seconds divided by plain PyTorch's per round, and a text about CUDA graphs."""
    torch.manual_seed(0)
    plain = build_net(net, (3, side, side), 10)
    x, y = torch.randn(batch, 3, side, side, device=place.device), torch.randint(0, 10, (batch,), device=place.device)
    plan = named_plan("data", trace(plain, x[:1].cpu()).graph, batch, Speeds((1.0,)))
    part = Distributed(plain, plan, AloneGroup(place.device), x[:1].cpu(), cuda_graphs=cuda_graphs)
    part.announce(batch)
    ways: dict[str, nn.Module] = {"convoy": part, "plain": copy.deepcopy(plain).to(place.device)}
    steps = {way: _step(model, x, y, precision) for way, model in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_UP + 1):
        steps["convoy"]()
    begin_s, rounds = time.perf_counter(), LEAST_ROUNDS if place.simulated else ROUNDS
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() - begin_s > CASE_S:
            break
        for way, step in steps.items():
            step()
            finish(place.device)
            start_s = time.perf_counter()
            for _ in range(2 if place.simulated else 10):
                step()
            finish(place.device)
            times[way].append(time.perf_counter() - start_s)
    told = part.cuda_graphs.summary() if part.cuda_graphs is not None else ""
    return [a / b for a, b in zip(times["convoy"], times["plain"], strict=True)], told


def _step(model: nn.Module, x: Tensor, y: Tensor, precision: torch.dtype | None) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        with torch.autocast(x.device.type, precision or torch.bfloat16, enabled=precision is not None):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def together(place: Place) -> Iterator[Row]:
    """Compare device + CPU under `auto` with the device alone; it must not be slower."""
    work = ("8", "8", "6", "2") if place.simulated else ("256", "32", "40", "60")
    found = {}
    for devices, plan in ((place.name, "data"), (f"{place.name},cpu", "auto")):
        done = _convoy(place, "run", "--devices", devices, str(ROOT / "benchmarks" / "gpu_worker.py"), plan, *work)
        line = next((line for line in done.stdout.splitlines() if "worker {" in line), None)
        if line is None:
            yield Row("together", devices, (done.stderr or done.stdout).strip().splitlines()[-1][:200], good=False)
            return
        found[plan] = json.loads(line[line.index("{") :])["samples_per_s"]
    ratio = found["auto"] / found["data"]
    # Less than a repeat of one measurement differs by is no loss.
    good = None if place.simulated else ratio >= 0.98
    yield Row(
        "together",
        f"{place.name} + cpu by auto, of {place.name} alone ({found['data']:.0f} samples/s)",
        f"{ratio:.2f}",
        good,
    )


PARTS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "parity": parity, "staging": staging, "streams": streams, "processes": processes, "nccl": nccl, "precision": precision,
    "kill": kill, "overhead": overhead, "together": together, "graphs": graphs,
}  # fmt: skip
"""Every part, in order: what takes longest and may be cut off comes last."""


def found_by(part: str, place: Place) -> Iterator[Row]:
    """Yield the rows of a check as it finds them. An error ends only that check and becomes a row."""
    try:
        yield from PARTS[part](place)
    except Exception as error:
        traceback.print_exc()
        yield Row(
            part, "ended by an error", f"{type(error).__name__}: {shortened(str(error).strip(), 200)}", good=False
        )


# --- all of it ----------------------------------------------------------------------------------------------------------------


@contextmanager
def place_of(device: str | None) -> Iterator[Place]:
    """Return the first accelerator, or a simulated one, and a folder for the checks' files."""
    with tempfile.TemporaryDirectory(prefix="convoy-gpu-") as folder:
        environment = os.environ | {"TMPDIR": folder, "CONVOY_RUNS": folder, "PYTHONPATH": _python_path(ROOT)}
        simulated = accelerator() is None
        if simulated:
            from tests.support import sim

            sim.load()
            installed = Path(folder, "convoy_sim-0.dist-info")
            installed.mkdir()
            (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: convoy-sim\nVersion: 0\n")
            (installed / "entry_points.txt").write_text("[torch.backends]\nsim = tests.support.sim:load\n")
            # The compiled backend lies in the system's folder for such files.
            environment |= {
                "PYTHONPATH": _python_path(ROOT, folder),
                "TMPDIR": tempfile.gettempdir(),
                "OMP_NUM_THREADS": "1",
            }
            torch.set_num_threads(1)
        yield Place(device or local_devices()[0], simulated, environment)


def _python_path(*first: str | Path) -> str:
    """Put these folders before those of the caller's PYTHONPATH, which may hold packages the processes need."""
    return os.pathsep.join([*map(str, first), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def page_of(place: Place, rows: Sequence[Row], took_s: float) -> str:
    made = stamp(COMMAND)
    ground = made["ground"]
    body = [[row.part, row.what, row.found, {None: "", True: "yes", False: "**no**"}[row.good]] for row in rows]
    return "\n\n".join(
        (
            "# On an accelerator",
            f"{hardware_name(place.device)} ({memory_of(place.device)[1] / 1e9:.0f} GB), {ground['processor']}, "
            f"{ground['cores']} cores, Python {ground['python']}, torch {ground['torch']}, convoy {ground['convoy']} at "
            f"{ground['revision'] or 'an unknown revision'}, {made['date'][:10]}, {took_s:.0f} s.",
            f"```\n{COMMAND}\n```",
            table(["part", "test", "result", "as expected"], body),
        )
    ) + "\n"  # fmt: skip


def page_of_none() -> str:
    """Return the page for the case that no accelerator has run the checks."""
    rows = [[name, (part.__doc__ or "").strip().splitlines()[0]] for name, part in PARTS.items()]
    return "\n\n".join(
        (
            "# On an accelerator",
            "**No GPU has run this yet.** Without a GPU, the tests and this command use a simulated accelerator "
            "(`tests/support/sim`). It has separate memory, streams and events, but no realistic speed, TF32, cuDNN or NCCL. "
            "On a machine with a GPU the command takes at most ten minutes and writes its results here, with hardware "
            f"and date. To run one part: `{COMMAND} --only parity`.",
            "```\nmake gpu\n```",
            table(["part", "test"], rows),
        )
    ) + "\n"  # fmt: skip


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run only this check; repeatable: {', '.join(PARTS)}.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device; default: the first accelerator.")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write this page; only for a real accelerator.")] = None,
) -> None:
    """Run the checks and print findings as they arrive."""
    if unknown := sorted(set(only or ()) - PARTS.keys()):
        raise unknown_name("part", unknown[0], PARTS)
    console, rows, start_s = Console(soft_wrap=True), [], time.perf_counter()
    with place_of(device) as place:
        if place.simulated:
            console.print("torch finds no accelerator on this machine: using a simulated one. Its speeds mean nothing.")
        for name in only or PARTS:
            for row in found_by(name, place):
                rows.append(row)
                mark = {None: " ", True: "ok", False: "NO"}[row.good]
                console.print(f"{mark:2} {row.part:10} {row.what}: {row.found}", highlight=False)
                if page is not None and not place.simulated:  # after each row: a run that is cut off keeps its findings
                    write_whole(page, page_of(place, rows, time.perf_counter() - start_s))
        console.print(f"{time.perf_counter() - start_s:.0f} s")
        if page is not None and not place.simulated:
            console.print(f"Written: {page}")
    if any(row.good is False for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
