"""Runs training functions on a Ray cluster, each as one job.

::

    trainer = TorchTrainer(train_func, torch_config=ConvoyConfig(), scaling_config=ScalingConfig(num_workers=3))
    trainer.fit()  # train_func calls convoy.prepare

Each group of workers that Ray Train starts is a new job: when a worker is lost, Ray ends the group and starts another.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from convoy.comm.environment import LISTENER, listen_at
from convoy.comm.job_key import KEY_PIPE, hand_over, make_key
from convoy.errors import InputError
from convoy.machine.launch_env import hidden

try:
    import ray
except ModuleNotFoundError:
    raise InputError("convoy.ray needs Ray: pip install 'convoy-train[ray]'") from None
from ray import train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, get_device


class ConvoyConfig(TorchConfig):  # type: ignore[misc]
    """The configuration of a Convoy job for Ray Train: TorchTrainer's torch_config, or another trainer's backend_config.

    Args:
        whole_nodes: compute with all CPUs of a node, divided by the number of its workers, instead of those that Ray reserved.
            Ray Train reserves the same resources for every worker, so this makes unequal nodes unequal devices.
    """

    def __init__(self, whole_nodes: bool = False) -> None:
        super().__init__(backend="convoy")  # no process group of torch has this name, and none is made
        self.whole_nodes = whole_nodes

    @property
    def backend_cls(self) -> type[Backend]:
        return ConvoyBackend

    @property
    def train_func_context(self) -> Any:
        return _with_all_threads if self.whole_nodes else super().train_func_context

    def to_dict(self) -> dict[str, object]:
        return {"whole_nodes": self.whole_nodes}


class ConvoyBackend(Backend):  # type: ignore[misc]
    """The part of a job in Ray Train's controller, which gives each worker its rank and the job's address and key."""

    share_cuda_visible_devices = True  # so that NCCL can connect the GPUs of a node

    def on_start(self, worker_group: Any, backend_config: ConvoyConfig) -> None:
        # The key is an argument of the workers' methods: Ray sends it with its TLS settings, and neither logs nor stores it.
        address = worker_group.execute_single(0, _open_listener)
        nodes = worker_group.execute(_own_node) if backend_config.whole_nodes else None
        worker_group.execute(_enter_job, address, make_key().pem, nodes)


def _open_listener() -> tuple[str, int]:
    """Open the listener that device 0's `convoy.join` takes over. Return its address."""
    listener = listen_at(ray.util.get_node_ip_address(), 0)
    host, port = listener.getsockname()[:2]
    os.environ[LISTENER] = str(listener.detach())
    return host, port


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _enter_job(address: tuple[str, int], key: bytes, nodes: list[str] | None) -> None:
    """Set this worker's rank, device and key for the training function's `convoy.join`.

    Args:
        nodes: the nodes of all workers, to compute with all CPUs of a node; None: with the reserved ones.
    """
    context = train.get_context()
    numbers = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
    }
    os.environ.update(hidden({name: str(number) for name, number in numbers.items()}))
    os.environ["CONVOY_DEVICE"] = str(get_device())
    os.environ[KEY_PIPE] = str(hand_over(key))
    if nodes is not None:  # not by Ray's local world size: it counts nodes with one address as one
        own = _own_node()
        cpus = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == own)
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(cpus) // nodes.count(own)))


@contextmanager
def _with_all_threads() -> Iterator[None]:
    """Run the training function with OMP_NUM_THREADS threads, a setting of each Python thread once torch is loaded."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with TorchConfig().train_func_context():
        yield
