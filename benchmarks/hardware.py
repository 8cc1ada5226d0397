"""Record the hardware, versions and code revision of a benchmark run."""

import datetime
import hashlib
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from convoy import __version__


@dataclass(frozen=True)
class Ground:
    """The machine and the software of one run.

    Attributes:
        revision: of this repository; where files were changed, with "+" and what tells the changes from others; "" without git.
    """

    processor: str
    cores: int
    kernel: str
    python: str
    torch: str
    convoy: str
    revision: str


def stamp(command: str) -> dict[str, Any]:
    """Return the header of every result file: command, date, machine and its load."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ground": asdict(ground()),
        "load_average": os.getloadavg()[0],
    }


def ground() -> Ground:
    """Describe this machine now."""
    return Ground(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        convoy=__version__,
        revision=_revision(),
    )


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), platform.machine())


def _revision() -> str:
    def ask(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # What the benchmarks write is no change of the code that they measure.
        code = ("--", ":/convoy", ":/benchmarks/*.py")
        changed = ask("status", "--porcelain", *code)
        mark = "+" + hashlib.sha256((changed + ask("diff", "HEAD", *code)).encode()).hexdigest()[:6] if changed else ""
        return ask("rev-parse", "--short", "HEAD") + mark
    except (OSError, subprocess.SubprocessError):
        return ""
