"""The table of findings: of each condition over the facts, how bad it is, what to say and what to do about it. Pure."""

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from convoy.comm.accelerator import MODES
from convoy.comm.environment import is_loopback
from convoy.doctor import conditions as on
from convoy.doctor.conditions import Condition, each_device, each_host, listed, only
from convoy.doctor.schema import Checkup, Examination, Finding, Reach, Severity

ABOUT = "{about}"
"""Stands in a finding for the names of those it is about, so that several can share it."""


UNITS = {
    "ms": (1e-3, ".3g"),
    "GB": (1e9, ".1f"),
    "MiB": (1 << 20, ".0f"),
    "MB/s": (1e6, ".3g"),
    "Gbit/s": (0.125e9, "g"),
}
"""Name -> (size in s, bytes or bytes/s, format of the number)."""


class _Words(string.Formatter):
    """Format strings that also know units: ``{free_bytes:GB}``."""

    def format_field(self, value: Any, format_spec: str) -> str:
        size, digits = UNITS.get(format_spec, (None, format_spec))
        return format(value, digits) if size is None else f"{value / size:{digits}} {format_spec}"


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        what, cure: format strings over the values that the condition gives. Findings with `{about}` in `what` that are
            otherwise equal become one.
    """

    severity: Severity
    condition: Condition
    what: str
    cure: str

    def findings(self, facts: Examination) -> Iterator[Finding]:
        """One finding per occurrence."""
        words = _Words()
        for values in self.condition(facts):
            what, cure = (words.vformat(text, (), {**values, "about": ABOUT}) for text in (self.what, self.cure))
            yield Finding(self.severity, what, cure, tuple(values["about"]))


def _mode(own: Checkup, name: str) -> str:
    return own.modes.get(name, "unknown")


def diagnose(examination: Examination) -> tuple[Finding, ...]:
    """All findings that the facts give: errors first, then warnings, then notes."""
    found = [*examination.reports, *(finding for rule in RULES for finding in rule.findings(examination))]
    return tuple(sorted(merged(found), key=lambda finding: ("error", "warning", "note").index(finding.severity)))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that say the same of several hosts or devices; the one that is left lists them in place of `ABOUT`."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        shared = ABOUT in finding.what
        groups.setdefault(replace(finding, about=()) if shared else finding, []).extend(finding.about)
    return [
        replace(finding, what=finding.what.replace(ABOUT, listed(about)), about=tuple(about))
        for finding, about in groups.items()
    ]


_ABSENT = "{missing} of {facts.devices} devices did not come within {facts.waited_s:g} s: {who}"
_PORTS = "training connects to any port from 1024 up; open them between the hosts (sudo ufw allow from {allowed}, on {target})"
_SLOW = "{what}: {most}{rate:MB/s} of the {expected:MB/s} {of}"
_NO_GPU = "on {about} there is an NVIDIA driver, but "

# fmt: off
RULES: tuple[Rule, ...] = (
    # the job as a whole
    Rule("error", only(True, on.absent), _ABSENT,
         "The meeting point {at} is {address} on {host}, which leads to itself only: set MASTER_ADDR to its address in the "
         "network{own.example}"),
    Rule("error", only(False, on.absent), _ABSENT,
         "Look at their own output: if they run, it says why they cannot reach {at}. If there is none, start them with "
         "MASTER_ADDR and MASTER_PORT of that point, or a job of {came} devices"),
    Rule("error", each_device(lambda facts, own: own.device not in facts.paces),
         "{name} came, then fell silent while it was examined",
         "Its process has died or froze, or its machine is overloaded: its own output or system log says more"),
    Rule("error", on.other_fleet,
         "the fleet file has {described} devices, this job has {devices}",
         "Start one process for each device of the file; until then its names and rates are not used"),
    Rule("error", each_device(on.other_kind),
         "{name} is of kind {described.kind} in the fleet file, but computes on {own.on}",
         "Start the processes in the order of the file; set CONVOY_DEVICE={described.kind} there if it is the default"),
    Rule("error", on.other_hosts,
         "{a} and {b} are on {hosts} in the fleet file, but not in this job",
         "Start the processes in the order of the file, each on its host"),
    Rule("error", on.differing(lambda own: own.convoy),
         "not the same convoy everywhere: {usual} on most, but {others}",
         "A job refuses to start. Install the same on every host"),
    Rule("error", on.differing(lambda own: ".".join(own.torch.split(".")[:2])),
         "not the same torch everywhere: {usual} on most, but {others}",
         "A job refuses to start. Install the same torch on every host (patch releases may differ)"),
    Rule("error", on.differing(lambda own: str(own.devices)),
         "not the same number of devices (WORLD_SIZE) everywhere: {usual} on most, but {others}",
         "They wait for different jobs. Start all with the same number"),
    *(Rule("error", on.differing(partial(_mode, name=f"torch.{name}")),
           f"torch computes in other modes: torch.{name} is {{usual}} on most, but {{others}}",
           "A job refuses to start. Look for an environment variable (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and for what sets it "
           "when Python starts")
      for name in MODES),
    Rule("note", on.differing(lambda own: own.python),
         "the hosts run Python {all}",
         "Nothing to do: no Python objects travel between them"),
    Rule("error", each_host(lambda facts, own: len(facts.hosts) > 1 and is_loopback(own.address)),
         "{name} would tell the others to reach it at {own.address}, which leads to themselves",
         "Set GLOO_SOCKET_IFNAME there to its interface in the network{own.example}"),
    Rule("error", on.same_address,
         "{a} and {b} both say that their address is {address}",
         "Containers on separate bridges do: start them with the network of their host (docker run --network=host). Else give "
         "one of the machines another address"),

    # links
    Rule("error", only(Reach.REFUSED, on.closed),
         "{whom}: {at} refuses the connection, though {target} listens there",
         f"A firewall rejects it: {_PORTS}"),
    Rule("error", only(Reach.SILENT, on.closed),
         "{whom}: {at} does not answer",
         f"A firewall drops it, or {{target}} cannot answer: {_PORTS}{{one_way}}"),
    Rule("error", only(Reach.NO_ROUTE, on.closed),
         "{whom}: there is no way to {at} (no route to host)",
         "See on {source}: ip route get {address}. The hosts must be on one network, or have routes to each other; "
         "GLOO_SOCKET_IFNAME chooses the interface. A firewall (firewalld) may answer like that too{one_way}"),
    Rule("error", only(Reach.STRANGER, on.closed),
         "{whom}: at {at} answers another program than the doctor of {target}",
         "Two machines may have that address, or port {port} is forwarded elsewhere (NAT, a container): give each host an "
         "address that the others reach directly"),
    Rule("error", on.swallowing,
         "small messages pass from {pair[0]} to {pair[1]}, but data does not",
         "Packets of full size are lost on the way: the MTU must be the same on both hosts and the switch (ip link shows it; "
         "1500 is safe, in tunnels less)"),
    Rule("warning", only(True, on.slow), _SLOW,
         "This is what 100 Mbit/s carry: a bad cable, or an old switch or port; ethtool on {host} says at what it runs. "
         "{then}"),
    Rule("warning", only(False, on.slow), _SLOW,
         "Look at its cable, switch port and other traffic; ethtool on {host} says at what its card runs. {then}"),
    Rule("warning", on.late,
         "messages between {pair[0]} and {pair[1]} take long: {trip:ms} there and back",
         "Every move and every sum waits so long: use a cable in place of radio or a tunnel, or hosts of one site; larger "
         "batches wait less often"),
    Rule("warning", on.clocks,
         "the clock of {host} is {off} {side} the others'",
         "Training does not mind, but logs and files tell wrong times: sudo timedatectl set-ntp true, on {host}"),

    # each device and each machine
    Rule("error", each_device(lambda _, own: own.on_problem != ""),
         "{name}: {own.on_problem}",
         "Set CONVOY_DEVICE, or leave it unset"),
    Rule("error", each_device(lambda _, own: own.address_problem != ""),
         "{name} has no address: {own.address_problem}",
         "Until then no other host can reach it"),
    Rule("warning", only("many", each_device(on.threads)),
         "{about}: {compute}, where {share:.3g} cores may be used",
         "They stand in each other's way: set OMP_NUM_THREADS={advised} there"),
    Rule("warning", only("few", each_device(on.threads)),
         "{about}: {compute}{why}, though there are {share:.3g} cores",
         "Set OMP_NUM_THREADS={advised} there"),
    Rule("error", each_host(lambda _, own: not own.loopback_works),
         "{name} cannot connect to itself at 127.0.0.1",
         "Bring its loopback interface up (ip link set lo up), and let its firewall accept what comes from lo"),
    Rule("warning", each_host(on.leads_to_itself),
         "on {about} the machine's own name leads to itself only ({own.resolves_to[0]})",
         "Convoy does not use it, but as MASTER_ADDR it would keep all others waiting: give its address in the network there "
         "(ip -br address shows it), or put that before the name in /etc/hosts"),
    Rule("warning", only("faster", each_host(on.interface)),
         "{name} talks through {used.name} ({used.bytes_per_s:Gbit/s}), though {best.name} ({best.bytes_per_s:Gbit/s}, "
         "{best.addresses[0]}) is up",
         "If all hosts are on that network: GLOO_SOCKET_IFNAME={best.name}, and MASTER_ADDR with an address of it"),
    Rule("warning", only("radio", each_host(on.interface)),
         "{name} talks through {used.name}, a radio: slow, and slower at times",
         "Use a cable{wired}"),
    Rule("note", only("others", each_host(on.interface)),
         "{name} talks through {used.name} ({own.address}), where its route leads; it also has {others}",
         "If another is the one to use, name it in GLOO_SOCKET_IFNAME on that host"),
    Rule("error", each_host(on.nccl_interface),
         "NCCL_SOCKET_IFNAME={chosen} on {name}: no interface of that name is up",
         "Unset it, or name one of {present}"),
    Rule("warning", each_host(on.nccl_slow),
         "{variable}=1 on {name}: its {count} GPUs talk the slow way",
         "Unset {variable} unless they hang without it"),
    Rule("note", only("hidden", each_host(on.without_gpus)),
         _NO_GPU + "CUDA_VISIBLE_DEVICES={own.environment[CUDA_VISIBLE_DEVICES]!r} hides the GPUs",
         "Unset it to train on them"),
    Rule("warning", only("cpu", each_host(on.without_gpus)),
         _NO_GPU + "torch {own.torch} is a build for processors only",
         "Install torch with CUDA there (pytorch.org has the command), on every host"),
    Rule("warning", only("no reason", each_host(on.without_gpus)),
         _NO_GPU + "torch {own.torch} (CUDA {own.cuda}) finds no GPU",
         "Look at nvidia-smi: the driver may be too old for this CUDA, or a container started without --gpus all"),
    Rule("warning", each_host(lambda _, own: own.free_bytes < on.MIN_FREE * own.memory_bytes),
         "{name} has {own.free_bytes:GB} of {own.memory_bytes:GB} memory free",
         "End what fills it (look with top, sorted by M), or give it a smaller share"),
    Rule("warning", each_host(on.taken_gpus),
         "other programs hold {taken:GB} of the {gpu.total_bytes:GB} of cuda:{index} on {name}",
         "nvidia-smi names them; end them, or leave this GPU out"),
    Rule("warning", each_host(lambda _, own: own.shared_bytes is not None and own.shared_bytes < on.MIN_SHARED_BYTES),
         "/dev/shm on {about} holds {own.shared_bytes:MiB}, as Docker's default",
         "Workers that read images crash there (bus error): start the container with --ipc=host or --shm-size=2g"),
    Rule("warning", each_host(on.few_files),
         "on {about} a process may open {own.open_files} files, connections included",
         "{least} are wanted: ulimit -n 4096 before the start"),
    Rule("warning", each_host(on.busy),
         "other programs keep {pace.busy_cores:.1f} of the {own.cores} cores of {about} busy",
         "Look with top and end them, or wait: every step waits for the slowest device"),

    # speeds
    Rule("warning", on.slower_than_equals,
         "{name} computes at {part:.0%} of the speed of devices just like it",
         "Something holds it back: other programs (top, nvidia-smi), heat or a power limit (cpupower frequency-info, "
         "nvidia-smi -q -d PERFORMANCE), missing memory modules"),
    Rule("warning", on.slower_than_past,
         "{name} computes at {part:.0%} of what it did, beside the others, when the fleet was measured",
         "Something holds it back (other programs, heat, fewer cores); if it is to stay so: convoy measure again"),
    Rule("note", on.slowest,
         "{slow} is the slowest: {factor:.1f} times slower than {fast}",
         "Nothing to do: --plan auto or data-by-speed give it about {share:.0%} of the work. Even shares (data, model, or "
         "PyTorch DDP) would run all {count} devices at its pace"),
)
