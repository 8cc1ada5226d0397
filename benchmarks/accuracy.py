"""Test accuracy after an epoch of CIFAR-10: one device, and four devices under each plan, with the same seed.

    python -m benchmarks.accuracy FOLDER [--limit N] [--net two-conv:50:500]

Writes results/accuracy.json and prints the table that the README shows. Every row is a `convoy train` of its own.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from convoy.plan.presets import PLANS

RESULTS = Path(__file__).parent / "results" / "accuracy.json"


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with the binary CIFAR-10 files.")],
    net: str = "two-conv:50:500",
    batch: int = 64,
    lr: float = 0.01,
    limit: Annotated[int | None, typer.Option(help="Use only the first N training images.")] = None,
    results: Path = RESULTS,
) -> None:
    """Run all rows that the results file does not hold yet."""
    common = ["--data", "cifar10", "--data-dir", str(folder), "--net", net, "--batch", str(batch), "--lr", str(lr)]
    common += ["--limit", str(limit)] if limit is not None else []
    shown = ["--data", "cifar10", "--data-dir", "D", *common[4:]]
    document = json.loads(results.read_text()) if results.exists() else {"rows": {}}
    for plan, devices in [("data", 1), *((plan, 4) for plan in PLANS)]:
        name = "one device" if devices == 1 else plan
        if name not in document["rows"]:
            command = ["train", *common, "--plan", plan, "--devices", str(devices)]
            document["rows"][name] = trained(command) | {
                "command": " ".join(["convoy train", *shown, "--plan", plan, "--devices", str(devices)])
            }
            results.write_text(json.dumps(document, indent=1) + "\n")
    _show(document)


def trained(command: list[str]) -> dict[str, Any]:
    """Read the log of a training `convoy` command: its last epoch, every 50th loss, bytes sent by all devices.

    Also the seconds of all epochs, and where a step was predicted, that beside the measured one."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        subprocess.run([sys.executable, "-m", "convoy", *command, "--log", str(log)], check=True)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    run = lines[0]
    epoch = [line for line in lines if line["what"] == "epoch"][-1]
    losses = [line["loss"] for line in lines if line["what"] == "step"]
    sent_bytes = sum(line["sent_bytes"] for line in lines if line["what"] == "device")
    chosen = [line for line in lines if line["what"] in ("prediction", "end") and not line.get("shares_only")]
    step_s = {line["what"]: line["step_s"] for line in chosen}
    return {
        "accuracy": epoch["accuracy"], "loss": epoch["loss"], "steps": len(losses), "losses": losses[::50],
        "sent_bytes": sent_bytes, "train_s": epoch["train_s"], "date": run["date"], "torch": run["torch"],
        "convoy": run["convoy"], "cores": os.cpu_count(), "processor": _processor(),
        "whole_s": sum(line["train_s"] for line in lines if line["what"] == "epoch"),
        "predicted_step_s": step_s.get("prediction"), "measured_step_s": step_s.get("end"),
        "reshares": sum(line["what"] == "reshare" for line in lines),
    }  # fmt: skip


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), platform.machine())


def _show(document: dict[str, Any]) -> None:
    table = Table(title="Test accuracy after one epoch", title_justify="left")
    for name in ("plan", "accuracy", "from one device", "loss", "largest difference of the loss curve"):
        table.add_column(name)
    alone = document["rows"]["one device"]
    for name, row in document["rows"].items():
        apart = max(abs(a - b) for a, b in zip(row["losses"], alone["losses"], strict=True))
        points = 100 * (row["accuracy"] - alone["accuracy"])
        table.add_row(name, f"{row['accuracy']:.2%}", f"{points:+.2f} points", f"{row['loss']:.4f}", f"{apart:.1e}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
