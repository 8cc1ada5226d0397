"""Hosts with their own ssh servers on one machine: network namespaces, an sshd in each, and a client that knows
them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from tests.support.processes import PLACE, ROOT
from tests.support.programs import needs

PRIVILEGES = Path("/run/sshd")
"""sshd locks itself into this empty folder. A service makes it at boot; here there may be none, and it stays for the next."""


needs_ssh = needs("ip", "sshd", "ssh", "ssh-keygen", root=True)
"""Skips a test where there can be no such hosts."""


@dataclass(frozen=True)
class Lab:
    """The hosts, by name.

    Attributes:
        folder: keys, configurations, and what a test puts there.
        servers: process id of each host's ssh server.
    """

    folder: Path
    wiring: namespaces.Wiring
    servers: dict[str, int]

    @contextmanager
    def on(self, host: str, command: Sequence[str], ssh: str = "client") -> Iterator["subprocess.Popen[str]"]:
        """Return a command that runs on a host in its own session. `ssh` is the ssh configuration."""
        environment = {name: value for name, value in os.environ.items() if name not in (*PLACE, "COLUMNS")}
        environment |= {"CONVOY_SSH": f"ssh -F {self.folder / ssh}", "PYTHONWARNINGS": "error"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.wiring.port(host).namespace, *command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def run(
        self, host: str, command: Sequence[str], ssh: str = "client", limit_s: float = 60.0
    ) -> tuple[int, str, str]:
        """Run a command on a host to its end; return status, output and errors."""
        with self.on(host, command, ssh) as process:
            output, errors = process.communicate(timeout=limit_s)
        return process.returncode, output, errors

    def at_work(self) -> dict[int, str]:
        """Return the processes on the hosts except their ssh servers, which wait long for a vanished client."""
        found = {}
        for port in self.wiring.ports:
            listed = subprocess.check_output(["ip", "netns", "pids", port.namespace], text=True)
            for pid in set(map(int, listed.split())) - set(self.servers.values()):
                with suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return {pid: command for pid, command in found.items() if not command.startswith("sshd: ")}

    @contextmanager
    def cable_pulled(self, host: str) -> Iterator[None]:
        """Drop all traffic to and from the host without informing anyone."""
        card = ["ip", "-netns", self.wiring.switch, "link", "set", self.wiring.port(host).plug]
        subprocess.check_call([*card, "down"])
        try:
            yield
        finally:
            subprocess.check_call([*card, "up"])


@contextmanager
def lab(folder: Path, hosts: Sequence[str], set_env: str = f"PYTHONPATH={ROOT}") -> Iterator[Lab]:
    """Create the hosts for the duration of the context."""
    wiring = namespaces.wire(RunName.mine(), hosts)
    for name in ("key", "stranger", *(f"host_key-{host}" for host in hosts)):
        subprocess.check_call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)])
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    keys = {port.address: (folder / f"host_key-{port.host}.pub").read_text() for port in wiring.ports}
    (folder / "known").write_text("".join(f"{address} {key}" for address, key in keys.items()))
    (folder / "changed").write_text("".join(f"{address} {(folder / 'stranger.pub').read_text()}" for address in keys))
    (folder / "unknown").write_text("")
    for name, key, hosts_file in (
        ("client", "key", "known"),
        ("wrong-key", "stranger", "known"),
        ("unknown-host", "key", "unknown"),
        ("changed-host", "key", "changed"),
    ):
        lines = [f"IdentityFile {folder / key}", "IdentitiesOnly yes", f"UserKnownHostsFile {folder / hosts_file}"]
        (folder / name).write_text("\n".join(["Host *", *lines, "GlobalKnownHostsFile /dev/null", ""]))
    with ExitStack() as stack:
        PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
        stack.enter_context(namespaces.network(wiring))
        servers = {port.host: stack.enter_context(_server(folder, port, set_env)) for port in wiring.ports}
        yield Lab(folder, wiring, servers)


@contextmanager
def _server(folder: Path, port: namespaces.Port, set_env: str) -> Iterator[int]:
    config, log = folder / f"sshd-{port.host}", folder / f"sshd-{port.host}.log"
    lines = [
        "Port 22",
        f"ListenAddress {port.address}",
        f"HostKey {folder / f'host_key-{port.host}'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        "PidFile none",
        f"SetEnv {set_env}",
        "PermitRootLogin yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "StrictModes no",  # a test's folder may lie below one that others can write to
    ]
    config.write_text("\n".join([*lines, ""]))
    command = ["ip", "netns", "exec", port.namespace, shutil.which("sshd") or "sshd", "-D", "-e", "-f", str(config)]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        assert eventually(lambda: "Server listening" in log.read_text() or server.poll() is not None)
        assert server.poll() is None, log.read_text()
        yield server.pid
    finally:
        server.terminate()
        server.wait(10)


def eventually(what: Callable[[], bool], limit_s: float = 30.0) -> bool:
    """Return whether the condition becomes true within a generous limit."""
    deadline_s = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


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
