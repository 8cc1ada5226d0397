"""Runs the example for Ray Train on a local cluster of three unequal nodes, and prints what was reported as JSON.

python tests/ray/cluster_job.py data-by-speed FOLDER   # or another plan: two epochs
python tests/ray/cluster_job.py nodes FOLDER           # a node is killed in training, and another one added
python tests/ray/cluster_job.py script FOLDER          # the same for a script under `convoy run --on ray`
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import train_digits
from ray import train
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer

from convoy.ray import ConvoyConfig

LIMIT_S = 300.0
EACH = {"device": 1}  # the resource by which each node gets one worker


class Rows(train.UserCallback):
    """Writes down what device 0 reports."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, metrics: list[dict[str, Any]], **_: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics[0]) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def observed(config: dict[str, Any]) -> None:
    """Write down this worker's threads and whether its environment has a key, then run the example's function."""
    context = train.get_context()
    seen = {"threads": torch.get_num_threads(), "key in environment": "PRIVATE KEY" in str(os.environ)}
    path = Path(config["folder"], f"{context.get_world_size()}-{context.get_world_rank()}.json")
    path.write_text(json.dumps(seen))
    train_digits.train_func(config)


def wait(done: Callable[[], bool]) -> float:
    """Wait until a condition holds. Return the seconds."""
    began_s = time.monotonic()
    while not done():
        if time.monotonic() > began_s + LIMIT_S:
            raise TimeoutError("not in time")
        time.sleep(0.05)
    return time.monotonic() - began_s


def trainer(plan: str, speeds: list[float] | None, rows: Rows) -> TorchTrainer:
    folder, elastic = str(rows.path.parent), speeds is None
    config = {"folder": folder, "plan": plan, "speeds": speeds, "dtype": "float64", "epochs": 9999 if elastic else 2}
    return TorchTrainer(
        observed,
        train_loop_config=config,
        torch_config=ConvoyConfig(whole_nodes=True),
        scaling_config=train.ScalingConfig(
            num_workers=(2, 3) if elastic else 3,
            resources_per_worker={"CPU": 1, **EACH},
            elastic_resize_monitor_interval_s=3.0,
        ),
        run_config=train.RunConfig(
            storage_path=folder, failure_config=train.FailureConfig(max_failures=2), callbacks=[rows]
        ),
    )


def run_script(cluster: Cluster, folder: Path) -> None:
    """Run the script in this folder until a node was lost and another one has joined, then press Ctrl-C."""
    output = folder / "output"
    command = [sys.executable, "-m", "convoy", "run", "--on", "ray", "--goes-on", "members_script.py", "100000", "0.05"]
    with output.open("wb") as file:
        job = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"RAY_ADDRESS": cluster.address}, stdout=file, stderr=file
        )

    def printed(text: str) -> Callable[[], bool]:
        return lambda: text in output.read_text() or job.poll() is not None

    try:
        wait(printed('"step": 20,'))
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        wait(printed("2 continue after step"))
        cluster.add_node(num_cpus=2)
        wait(printed("joined; 3 "))
        joined = output.read_text().count("loss")
        wait(lambda: output.read_text().count("loss") > joined + 20 or job.poll() is not None)
        job.send_signal(signal.SIGINT)
        print(json.dumps({"status": job.wait(60)}))
    finally:
        job.kill()


def main(scenario: str, folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": EACH})
    nodes = [cluster.add_node(num_cpus=count, resources=EACH) for count in (2, 4)]
    if scenario == "script":
        try:
            return run_script(cluster, folder)
        finally:
            cluster.shutdown()
    ray.init(address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {}
    rows = Rows(folder / "rows")
    changes = scenario == "nodes"
    job = trainer("hybrid" if changes else scenario, None if changes else [1.0, 2.0, 4.0], rows)
    fit = threading.Thread(target=job.fit, daemon=True)
    try:
        fit.start()
        if changes:
            wait(lambda: len(rows.read()) >= 2)
            cluster.remove_node(nodes[1], allow_graceful=False)
            found["lost_s"] = wait(lambda: rows.read()[-1]["devices"] == 2)
            cluster.add_node(num_cpus=4, resources=EACH)
            found["joined_s"] = wait(lambda: rows.read()[-1]["devices"] == 3)
        else:
            wait(lambda: not fit.is_alive())
        logs = [path.read_bytes() for path in Path(ray._private.worker._global_node.get_logs_dir_path()).rglob("*.*")]
        key_in_logs = any(b"PRIVATE KEY" in text for text in logs)
        print(json.dumps(found | {"rows": rows.read(), "logs": len(logs), "key in logs": key_in_logs}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
