"""Try random nets and print failing ones, minimised: `python -m lab.random_nets.sweep 0 500`.

Nets that fail in the same way are counted, and one of them is shown. `--show refused` shows what is refused, too.
"""

import argparse
import re
import time
from collections import Counter

import torch

from lab.random_nets.recipe import Part, Recipe, draw
from lab.random_nets.trial import Outcome, attempt, report, shrunk

BAD = ("wrong", "crash")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--show", default=",".join(BAD), help="kinds of outcomes to show, with commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, counts, seen, shown = time.perf_counter(), Counter[str](), Counter[str](), {}
    for seed in range(options.first, options.first + options.count):
        recipe = draw(seed)
        outcome = attempt(recipe, seed)
        counts[outcome.kind] += 1
        if outcome.kind not in options.show.split(","):
            continue
        small = shrunk(recipe, seed, outcome.kind)
        found = attempt(small, seed)
        way = _way(small, found)
        seen[way] += 1
        shown.setdefault(way, report(seed, found, small))
    for way, times in seen.most_common():
        print(f"{'=' * 100}\n{times} times: {way}\n{shown[way]}")
    print(f"{dict(counts)} in {time.perf_counter() - started:.0f} s")


def _way(recipe: Recipe, outcome: Outcome) -> str:
    """Return a key that equal failures share: the message without numbers, or the parts of the smallest net."""
    message = re.sub(r"[\d.]+(e-\d+)?", "N", outcome.what.split(";")[0].partition("\n")[0])[:150]
    if outcome.kind in ("crash", "refused") or "returns" in message or "random state" in message:
        return f"{outcome.kind} {message}"
    return f"{outcome.kind} {' + '.join(sorted(_names(recipe.parts)))} ({recipe.inputs}, {recipe.outputs})"


def _names(parts: tuple[Part, ...]) -> list[str]:
    return [name for part in parts for name in (part.name, *_names(part.parts))]


if __name__ == "__main__":
    main()
