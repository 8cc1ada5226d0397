"""The log of an invented run with known numbers: three devices, two epochs of twenty steps, one change of shares."""

import copy
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

STEP_S = 0.02
"""Of every step, but for the first of an epoch, which nobody times."""

RUN: Row = {
    "what": "run", "date": "2026-11-21T19:47:17+00:00", "convoy": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7",
    "machine": "x86_64", "system": "Linux-6.1", "from_step": 0, "images": 1280, "epoch_steps": 20,
    "options": {"data": "digits", "net": "two-conv:32:128", "plan": "auto", "epochs": 2, "batch": 64, "timeout_s": 60.0,
                "rebalance": True, "slowdown": [1.0, 2.0, 4.0], "fleet": None},
    "sources": {"data": "default", "net": "command line", "plan": "run.toml line 3", "epochs": "command line"},
}  # fmt: skip
FLEET: Row = {
    "what": "fleet",
    "devices": [
        {"name": "cpu (1 thread)", "host": "lab1", "slowdown": 1.0, "samples_per_s": 4000.0},
        {"name": "cpu (1 thread)", "host": "lab1", "slowdown": 2.0, "samples_per_s": 2000.0},
        {"name": "cpu (2 threads)", "host": "lab2", "slowdown": 4.0, "samples_per_s": 1000.0},
    ],
}


def layer(name: str, kind: str, strategy: str, parts: list[str], **more: Any) -> Row:
    return {"layer": name, "kind": kind, "strategy": strategy, "parts": parts} | {
        "note": "", "flop": 0, "bytes": 0, **more
    }  # fmt: skip


def layers(filters: list[str]) -> list[Row]:
    return [
        layer("conv1", "conv", "batch", ["32", "16", "16"], flop=1000, bytes=5120),
        layer("relu", "elementwise", "batch", ["32", "16", "16"]),
        layer("conv2", "conv", "filter", filters, flop=9000, bytes=262144, note="the first of its kind"),
        layer("fc", "linear", "one", ["all", "-", "-"], flop=10),
        layer("gate", "opaque", "copies", ["all", "all", "all"]),
    ]


PLAN: Row = {
    "what": "plan",
    "plan": {"name": "auto", "devices": 3, "batch": 64, "reduce": "ring", "wire": "exact"},
    "layers": layers(["64", "48", "16"]), "work": [0.5, 0.375, 0.125], "inexact": "",
}  # fmt: skip
PREDICTION: Row = {
    "what": "prediction", "step_s": 0.016, "samples_per_s": 4000.0, "limit_samples_per_s": 7000.0,
    "bound": "computing on lab1-cpu0", "names": ["lab1-cpu0", "lab1-cpu1", "lab2-cpu0"],
    "pass": {"s": 0.016, "compute_s": [0.012, 0.01, 0.004], "exchange_s": [0.004, 0.006, 0.008]},
    "events": [
        [0, "compute", "conv1 forward", 0.0, 0.004, -1, 0],
        [0, "compute", "Move 3 copies", 0.004, 0.005, -1, 0],
        [0, "send", "Move 3", 0.005, 0.006, 1, 131072],
        [1, "receive", "Move 3", 0.005, 0.006, 0, 131072],
        [1, "compute", "conv2 forward", 0.006, 0.01, -1, 0],
        [2, "compute", "conv2 backward input", 0.01, 0.014, -1, 0],
        [0, "compute", "optimizer", 0.014, 0.016, -1, 0],
    ],
}  # fmt: skip
RESHARE: Row = {
    "what": "reshare", "step": 9, "layers": layers(["96", "24", "8"]), "work": [0.75, 0.1875, 0.0625],
    "reason": "conv2 64/48/16 -> 96/24/8 filters: device 1 took 1.6x the balanced time", "plan": {},
}  # fmt: skip
END: Row = {"what": "end", "step_s": STEP_S}


def loss(step: int) -> float:
    return 2.0 - 0.04 * step


def epoch(number: int) -> list[Row]:
    """Return the lines of an epoch of twenty steps, followed by a test of 1 s."""
    rows: list[Row] = []
    for step in range(20 * number, 20 * number + 20):
        s = 1.0 * number + STEP_S * (step + 1)
        rows.append(
            {"what": "step", "step": step, "epoch": number, "loss": loss(step), "samples": 64, "s": s, "lr": 0.01}
        )
        if step == RESHARE["step"]:
            rows.append(RESHARE)
    accuracy = (0.625, 0.875)[number]
    rows.append({"what": "evaluation", "step": 20 * number + 20, "epoch": number, "accuracy": accuracy, "best": True})
    rows.append({"what": "epoch", "epoch": number, "loss": 1.5 - number, "accuracy": accuracy, "train_s": 0.4,
                 "samples_per_s": 3200.0, "lr": 0.01})  # fmt: skip
    rows.append({"what": "busy", "epoch": number, "steps": 19, "wall_s": [0.4, 0.4, 0.4],
                 "compute_s": [0.3, 0.2, 0.1], "exchange_s": [0.06, 0.12, 0.24]})  # fmt: skip
    return rows


def whole_run() -> list[Row]:
    rows = [RUN, FLEET, PLAN, PREDICTION, *epoch(0), *epoch(1)]
    rows += [
        {
            "what": "device",
            "device": 0,
            "slowdown": 1.0,
            "speed_share": 0.5,
            "work_share": 0.75,
            "compute_s": 0.6,
            "exchange_s": 0.12,
            "sent_bytes": 12,
        },
        END,
    ]
    return copy.deepcopy(rows)


def write(path: Path, rows: list[Row], cut_off: str = "") -> Path:
    """Write a log of these lines; `cut_off` is a killed run's partial last line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + cut_off)
    return path
