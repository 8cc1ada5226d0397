"""A fleet of the two ssh hosts attic and cellar of `ssh_hosts`, with devices that need no torch."""

import sys
from pathlib import Path

FLEET = """
[network]
send_bytes_per_s = 125e6
receive_bytes_per_s = 125e6
latency_s = 5e-5

[[host]]
name = "attic"
address = "10.77.0.2"
{attic}

[[host]]
name = "cellar"
address = "10.77.0.3"
{cellar}

[[device]]
name = "attic-0"
host = "attic"
kind = "cpu"

[[device]]
name = "cellar-0"
host = "cellar"
kind = "cpu"
cores = 1.5
slowdown = 2

[[device]]
name = "attic-1"
host = "attic"
kind = "cpu"
"""

QUICK = """#!/bin/sh
exec {python} -c '
import sys
from convoy.launch import agent
agent.CONVOY_COMMAND = (sys.executable, "-S", "-c")
agent.SILENCE_S = 3.0
{more}
sys.exit(agent.Agent(0, 1).serve())
'
"""
"""A host's Python whose devices are scripts that need no torch."""


def convoy(*argv: str) -> list[str]:
    return [sys.executable, "-m", "convoy", *argv]


def python_of(folder: Path, name: str = "quick", more: str = "") -> str:
    path = folder / name
    path.write_text(QUICK.format(python=sys.executable, more=more))
    path.chmod(0o755)
    return f'python = "{path}"'


def fleet_file(folder: Path, attic: str, cellar: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(FLEET.format(attic=attic, cellar=cellar))
    return path
