"""One device of a training of `tests/elastic/test_joins_with.py`, as a process on a host of its own:

    python -m tests.support.joining_host CASE NAME FOLDER

NAME is the device's number, "first" for the one that comes, or "alone". What became of it lies in FOLDER/result-NAME then.
"""

import copy
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from convoy.comm.environment import ProcessEnv
from convoy.comm.group import ChangingGroup
from convoy.comm.processes import join
from convoy.comm.rendezvous import credentials_of
from convoy.elastic.entrance import Entrance
from tests.elastic.test_joins_with import CASES
from tests.elastic.test_newcomers import TIMEOUT_S, Job, alone


def live(job: Job, name: str, folder: Path) -> None:
    door = folder / "door"
    if name == "first":
        until_s = time.monotonic() + TIMEOUT_S
        while not door.exists():
            assert time.monotonic() < until_s, "no door was told"
            time.sleep(0.02)
        host, port = json.loads(door.read_text())
        entrance = Entrance(
            [(host, port)], credentials_of(ProcessEnv(0, 2, 0, None, host, port, hosted=False, attempt=0))
        )
        entrance.hello(TIMEOUT_S)
        job.device(name, job.built[name].group, (entrance, {"title": name}))
        return
    group = join("cpu", timeout_s=TIMEOUT_S)
    assert isinstance(group, ChangingGroup)
    if name == "0":
        threading.Thread(target=_tell, args=(job, door), daemon=True).start()
    job.device(name, group)


def _tell(job: Job, door: Path) -> None:
    while job.door is None:
        time.sleep(0.01)
    part = door.with_suffix(".part")
    part.write_text(json.dumps(job.door))
    part.rename(door)


def main() -> None:
    case, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    job = copy.copy(CASES[case])
    job.expected = {3: "first"}
    if name == "alone":
        torch.save(alone(job), folder / "result-alone")
        return
    live(job, name, folder)
    if job.errors:
        raise job.errors[0]
    torch.save((*job.results[name], job.told[name], os.getpid()), folder / f"result-{name}")


if __name__ == "__main__":
    main()
