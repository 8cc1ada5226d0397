"""The long chaos run: all forms, two at a time, each with its own seeds; writes a table of the results.

Linux, root: disks are mounted, and hosts are network namespaces.

    python -m lab.chaos_long --minutes 28 --seed 1 --out chaos.md

The table's place is docs/chaos.md, under "Random events". A form that goes wrong is in it with its seeds; what each has printed
is beside it (chaos.md.1.txt, ...).
"""

import argparse
import ast
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LANES = 2
"""At once; one for each core of the machine that it was made for."""

FORMS = (
    ("on threads, with joins, full disks, slow devices", ("--inside", "threads", "--joins", "--full", "--slow"), 0.4),
    ("on threads", ("--inside", "threads"), 0.15),
    ("processes", ("--kinds", "kill,term,stop,full,slow"), 0.15),
    ("processes, one job", ("--churn",), 0.15),
    ("hosts, cables cut", ("--inside", "hosts"), 0.15),
)
"""What is run, with which options, and for which part of the time."""

SEEDS = 10_000
"""Between two runs."""


@dataclass(frozen=True)
class Run:
    """One form on one lane; `line` is the last line it printed."""

    form: str
    seed: int
    status: int
    line: str

    @property
    def trainings(self) -> int:
        found = re.match(r"(\d+) trainings", self.line)
        return int(found[1]) if found else 1

    @property
    def events(self) -> Counter[str]:
        found = re.search(r"events \((\{.*?\})\)", self.line)
        return Counter(ast.literal_eval(found[1]) if found else {})

    @property
    def apart(self) -> float:
        found = re.search(r"at most ([-+.\de]+) apart", self.line)
        return float(found[1]) if found else float("nan")

    @property
    def wrong(self) -> str:
        found = re.search(r"wrong: (.*)$", self.line)
        return "" if self.status == 0 else found[1] if found else f"ended with {self.status}"


def run(form: int, lane: int, seed: int, minutes: float, out: Path) -> Run:
    name, options, part = FORMS[form]
    first = (seed * len(FORMS) * LANES + form * LANES + lane) * SEEDS
    command = [
        sys.executable,
        "-m",
        "lab.chaos",
        *options,
        "--seed",
        str(first),
        "--minutes",
        f"{part * minutes:g}",
    ]
    output = out.with_name(f"{out.name}.{form * LANES + lane}.txt")
    with output.open("wb") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=60 * (part * minutes + 3)).returncode
        except subprocess.TimeoutExpired:
            status = 124  # as of the command timeout
    lines = [
        line for line in output.read_text(errors="replace").splitlines() if " apart" in line and " events (" in line
    ]
    return Run(name, first, status, lines[-1] if lines else "")


def table(runs: list[Run], minutes: float) -> str:
    """Return the table in the page's form."""
    kinds = sorted({kind for each in runs for kind in each.events})
    rows = [
        f"| | seeds from | trainings | {' | '.join(kinds)} | events | apart | wrong |",
        "|---" * (6 + len(kinds)) + "|",
    ]
    for each in sorted(runs, key=lambda each: each.seed):
        counts = " | ".join(str(each.events[kind]) for kind in kinds)
        rest = f"{each.events.total()} | {each.apart:.1e} | {each.wrong}"
        rows.append(f"| {each.form} | {each.seed} | {each.trainings} | {counts} | {rest} |")
    total = sum((each.events for each in runs), Counter[str]())
    counts = " | ".join(str(total[kind]) for kind in kinds)
    trainings, worst = sum(each.trainings for each in runs), max(each.apart for each in runs)
    wrong = sum(bool(each.wrong) for each in runs)
    rows.append(f"| all, {minutes:.0f} minutes | | {trainings} | {counts} | {total.total()} | {worst:.1e} | {wrong} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=28.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("chaos.md"))
    given = parser.parse_args()
    runs: list[Run] = []
    begin_s = time.monotonic()

    def lane(number: int) -> None:
        for form in range(len(FORMS)):
            runs.append(run(form, number, given.seed, given.minutes, given.out))
            print(runs[-1].form, runs[-1].seed, runs[-1].line[-400:] or runs[-1].wrong, flush=True)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given.out.write_text(table(runs, (time.monotonic() - begin_s) / 60))
    print(given.out.read_text())
    if any(each.wrong for each in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
