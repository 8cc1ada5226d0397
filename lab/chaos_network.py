"""Devices on separate hosts (network namespaces; Linux, root) whose cables are cut in one or both directions.

    python -m lab.chaos_network --cut one-way [--plan model] [--seed 1]
    python -m lab.chaos --inside hosts --seed 1 --minutes 10

The first cuts one cable of one training; the second draws trainings, which cable is cut, how, when, and for how long, from
seeds.

    both      a device hears nobody any more, and nobody hears it
    one-way   what a device sends is lost; what others send arrives
    between   two devices do not hear each other; both and the third do

Afterwards the numbers of those that are left must be those of one device.
"""

import argparse
import ctypes
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.comm.job_key import write_key_file
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName, call
from lab.chaos import PLANS, TIGHT, Case, Outcome, _forked, _reap, alone, compared, work

NOBODY = "02:00:00:00:00:99"
"""A hardware address that no card has."""


@dataclass(frozen=True)
class Cut:
    """A cable cut.

    Attributes:
        kind: "both", "one-way", "between".
        device: whose cable; "between": that to the next one.
        at: once this device has done so many steps.
        for_s: until it is whole again; None: for good.
    """

    kind: str
    device: int
    at: int
    for_s: float | None = None


def enter(namespace: str) -> None:
    """Move this process's network traffic into a namespace."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def cut(wiring: namespaces.Wiring, kind: str, device: int) -> None:
    """Cut the cable of a device; "between": the one to the next device."""
    ports = wiring.ports
    port, after = ports[device], ports[(device + 1) % len(ports)]
    if kind == "both":
        call("ip", "-netns", wiring.switch, "link", "set", port.plug, "down")
    away = [(port, each) for each in ports if each is not port]
    lost = {"both": [], "one-way": away, "between": [(port, after), (after, port)]}
    for sender, receiver in lost[kind]:
        call(
            "ip", "-netns", sender.namespace, "neigh", "replace", receiver.address, "lladdr", NOBODY, "nud", "permanent",
            "dev", namespaces.NIC,
        )  # fmt: skip


def mend(wiring: namespaces.Wiring, cut_: Cut) -> None:
    """Reconnect the cable."""
    ports = wiring.ports
    port, after = ports[cut_.device], ports[(cut_.device + 1) % len(ports)]
    if cut_.kind == "both":
        call("ip", "-netns", wiring.switch, "link", "set", port.plug, "up")
    away = [(port, each) for each in ports if each is not port]
    for sender, receiver in {"both": [], "one-way": away, "between": [(port, after), (after, port)]}[cut_.kind]:
        call("ip", "-netns", sender.namespace, "neigh", "del", receiver.address, "dev", namespaces.NIC)


def drawn(seed: int) -> tuple[Case, Cut]:
    """Draw a training and a cut from a seed."""
    dice = random.Random(seed)
    devices, plan, optimizer = dice.choice((3, 3, 4)), dice.choice(PLANS), dice.choice(("sgd", "adam"))
    at, for_s = dice.randint(2, 12), dice.choice((None, None, dice.uniform(0.3, 3.0), dice.uniform(5.0, 12.0)))
    cut_ = Cut(dice.choice(("both", "one-way", "between")), dice.randrange(devices), at, for_s)
    return Case(seed, devices, plan, optimizer, epochs=4, every=dice.choice((1, 1, 3)), pace_s=0.1), cut_


def many(seed: int, minutes: float) -> str:
    """Draw and run trainings; print one line for each and a summary.

    Raises:
        SystemExit: one went wrong; its seed is named.
    """
    until_s, kinds, worst, at = time.monotonic() + 60 * minutes, Counter[str](), 0.0, seed
    wrong: list[int] = []
    while time.monotonic() < until_s and len(wrong) < 10:
        case, cut_ = drawn(at)
        begun_s, told = time.monotonic(), ""
        try:
            found = run(case, cut_)
            kinds[cut_.kind] += 1
            worst = max(worst, found.apart)
            told = f"apart {found.apart:.1e}, {found.statuses}, {found.told}"
            good = found.apart < TIGHT
        except (RuntimeError, AssertionError) as error:
            told, good = f"WRONG: {error}", False
        wrong += [] if good else [at]
        print(
            f"seed {at}: {case.plan} on {case.devices}, {cut_}: {told}, {time.monotonic() - begun_s:.1f} s", flush=True
        )
        at += 1
    found_ = f"{at - seed} trainings, {kinds.total()} events ({dict(kinds)}), at most {worst:.1e} apart"
    if wrong:
        raise SystemExit(f"{found_}; wrong: seeds {wrong}")
    return found_


def run(case: Case, cut_: Cut, limit_s: float = 90.0) -> Outcome:
    """Run a case and cut a device's cable.

    Raises:
        RuntimeError: it did not end in time, left no result, or was over before.
    """
    mine = RunName.mine()
    wiring = namespaces.wire(mine, [f"h{d}" for d in range(case.devices)])
    statuses: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_key_file(folder / "key")
        os.waitpid(_forked(lambda: torch.save(alone(case), folder / "alone"), {}, folder / "output-alone"), 0)
        losses, state = torch.load(folder / "alone")
        stack.enter_context(namespaces.network(wiring))
        pids = []
        for rank, port in enumerate(wiring.ports):
            env = {
                "RANK": str(rank), "WORLD_SIZE": str(case.devices), "LOCAL_RANK": "0", "MASTER_ADDR": wiring.ports[0].address,
                "MASTER_PORT": "29511", "CONVOY_JOB_KEY": str(folder / "key"), "CONVOY_DEVICE": "cpu",
            }  # fmt: skip

            def device_of(namespace: str = port.namespace) -> None:
                enter(namespace)
                work(case, folder)

            pids.append(_forked(device_of, env, folder / f"output-{rank}"))
        try:
            deadline_s, cut_s, is_whole = time.monotonic() + limit_s, 0.0, False
            while len(statuses) < case.devices:
                _reap(pids, statuses)
                done = folder / f"steps-{cut_.device}"
                if not cut_s and done.exists() and done.stat().st_size >= cut_.at:
                    cut(wiring, cut_.kind, cut_.device)
                    cut_s = time.monotonic()
                if cut_s and not is_whole and cut_.for_s is not None and time.monotonic() > cut_s + cut_.for_s:
                    mend(wiring, cut_)
                    is_whole = True
                if time.monotonic() > deadline_s:
                    told = f"{case}, {cut_}, did not end within {limit_s:g} s\n"
                    raise RuntimeError(told + _outputs(folder, case))
                time.sleep(0.01)
        finally:
            for rank, pid in enumerate(pids):
                if rank not in statuses:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
        if not (folder / "result").exists():
            raise RuntimeError(f"{case} left no result: {statuses}\n" + _outputs(folder, case))
        if not cut_s:
            raise RuntimeError(f"{case} was over before the cable was cut")
        return compared(case, folder, losses, state, [statuses[d] for d in range(case.devices)])


def _outputs(folder: Path, case: Case) -> str:
    return "\n".join((folder / f"output-{d}").read_text(errors="replace")[-1500:] for d in range(case.devices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", default="both", choices=("both", "one-way", "between"))
    parser.add_argument("--plan", default="model")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--device", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    case = Case(given.seed, given.devices, given.plan, epochs=4, pace_s=0.1)
    found = run(case, Cut(given.cut, given.device, 4))
    pauses = [round(s, 2) for s in found.pauses_s]
    print(f"{given.cut}: apart {found.apart:.1e}, {found.statuses}, {found.told}, pauses {pauses}")
    if not found.apart < TIGHT:
        sys.exit(1)


if __name__ == "__main__":
    main()
