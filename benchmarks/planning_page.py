"""How long planning takes, on docs/benchmarks.md, from the file that `benchmarks.planning` wrote."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.hardware import Ground
from benchmarks.page import seconds, table
from benchmarks.results import read_if_kept


@dataclass(frozen=True)
class PlanningRow:
    """Seconds of one task, all on one core."""

    target_s: float
    median_wall_s: float
    median_processor_s: float


@dataclass(frozen=True)
class Planning:
    """What of the file the page shows."""

    command: str
    date: str
    ground: Ground
    load_average: float
    rows: Mapping[str, PlanningRow]


_FILE = TypeAdapter(Planning)


def read_planning(path: Path) -> Planning | None:
    """What is in the file; None where there is none.

    Raises:
        InputError: it is not what this version of `benchmarks.planning` writes.
    """
    return read_if_kept(path, _FILE, "benchmarks.planning")


def planning_section(planning: Planning | None) -> list[str]:
    """Parts of the page; empty where it was not run."""
    if planning is None:
        return []
    body = [
        [what, seconds(row.target_s), seconds(row.median_wall_s), seconds(row.median_processor_s), _verdict(row)]
        for what, row in planning.rows.items()
    ]
    here = planning.ground
    return [
        "## How long planning takes",
        f"A core of {here.processor}, convoy {here.convoy} at {here.revision or 'an unknown revision'}, {planning.date[:10]}; "
        f"the machine's load average at the end was {planning.load_average:.1f}.",
        f"```\n{planning.command}\n```",
        table(["what", "asked", "median, wall clock", "median, processor", "by the wall clock"], body),
    ]


def _verdict(row: PlanningRow) -> str:
    over_s = row.median_wall_s - row.target_s
    return "met" if over_s <= 0 else f"missed by {seconds(over_s)}"
