"""A fleet of two hosts that are reached by ssh, attic and cellar of `ssh_hosts`, and devices of theirs that need no torch."""

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

TRAINS = """
import threading
from convoy.comm import roster
# As `watch_parent` does, which would load torch.
threading.Thread(target=lambda: (os.read(int(os.environ["CONVOY_PARENT_PIPE"]), 1), os._exit(2)), daemon=True).start()
roster.enter("a job of this test", RANK, "cpu")
print("device", RANK, flush=True)
here()
if {begin!r} and (RANK != 1 or {begin!r} == "all"):
    roster.tell(trains=True)
while not os.path.exists(f"{{FOLDER}}/end"):
    time.sleep(0.05)
print("ends", flush=True)
"""
"""A device that enters a job; who trains: all ("all"), all but device 1 ("but one"), nobody ("")."""


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
