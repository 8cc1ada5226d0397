"""Job keys: private key files, refusals without a key, and no exposure of the key."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import convoy
from convoy.comm import job_key
from convoy.comm.environment import ProcessEnv
from convoy.comm.job_key import key_of_process, key_to_start, machine_key, make_key, read_key_file, write_key_file
from convoy.comm.processes import join
from convoy.errors import ConvoyError, InputError
from convoy.launch.local import launch_local
from tests.support.processes import PLACE, ROOT, on_processes

HERE = ProcessEnv(0, 2, 0, 2, "192.0.2.7", 29500, hosted=False, attempt=0)
ELSEWHERE = ProcessEnv(0, 2, 0, 1, "192.0.2.7", 29500, hosted=False, attempt=0)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_key, "_used", None)
    monkeypatch.setattr(job_key, "_received", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (job_key.KEY_FILE, job_key.KEY_PIPE, job_key.TRUST):
        monkeypatch.delenv(name, raising=False)


# --------------------------------------------------------------------------------------------------------------- files


def test_key_file_must_be_private_to_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "job.key"
    before = os.umask(0)
    try:
        write_key_file(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_key_file(file).pem == file.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        write_key_file(file)
    for mode in (0o640, 0o604, 0o620, 0o610):
        file.chmod(mode)
        with pytest.raises(InputError, match=f"has mode {mode:04o}.*chmod 600"):
            read_key_file(file)


@pytest.mark.parametrize(
    "content", ["", "shopping list", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_invalid_key_is_refused_without_printing_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "job.key"
    file.touch(0o600)
    file.write_text(content)
    with pytest.raises(InputError, match="make one with `convoy fleet key FILE`") as caught:
        read_key_file(file)
    assert not content or content not in str(caught.value)
    with pytest.raises(InputError, match=r"No such file.*scp -p"):
        read_key_file(tmp_path / "none")


def test_a_key_never_prints_itself() -> None:
    key = make_key()
    assert "BEGIN" not in f"{key} {key!r} {[key]}"


def test_missing_home_directory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: "Could not determine home directory", as in a container whose user has no account."""

    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fails)
    with pytest.raises(InputError, match="has no home directory, and HOME is not set: set HOME or XDG_CACHE_HOME"):
        machine_key()


def test_this_machines_key_is_made_once(tmp_path: Path) -> None:
    first = machine_key()
    assert machine_key() == first
    folder = tmp_path / "cache" / "convoy"
    assert [path.name for path in folder.iterdir()] == ["this-machine.key"]
    assert (folder / "this-machine.key").stat().st_mode & 0o777 == 0o600


# ----------------------------------------------------------------------------------------------------------- processes


def test_key_lookup_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no key.*2 devices.*192.0.2.7.*`convoy fleet key FILE`.*--trust-network"):
        key_of_process(ELSEWHERE, {})
    assert key_of_process(ELSEWHERE, {job_key.TRUST: "1"}) is None
    assert key_of_process(HERE, {}) == machine_key()
    write_key_file(tmp_path / "job.key")
    named = {job_key.KEY_FILE: str(tmp_path / "job.key")}
    assert key_of_process(ELSEWHERE, named) == read_key_file(tmp_path / "job.key")
    handed = make_key()
    monkeypatch.setenv(job_key.KEY_PIPE, str(job_key.hand_over(handed.pem)))
    assert key_of_process(ELSEWHERE, named) == handed, "what the launcher says counts most"
    assert job_key.KEY_PIPE not in os.environ
    assert key_of_process(ELSEWHERE, named) == handed, "and a second time"


def test_a_script_can_give_the_key_as_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As actors of Ray do, which no launcher of ours starts."""
    monkeypatch.setattr(job_key, "_received", None)
    monkeypatch.setattr("convoy.comm.processes.join", lambda *_: job_key.take_over(os.environ))
    key = make_key()
    assert convoy.join(key=key.pem.decode()) == key


def test_a_launcher_makes_a_key_for_each_job(tmp_path: Path) -> None:
    assert key_to_start({}) != key_to_start({})
    assert key_to_start({job_key.TRUST: "1"}) is None
    write_key_file(tmp_path / "job.key")
    named = {job_key.KEY_FILE: str(tmp_path / "job.key")}
    assert key_to_start(named) == read_key_file(tmp_path / "job.key")
    with pytest.raises(InputError, match="remove --job-key"):
        key_to_start(named | {job_key.TRUST: "1"})


def test_missing_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Regression: `convoy train --job-key none.key` on one device ignored the missing file."""
    chosen: dict[str, str] = {}
    with pytest.raises(InputError, match=r"none\.key cannot be read: No such file"):
        job_key.choose(tmp_path / "none.key", False, chosen)
    assert chosen == {}
    write_key_file(tmp_path / "job.key")
    job_key.choose(tmp_path / "job.key", False, chosen)
    assert chosen == {job_key.KEY_FILE: str(tmp_path / "job.key")}


def meet_with_different_keys(device: int, folder: str) -> list[str]:
    file = Path(folder) / f"{device}.key"
    os.environ[job_key.KEY_FILE] = str(file)
    try:
        with join("cpu", timeout_s=3):
            return ["joined"]
    except ConvoyError as error:
        return [type(error).__name__, str(error)]


def test_peer_with_another_key_is_rejected(tmp_path: Path) -> None:
    for device in range(2):
        write_key_file(tmp_path / f"{device}.key")
    target = "tests.comm.test_job_key:meet_with_different_keys"
    (kept, why), (refused, said) = on_processes(2, target, str(tmp_path), joined=False)
    assert (refused, kept) == ("InputError", "DeviceLostError")
    assert "does not have the key of this job" in said
    assert "device 1 of 2 did not join" in why


# ------------------------------------------------------------------------------------------------- where it must not be


def secrets_of(file: Path) -> list[str]:
    """Return the lines of the private key."""
    private = file.read_text().split("-----BEGIN CERTIFICATE")[0]
    return [line for line in private.splitlines() if re.fullmatch(r"[A-Za-z0-9+/=]{20,}", line)]


def told_of_processes(parent: psutil.Process) -> Iterator[str]:
    """Return arguments and environments of a process and its descendants, as others can read them."""
    for process in [parent, *parent.children(recursive=True)]:
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                yield Path(f"/proc/{process.pid}/{name}").read_bytes().decode(errors="replace")


def started(words: list[str], folder: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    environment |= {"PYTHONPATH": str(ROOT), "CONVOY_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "convoy", *words]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **said), environment  # type: ignore[call-overload]


def test_key_is_never_exposed(tmp_path: Path) -> None:
    """Watch a training that writes everything it can from outside while it runs."""
    key = tmp_path / "job.key"
    write_key_file(key)
    secrets = secrets_of(key)
    assert len(secrets) >= 2
    written = tmp_path / "written"
    written.mkdir()
    options = f"--devices 2 --speeds 1,1 --limit 200 --page --checkpoint {written}/run --job-key {key}"
    words = f"train --data digits --net two-conv:4:8 {options}".split()
    process, _ = started(words, tmp_path)
    seen = set[str]()
    while process.poll() is None:
        with suppress(psutil.Error):
            seen.update(told_of_processes(psutil.Process(process.pid)))
        time.sleep(0.05)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert any("CONVOY_JOB_KEY_PIPE=" in text for text in seen), "the devices were seen"
    files = [path for path in [*written.rglob("*"), *(tmp_path / "runs").rglob("*")] if path.is_file()]
    assert files
    places = {"output": output, **{str(path): path.read_bytes().decode(errors="replace") for path in files}}
    places |= {f"process {number}": text for number, text in enumerate(seen)}
    assert [name for name, text in places.items() if any(secret in text for secret in secrets)] == []


def test_a_device_inherits_no_key_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipes are closed in the launcher and in the other devices: each has one, and it is empty once it was read."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os, stat, sys\n"
        "mine = int(os.environ['CONVOY_JOB_KEY_PIPE'])\n"
        "pipes = [n for n in map(int, os.listdir('/proc/self/fd')) if n > 2 and os.path.exists(f'/proc/self/fd/{n}')\n"
        "         and stat.S_ISFIFO(os.stat(f'/proc/self/fd/{n}').st_mode)]\n"
        "from convoy.comm.processes import join\n"
        "with join() as group:\n"
        "    group.agree('here', '')\n"
        "assert 'CONVOY_JOB_KEY_PIPE' not in os.environ\n"
        "left = [n for n in pipes if n == mine and os.path.exists(f'/proc/self/fd/{n}')]\n"
        "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(f'{len(pipes)} {len(left)}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert launch_local([str(tmp_path)], ["cpu", "cpu"], command=(sys.executable, str(script))) == 0
    # the pipe by which a device notices the launcher's end, and the key's; device 1's messages are read by the launcher
    assert [(tmp_path / rank).read_text().split()[1] for rank in "01"] == ["0", "0"]
    assert [int((tmp_path / rank).read_text().split()[0]) for rank in "01"] == [2, 2]
