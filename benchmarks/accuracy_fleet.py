"""Test accuracy of a small ResNet on CIFAR-10: unequal hosts compared with one device, over several seeds.

    python -m benchmarks.accuracy_fleet FOLDER [--fleet mixed4] [--minutes 20] [--epochs N]     # Linux, root
    python -m benchmarks.accuracy_fleet FOLDER --page-only

Every row is a `convoy train` of its own: `--plan auto` on the emulated fleet, and plain training on this machine
as one device. A short run of each shows how many epochs fit into the minutes. Writes results/accuracy-fleet.json, from which an
interrupted run goes on, and docs/accuracy.md.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.accuracy import trained
from benchmarks.configurations import fleet_named
from benchmarks.hardware import ground
from benchmarks.page import seconds, table
from convoy.errors import ConvoyError, InputError
from convoy.files import write_whole

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy-fleet.json"
PAGE = ROOT / "docs" / "accuracy.md"

FLEET, ALONE = "fleet", "one device"
PILOT_IMAGES = 1024
"""Training images of the short runs that measure the time of an epoch; all test images."""

Document = dict[str, Any]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with the binary CIFAR-10 files.")],
    fleet: Annotated[str, typer.Option(help="A fleet in benchmarks/fleets.")] = "mixed4",
    net: str = "resnet:8:16",
    batch: int = 128,
    lr: float = 0.1,
    limit: Annotated[int | None, typer.Option(help="Use only the first N training images.")] = None,
    seeds: str = "0,1,2",
    minutes: Annotated[float, typer.Option(help="Minutes for all trainings; determines the epochs.")] = 20.0,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs per training; default: as many as fit the minutes.")
    ] = None,
    results: Path = RESULTS,
    page: Path = PAGE,
    page_only: Annotated[bool, typer.Option(help="Only write the page.")] = False,
) -> None:
    """Run all rows that the results file does not hold yet, then write the page."""
    try:
        if not page_only:
            bench = _Bench(folder, fleet, net, batch, lr, limit, results)
            numbers = [int(seed) for seed in seeds.split(",")]
            bench.run(numbers, minutes, epochs)
        document = _read(results)
        write_whole(page, accuracy_page(document))
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"Written: {page}")


def _read(path: Path) -> Document:
    try:
        document: Document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): run the benchmark first") from error
    return document


class _Bench:
    """The trainings of one fleet and one net, and their result file."""

    def __init__(
        self, folder: Path, fleet: str, net: str, batch: int, lr: float, limit: int | None, results: Path
    ) -> None:
        self.fleet, self.results = fleet, results
        self.options = [
            "--net",
            net,
            "--batch",
            str(batch),
            "--lr",
            str(lr),
            "--schedule",
            "cosine",
            "--augment",
            "crop,flip",
        ]
        self.options += ["--weight-decay", "5e-4", "--data", "cifar10"]
        self.folder, self.limit = folder, limit
        setting = {"fleet": fleet, "net": net, "batch": batch, "lr": lr, "limit": limit}
        self.document: Document = {"setting": setting, "ground": asdict(ground()), "rows": {}}
        if results.exists():
            old = _read(results)
            if old["setting"] != setting or old["ground"] != self.document["ground"]:
                raise InputError(
                    f"{results} holds rows of other settings or code: name another --results, or remove it"
                )
            self.document = old

    def run(self, seeds: Sequence[int], minutes: float, epochs: int | None) -> None:
        """Train with every seed on the fleet and on one device.

        Raises:
            InputError: not even one epoch fits into the minutes.
        """
        if epochs is None:
            epochs = self.document.get("epochs") or self._fitting(len(seeds), 60 * minutes)
        self.document["epochs"] = epochs
        for seed in seeds:
            for where in (FLEET, ALONE):
                name = f"{where}, seed {seed}"
                if name not in self.document["rows"]:
                    print(f"{name}: {epochs} epochs", flush=True)
                    self.document["rows"][name] = {"where": where, "seed": seed} | self._train(
                        where, seed, epochs, self.limit
                    )
                    write_whole(self.results, json.dumps(self.document, indent=1) + "\n")

    def _fitting(self, seeds: int, left_s: float) -> int:
        """Estimate how many epochs fit from a short run of each kind."""
        images = self.limit or 50_000
        fixed_s = epoch_s = 0.0
        for where in (FLEET, ALONE):
            row = self._train(where, seed=0, epochs=1, limit=PILOT_IMAGES)
            epoch_s += row["train_s"] * images / PILOT_IMAGES
            fixed_s += row["wall_s"] - row["train_s"]
        found = math.floor((left_s / seeds - fixed_s) / epoch_s)
        if found < 1:
            raise InputError(
                f"an epoch of {images} images takes about {epoch_s:.0f} s on the fleet and one device, beside {fixed_s:.0f} s: "
                f"not one of each for {seeds} seeds fits into {left_s / 60:g} minutes; give more, or a lower --limit"
            )
        return found

    def _train(self, where: str, seed: int, epochs: int, limit: int | None) -> dict[str, Any]:
        words = ["train", *self.options, "--epochs", str(epochs), "--evaluate-epochs", str(epochs), "--seed", str(seed)]
        words += ["--limit", str(limit)] if limit is not None else []
        words += (
            ["--plan", "auto", "--budget", "10"]
            if where == FLEET
            else ["--plan", "data", "--devices", "1", "--speeds", "1"]
        )
        shown = f"convoy {' '.join(words)} --data-dir D"
        with tempfile.TemporaryDirectory() as folder:
            before: list[str] = []
            if where == FLEET:
                path = Path(folder) / "fleet.toml"
                write_whole(path, fleet_named(self.fleet).to_toml())
                before = ["emulate", str(path), "--", sys.executable, "-m", "convoy"]
                shown = f"convoy emulate {self.fleet}.toml -- {shown}"
            start_s = time.monotonic()
            found = trained([*before, *words, "--data-dir", str(self.folder.resolve())])
        return found | {"wall_s": time.monotonic() - start_s, "command": shown}


def accuracy_page(document: Document) -> str:
    rows, setting, here = list(document["rows"].values()), document["setting"], document["ground"]
    kinds = {where: [row for row in rows if row["where"] == where] for where in (FLEET, ALONE)}
    if not all(kinds.values()):
        raise InputError("the file of results lacks the fleet or the one device: run the benchmark to its end")
    images = setting["limit"] or 50_000
    parts = [
        "# Accuracy on a fleet of unequal hosts",
        "Made by `python -m benchmarks.accuracy_fleet`; do not edit.",
        f"`{setting['net']}` on CIFAR-10, {images:,} training images, {document['epochs']} "
        f"epoch{'s' * (document['epochs'] > 1)}, batch {setting['batch']}, "
        f"crops and flips, cosine schedule from {setting['lr']:g}. Fleet: {setting['fleet']}, emulated on {here['cores']} "
        f"cores of {here['processor']}, `--plan auto`; one device: this whole machine. torch {here['torch']}, "
        f"convoy {here['convoy']} at {here['revision'] or 'an unknown revision'}, {rows[-1]['date'][:10]}.",
        *(f"```\n{found[0]['command']}\n```" for found in kinds.values()),
        "Test accuracy after the last epoch; ± is the standard deviation over the seeds.",
        table(
            ["", "seeds", "accuracy of each", "mean", "training loss", "training", "in all"],
            [_line(where, found) for where, found in kinds.items()],
        ),
        verdict([row["accuracy"] for row in kinds[FLEET]], [row["accuracy"] for row in kinds[ALONE]]),
        *_pace(kinds[FLEET], setting["batch"]),
    ]
    return "\n\n".join(parts) + "\n"


def _line(where: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    accuracies = [row["accuracy"] for row in rows]
    each = ", ".join(f"{accuracy:.2%}" for accuracy in accuracies)
    mean = f"{statistics.fmean(accuracies):.2%} ± {100 * _deviation(accuracies):.2f} points"
    loss = f"{statistics.fmean(row['loss'] for row in rows):.4f}"
    train_s, wall_s = (statistics.median(row[name] for row in rows) for name in ("whole_s", "wall_s"))
    return [where, str(len(rows)), each, mean, loss, seconds(train_s), seconds(wall_s)]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def verdict(fleet: Sequence[float], alone: Sequence[float]) -> str:
    """Say whether the means differ by more than two standard errors of their difference."""
    apart = statistics.fmean(fleet) - statistics.fmean(alone)
    noise = math.hypot(_deviation(fleet) / math.sqrt(len(fleet)), _deviation(alone) / math.sqrt(len(alone)))
    words = "within" if abs(apart) <= 2 * noise else "more than"
    return (
        f"The fleet's mean is {100 * apart:+.2f} points from that of one device, {words} twice the standard error of that "
        f"difference over the seeds ({100 * noise:.2f} points)."
    )


def _pace(rows: Sequence[Mapping[str, Any]], batch: int) -> list[str]:
    known = [row for row in rows if row.get("predicted_step_s") and row.get("measured_step_s")]
    body = [
        [str(row["seed"]), f"{batch / row['predicted_step_s']:.3g}", f"{batch / row['measured_step_s']:.3g}",
         f"{row['predicted_step_s'] / row['measured_step_s'] - 1:+.1%}", str(row["reshares"])]
        for row in known
    ]  # fmt: skip
    head = ["seed", "samples/s predicted", "samples/s measured", "error of the step", "changes of shares"]
    return [table(head, body)] if body else []


if __name__ == "__main__":
    typer.run(main)
