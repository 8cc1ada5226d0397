"""Builds the ssh command line, and finds remedies for ssh's error messages. Pure.

Keys, agents, jump hosts and aliases are in ~/.ssh/config. CONVOY_SSH sets another program or other options, e.g.
`CONVOY_SSH="ssh -F lab.config"`.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from convoy.errors import InputError
from convoy.fleet import Host

_OPTIONS = (
    "BatchMode=yes",  # never ask for a password
    "ConnectTimeout=10",
    "ServerAliveInterval=5",  # seconds; after three messages without an answer ssh gives up
    "ServerAliveCountMax=3",
    "ForwardX11=no",
    "ControlMaster=no",  # a master would outlive the job and keep its files open
)

_HOST_KEY = "this machine does not know its host key: connect once by hand and compare the fingerprint: {call}"
_OWN_KEY = "it does not accept your key: copy it (ssh-copy-id {target}), or name another `user` in its [[host]]"
_SILENT = "check that the machine is on, its address and ssh_port are right, and its ssh server runs: {call}"
_NO_CONVOY = "{python} there has no Convoy: run `convoy fleet setup`, or name another `python` in its [[host]]"
_REMEDIES = {
    r"IDENTIFICATION HAS CHANGED": "its host key has changed. If you know why: ssh-keygen -R {address}",
    r"Host key verification failed": _HOST_KEY,
    r"Permission denied \(": _OWN_KEY,
    r"Could not resolve hostname": "correct its address in the fleet file, or add a Host to ~/.ssh/config",
    r"refused|timed out|No route to host|Network is unreachable|Connection closed|Connection reset": _SILENT,
    r"No module named '?convoy": _NO_CONVOY,
    r"\bcd:": "the folder {folder} is not there: make it, or name its `folder` in its [[host]]",
    r"not found|No such file|Permission denied": "{python} cannot be run there: name its `python` in its [[host]]",
    r"": "try it by hand: {call}",
}
"""Remedies by a pattern of the output; the first that matches counts."""


def ssh_program(environment: Mapping[str, str]) -> list[str]:
    """Return ssh, or the command line in CONVOY_SSH. Raise InputError if it cannot be parsed."""
    text = environment.get("CONVOY_SSH") or "ssh"
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"CONVOY_SSH={text!r}: no command line ({error}); give e.g. 'ssh -F FILE'") from None


def ssh_call(program: Sequence[str], host: Host, command: str) -> list[str]:
    """Return the command line that runs `command` in the login shell of a host."""
    return [*ssh_words(program, host), "--", str(host.address), command]


def ssh_words(program: Sequence[str], host: Host) -> list[str]:
    """Return the ssh command line without the address, for programs that start ssh themselves."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    user = [] if host.user is None else ["-l", host.user]
    port = [] if host.ssh_port is None else ["-p", str(host.ssh_port)]
    return [*program, "-T", *options, *user, *port]


def remedy(host: Host, printed: str, python: str, folder: str) -> str:
    """Return the remedy for an unusable host, from the output of ssh and the host's shell."""
    target = str(host.address) if host.user is None else f"{host.user}@{host.address}"
    call = shlex.join(["ssh", *([] if host.ssh_port is None else ["-p", str(host.ssh_port)]), target])
    text = next(text for pattern, text in _REMEDIES.items() if re.search(pattern, printed))
    return text.format(
        address=host.address, target=target, call=call, python=host.python or python, folder=host.folder or folder
    )
