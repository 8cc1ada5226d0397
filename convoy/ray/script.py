"""Runs a script on every device of a Ray cluster, as one job, for `convoy run --on ray`.

Ray Train starts equal workers, and ends all of them when one is lost. So this module uses Ray's actors: one for each GPU, and
one for each node without GPUs, with all its CPUs. Each starts the script as a process. With `goes_on`, the devices of lost
nodes are left out, and those of new nodes join.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from convoy.comm.environment import JOIN, LISTEN
from convoy.comm.job_key import TRUST, JobKey, key_to_start
from convoy.errors import InputError
from convoy.launch.agent import meeting_point
from convoy.launch.exit_status import Ending, conclude
from convoy.launch.host_job import DEFAULTS, memory_environment, rank_variables
from convoy.launch.supervisor import Interrupts, Start, Supervisor
from convoy.machine.launch_env import hidden

START_S = 60.0  # limit for an actor to start
POLL_S = 2.0  # seconds between two looks for new nodes


@dataclass(frozen=True)
class NodeDevice:
    """Device `local` of the `count` devices of a node. It takes `cpus` CPUs, and one of the node's GPUs if it has any."""

    node: str
    address: str
    local: int
    count: int
    cpus: int
    gpu: bool

    @property
    def title(self) -> str:
        return f"{'1 GPU, ' * self.gpu}{self.cpus} CPU on node {self.address}"


def devices_of(nodes: Iterable[Mapping[str, Any]]) -> list[NodeDevice]:
    """Return the devices of the living nodes in `ray.nodes()`."""
    found = []
    for node in nodes:
        cpus, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
        count = (gpus or min(cpus, 1)) if node["Alive"] else 0
        place = node["NodeID"], node["NodeManagerAddress"]
        found += [NodeDevice(*place, local, count, cpus // count, gpus > 0) for local in range(count)]
    return found


class DeviceActor:
    """The actor on a node that runs one device's process."""

    def meeting_points(self, peer: str) -> list[tuple[str, int]]:
        """Return addresses on this node with free ports: for the rendezvous, and for join requests."""
        return [meeting_point([peer], None) for _ in range(2)]

    def run(
        self, rank: int, title: str, argv: Sequence[str], variables: Mapping[str, str], key: bytes | None
    ) -> Ending:
        """Run the script. Ray sends the key with its TLS settings; the process gets it through a pipe."""
        with Interrupts() as interrupts, Supervisor(interrupts) as processes:
            start = Start(
                device=rank, name=title, command=[sys.executable, *argv],
                environment=hidden({**os.environ, **memory_environment(os.environ), **variables}), stdout=None,
                stderr="keep" if rank else None, lifeline=True, key=None if key is None else JobKey(key),
            )  # fmt: skip
            processes.start(start)
            processes.listen(lambda: not processes.running)
            return processes.endings[0]


class ClusterJob:
    """A script's devices on a cluster: running ones by the reference of their ending, and endings in order of time."""

    def __init__(self, argv: Sequence[str], goes_on: bool) -> None:
        key = key_to_start(os.environ)
        self.argv, self.goes_on, self.key = argv, goes_on, None if key is None else key.pem
        self.shared = {"PYTHONUNBUFFERED": "1"} | ({TRUST: "1"} if key is None else {})
        self.endings: list[Ending] = []
        self._running: dict[Any, tuple[int, NodeDevice, Any]] = {}  # with its actor, which ends with its last reference

    def run(self) -> int:
        """Start the devices of all nodes and wait for them. Returns and raises as `launch_local`."""
        here = ray.get_runtime_context().get_node_id()
        # Device 0, which answers join requests, is on this node: without this process there is no job.
        devices = sorted(devices_of(ray.nodes()), key=lambda device: device.node != here)
        if not devices:
            remedy = "add one with `ray start --address=HOST:PORT`"
            raise InputError(f"the Ray cluster has no node with CPUs or GPUs: {remedy}")
        print(f"Starts {len(devices)} devices: {'; '.join(device.title for device in devices)}", flush=True)
        actors = [_actor(device) for device in devices]
        points = [_points(*each, devices[-1].address) for each in zip(devices, actors, strict=True)]
        meeting, listener = points[0]
        listen = {LISTEN: f"{listener[0]}:{listener[1]}"} if self.goes_on else {}
        for rank, (device, actor) in enumerate(zip(devices, actors, strict=True)):
            variables = rank_variables(rank, device.local, len(devices), device.count, *meeting)
            self._start(rank, device, actor, variables | listen)
        while self._running and (self.goes_on or not any(ending.status for ending in self.endings)):
            self._note_ends(1, POLL_S)
            for device in devices_of(ray.nodes()) if self.goes_on and self._running else ():
                if device not in devices:
                    devices.append(device)
                    actor = _actor(device)
                    try:
                        _points(device, actor, device.address)
                    except InputError as error:
                        print(f"{error}. The job continues without it", file=sys.stderr)
                    else:
                        self._start(len(devices) - 1, device, actor, {JOIN: listen[LISTEN]})
        self._note_ends(len(self._running), DEFAULTS.grace_s)
        return conclude(self.endings, goes_on=self.goes_on)

    def _start(self, rank: int, device: NodeDevice, actor: Any, variables: Mapping[str, str]) -> None:
        variables = {**self.shared, "CONVOY_DEVICE": "cuda:0" if device.gpu else "cpu", **variables}
        self._running[actor.run.remote(rank, device.title, self.argv, variables, self.key)] = rank, device, actor

    def _note_ends(self, count: int, limit_s: float) -> None:
        """Wait for the ends of `count` devices, at most `limit_s`."""
        for reference in ray.wait(list(self._running), num_returns=count, timeout=limit_s)[0] if count else ():
            rank, device, _ = self._running.pop(reference)
            try:
                ending = ray.get(reference)
            except RayActorError:  # the node was lost
                ending = Ending(rank, device.title, -9)
            self.endings.append(ending)
            if ending.status and self.goes_on:
                last = "".join(f": {line}" for line in ending.lines[-1:])
                print(f"device {rank} ({device.title}) ended with status {ending.status}{last}", file=sys.stderr)


def _actor(device: NodeDevice) -> Any:
    place = NodeAffinitySchedulingStrategy(device.node, soft=False)
    options = {"num_cpus": device.cpus, "num_gpus": int(device.gpu), "scheduling_strategy": place}
    return ray.remote(**options)(DeviceActor).remote()


def _points(device: NodeDevice, actor: Any, peer: str) -> list[tuple[str, int]]:
    """Wait for a device's actor. Return its meeting points for devices at the address `peer`."""
    try:
        return list(ray.get(actor.meeting_points.remote(peer), timeout=START_S))
    except RayError:
        raise InputError(
            f"{device.title}: no process started within {START_S:g} s; wait for the jobs that use the node, or end them "
            "(`ray status`)"
        ) from None


def run_on_cluster(argv: Sequence[str], goes_on: bool) -> int:
    """Run `python argv` on every device of a cluster (RAY_ADDRESS, or this node's). Ray copies this folder to its nodes."""
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # `ray job submit` has copied a folder already
    try:
        ray.init("auto", runtime_env=None if submitted else {"working_dir": os.getcwd()})
    except ConnectionError:
        raise InputError("no Ray cluster: run this on one of its nodes, or set RAY_ADDRESS to HOST:PORT") from None
    try:
        return ClusterJob(argv, goes_on).run()
    finally:
        ray.shutdown()  # ends the actors, and with them their processes
