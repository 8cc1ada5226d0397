"""Full disks and slow devices in chaos runs: random choice, a small disk, and checks of its content."""

import ctypes
import errno
import json
import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from convoy.checkpoint.run_folder import MODEL, checkpoints, read_checked
from lab.chaos import Blow, Case

TROUBLES = ("full", "slow")

SIZE_BYTES = 2 << 20
"""Of a small disk: several checkpoints of the net that these trainings have, and a log."""

ROOM_BYTES = (0, 0, 4096, 20_000, 60_000)
"""That a full disk may still have: nothing, or a part of a checkpoint."""


def trouble(dice: random.Random, kind: str, device: int) -> Blow:
    """Return a temporarily full disk or slow device."""
    at, call = dice.randint(1, 10), dice.randint(1, 30)
    if kind == "full":
        return Blow(device, kind, at, call, for_s=dice.uniform(0.05, 2.0), room_bytes=dice.choice(ROOM_BYTES))
    return Blow(device, kind, at, call, for_s=dice.uniform(0.2, 2.0))


def with_troubles(case: Case, kinds: Sequence[str], free: Sequence[int] | None = None) -> Case:
    """Return the case with such faults added, drawn from its seed; mostly on the writing device's disk.

    Args:
        free: devices that they may happen to, once each kind; None: all, and several times.
    """
    dice = random.Random(f"{case.seed} {' '.join(kinds)}")
    blows = list(case.blows)
    for kind in kinds:
        chosen = [dice.choice((0, dice.randrange(case.devices))) for _ in range(dice.randint(1, 3))]
        if free is not None:
            chosen = dice.sample(free, min(len(chosen), len(free)))
        blows += [trouble(dice, kind, device) for device in chosen]
    saves = case.saves if "full" not in kinds else case.saves or dice.choice((1, 2))
    return replace(case, blows=tuple(blows), saves=saves)


# ---------------------------------------------------------------------------------------------------------- a small disk


def own_mounts() -> None:
    """Give this process a private mount namespace. Call before starting threads; Linux, root.

    Raises:
        OSError: it may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None):  # NEWNS; REC | PRIVATE
        raise OSError(ctypes.get_errno(), "full disks of processes need root: only root may mount one")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of `SIZE_BYTES` on the folder for the context."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "convoy-chaos", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(ballast: Path, room_bytes: int) -> None:
    """Fill the disk except for the given number of bytes."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - room_bytes))
        # Others write at the same moment: what they have freed since is taken, too.
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------- and what is on it


def faults(run: Path, steps: int, state: Mapping[str, Tensor], tight: float) -> str:
    """Return the faults in a finished training's checkpoints; empty if none.

    Args:
        state: of one device, undisturbed, after so many steps.
    """
    found = checkpoints(run)
    if not found:
        return f"{run} holds no checkpoint"
    last = [read_checked(path) for path in found][-1]
    if last.progress.step != steps:
        return f"the last checkpoint is of step {last.progress.step}, not {steps}"
    for key, tensor in load_file(found[-1] / MODEL).items():
        if not torch.allclose(tensor.double(), state[key].double(), rtol=tight, atol=tight):
            return f"{key} of the last checkpoint is not that of one device"
    return ""


def log_faults(log: Path, steps: int, told: Sequence[str]) -> str:
    """Return unreported gaps of a log; empty if none."""
    *lines, _ = log.read_text().split("\n")  # a full disk may have cut the last line
    rows = [json.loads(line) for line in lines]
    missing = set(range(steps)) - {row["step"] for row in rows if row["what"] == "step"}
    if missing and not any("the log ends here" in line for line in told):
        return f"the log lacks the steps {sorted(missing)}, and nobody told: {told}"
    return ""
