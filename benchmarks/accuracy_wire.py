"""What rounding on the wire costs in accuracy: plans exact and with inexact-bf16, from the same seeds.

    python -m benchmarks.accuracy_wire [--data digits] [--epochs 8] [--seeds 0,1,2]

Writes results/accuracy-wire.json and prints a table. Every row is a `convoy train` of its own over four processes; the speeds
are given, so that all runs of a plan have the same unequal shares. Two formats differ if they do so by more than two seeds.
"""

import itertools
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import trained
from convoy.layout.comm_dtype import COMM_DTYPES

RESULTS = Path(__file__).parent / "results" / "accuracy-wire.json"


def main(
    data: str = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set's own files.")] = None,
    net: str = "two-conv:32:64",
    batch: int = 64,
    lr: float = 0.02,
    epochs: int = 8,
    plans: str = "data-by-speed,hybrid",
    seeds: str = "0,1,2",
    results: Path = RESULTS,
) -> None:
    """Run all rows that the results file does not hold yet."""
    common = ["train", "--data", data, "--net", net, "--batch", str(batch), "--lr", str(lr), "--epochs", str(epochs)]
    common += ["--devices", "4", "--speeds", "4,3,2,1"]
    document = json.loads(results.read_text()) if results.exists() else {"rows": {}}
    for seed, plan, wire in itertools.product(seeds.split(","), plans.split(","), COMM_DTYPES):
        name = f"{plan}, {wire}, seed {seed}"
        if name not in document["rows"]:
            command = [*common, "--plan", plan, "--seed", seed, "--wire", wire]
            folder = ["--data-dir", str(data_dir)] if data_dir is not None else []
            row = {"plan": plan, "wire": wire, "command": " ".join(["convoy", *command])}
            document["rows"][name] = row | trained([*command, *folder])
            results.write_text(json.dumps(document, indent=1) + "\n")
    _show(document)


def _show(document: dict[str, Any]) -> None:
    table = Table(title="Test accuracy of each seed", title_justify="left")
    for name in ("plan", "wire", "accuracy", "mean", "mean training loss", "sent, with tests"):
        table.add_column(name)
    rows = list(document["rows"].values())
    for plan, wire in dict.fromkeys((row["plan"], row["wire"]) for row in rows):
        found = [row for row in rows if (row["plan"], row["wire"]) == (plan, wire)]
        accuracies = [row["accuracy"] for row in found]
        loss = statistics.fmean(row["loss"] for row in found)
        sent = statistics.fmean(row["sent_bytes"] for row in found)
        each = ", ".join(f"{accuracy:.2%}" for accuracy in accuracies)
        table.add_row(plan, wire, each, f"{statistics.fmean(accuracies):.2%}", f"{loss:.4f}", f"{sent / 1e6:,.1f} MB")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
