"""Rebalancing on docs/benchmarks.md, from the file that `benchmarks.rebalance` wrote."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.hardware import Ground
from benchmarks.page import seconds, table
from benchmarks.rebalance_score import ANSWER, BACK, Summary
from benchmarks.results import read_if_kept


@dataclass(frozen=True)
class Rebalanced:
    """What of the file the page shows."""

    command: str
    date: str
    torch: str
    convoy: str
    ground: Ground
    summary: Summary


_FILE = TypeAdapter(Rebalanced)


def read_rebalanced(path: Path) -> Rebalanced | None:
    """What is in the file; None where there is none.

    Raises:
        InputError: it is not what this version of `benchmarks.rebalance` writes.
    """
    return read_if_kept(path, _FILE, "benchmarks.rebalance")


def rebalance_lines(rebalanced: Rebalanced | None) -> list[list[str]]:
    """Rows of the table of targets: target, case, asked, measured, spread, verdict."""
    if rebalanced is None:
        return []
    found = rebalanced.summary
    after = "never" if found.back_after is None else f"after {found.back_after} steps"
    rows = [
        ("throughput back within 5 % of the best split", f"in {ANSWER} steps, {1 - BACK:g} after them",
         f"{after}; {found.of_best:.2f} after {ANSWER}; {found.left_alone:.2f} if left alone", found.is_back),
        (f"swing of shares over {found.later_steps} steps later", f"the noise, {found.noise:.1%}", f"{found.swing:.1%}",
         found.is_calm),
        ("loss curve unchanged", f"twice the rounding of another split, {2 * found.losses_apart_by_rounding:.1e}",
         f"{found.losses_apart:.1e}", found.is_same_curve),
    ]  # fmt: skip
    return [
        [what, "a device slowed in mid-training", asked, value, "", "met" if met else "missed"]
        for what, asked, value, met in rows
    ]


def rebalance_section(rebalanced: Rebalanced | None) -> list[str]:
    """Parts of the page; empty where it was not run."""
    if rebalanced is None:
        return []
    found = rebalanced.summary
    body = [[name, seconds(step_s), seconds(found.compute_s[name])] for name, step_s in found.step_s.items()]
    changes = [f"- step {step}: {reason}" for step, reason in found.reshares]
    return [
        "## A device becomes slower in mid-training",
        f"{rebalanced.ground.cores} cores of {rebalanced.ground.processor}, torch {rebalanced.torch}, convoy "
        f"{rebalanced.convoy} at {rebalanced.ground.revision}, {rebalanced.date[:10]}. The four take turns, step by step.",
        f"```\n{rebalanced.command}\n```",
        table(["run", "step, median of the last", "slowest device computes"], body),
        *(["\n".join(changes)] if changes else ["The shares never changed."]),
    ]
