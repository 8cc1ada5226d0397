"""Devices on hosts of their own (network namespaces; Linux, root), whose cables are cut, both ways or one way.

    python -m benchmarks.chaos_network [--cut both|one-way|between] [--plan model] [--seed 1]

    both      a device hears nobody any more, and nobody hears it
    one-way   what a device sends is lost; what others send arrives
    between   two devices do not hear each other; both and the third do

Afterwards the numbers of those that are left must be those of one device.
"""

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from benchmarks.chaos import TIGHT, Case, Outcome, _forked, _reap, alone, compared, work
from convoy.comm.job_key import write_key_file
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName, call

NOBODY = "02:00:00:00:00:99"
"""A hardware address that no card has."""


def enter(namespace: str) -> None:
    """From now on this process speaks through the cards of a namespace."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def cut(wiring: namespaces.Wiring, kind: str, device: int) -> None:
    """Cut the cable of a device; "between": that to the next one."""
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


def run(case: Case, kind: str, device: int, at: int, limit_s: float = 70.0) -> Outcome:
    """Run a case, and cut a device's cable once it has done `at` steps.

    Raises:
        RuntimeError: it did not end in time, or left no result.
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
            deadline_s, is_cut = time.monotonic() + limit_s, False
            while len(statuses) < case.devices:
                _reap(pids, statuses)
                done = folder / f"steps-{device}"
                if not is_cut and done.exists() and done.stat().st_size >= at:
                    cut(wiring, kind, device)
                    is_cut = True
                if time.monotonic() > deadline_s:
                    told = f"{case}, {kind} of {device}, did not end within {limit_s:g} s\n"
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
        if not is_cut:
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
    found = run(case, given.cut, given.device, 4)
    pauses = [round(s, 2) for s in found.pauses_s]
    print(f"{given.cut}: apart {found.apart:.1e}, {found.statuses}, {found.told}, pauses {pauses}")
    if not found.apart < TIGHT:
        sys.exit(1)


if __name__ == "__main__":
    main()
