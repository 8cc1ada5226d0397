"""What is done between two steps of a training, remembered for devices that are behind at a loss or come later."""

import json
from collections import deque
from typing import Any

import torch
from torch import Tensor

from convoy.comm.agreement import gather
from convoy.comm.group import Group
from convoy.errors import MismatchError
from convoy.runtime.module import Distributed

EPOCH = "an epoch"
"""Among what was done between steps: a loader began to hand out batches."""


class Between:
    """Remembers what a loop of one's own has done between steps, for those that come later; gives it to these one by one.

    Attributes:
        loader: that hands out batches now; None: none of Convoy's has begun to.
        rows: its batches, with their seed.
        told: what the others have told of their loop, on a device that came later and is not yet at their place.
    """

    def __init__(self) -> None:
        self.loader: Any = None
        self.rows: Any = None
        self.told: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}  # of the loader
        self._done: list[Any] = []  # results of the calls of `repeated`, as far as JSON holds them, and EPOCH
        self._before: deque[Any] = deque()  # the same on a device that came later, as far as it has not got to it

    # --- on those that train -------------------------------------------------------------------------------------------

    def note(self, result: Any) -> None:
        """Remember what was done between steps, for those that come later."""
        if result != EPOCH and self.loader is not None and self.loader.playing:
            return  # who comes later does nothing within an iteration that is over
        try:
            self._done.append(json.loads(json.dumps(result)))
        except (TypeError, ValueError):
            self._done.append(None)

    def begin(self, loader: Any, model: Distributed) -> None:
        """From here on this loader hands out the batches."""
        self.loader, self._facts = loader, _facts_of(loader, model)

    def tell(self, random: Tensor) -> dict[str, Any]:
        """What a newcomer must know of this loop, as JSON.

        Args:
            random: torch's state of random numbers at the last step.
        """
        assert self.loader is not None
        return {
            "done": self._done, "rows": self.rows, "place": self.loader.place, "loader": self._facts,
            "random": random.tolist(),
        }  # fmt: skip

    # --- on a device that came later -----------------------------------------------------------------------------------

    def take(self, wanted: Any = None) -> Any:
        """What the others have had of the next thing between steps.

        Raises:
            MismatchError: they have done something else.
        """
        if self.told and not self._done:
            self._done = list(self.told["done"])
            self._before = deque(self._done)
        found = self._before.popleft() if self._before else None
        if (found == EPOCH) != (wanted == EPOCH):
            raise MismatchError(
                "this device's script does not do what the others have done: start the same script with the same arguments"
            )
        return found

    def is_over(self, loader: Any) -> bool:
        """Whether the epoch that this loader begins is one that the others have done with."""
        self.take(EPOCH)
        loader._skipped()
        loader.start = 0
        return EPOCH in self._before

    def take_place(self, loader: Any, model: Distributed) -> Tensor:
        """The epoch in which the others are: go on at their place. Torch's state of random numbers there.

        Raises:
            MismatchError: their loader is another one.
        """
        story = dict(self.told)
        self.told.clear()
        self._before.clear()
        if (mine := _facts_of(loader, model)) != story["loader"]:
            names = [name for name in mine if mine[name] != story["loader"].get(name)]
            raise MismatchError(
                f"this device's loader differs from that of the job: {names[0]} is {mine[names[0]]}, there "
                f"{story['loader'].get(names[0])}; start the same script with the same data everywhere"
            )
        self.loader, self.rows, loader.start = loader, story["rows"], story["place"]
        self._facts = mine
        return torch.tensor(story["random"], dtype=torch.uint8)


def align(group: Group, loader: Any, came_later: bool) -> None:
    """Let the loader of tests of a device that came later count its epochs as those of the others do. Every device calls it."""
    knows = not came_later or loader.follows
    rows = gather(group, "the epoch of a loader", loader.epoch if knows else None)
    if not knows and (known := [row for row in rows if row is not None]):
        loader.epoch, loader.follows = known[0], True


def _facts_of(loader: Any, model: Distributed) -> dict[str, Any]:
    """What must be the same of a loader; its seed, and what follows from it, are told to those that come."""
    return {name: value for name, value in loader._told(model).items() if name != "seed"}


class Works:
    """Counts what the devices have done with between steps; who was behind when one was lost takes the result of the others.

    Attributes:
        count: so many are done with.
        result: of the last.
        drawn: torch's state of random numbers behind it, on a device that was behind.
    """

    def __init__(self) -> None:
        self.count = 0
        self.result: Any = None
        self.drawn: Tensor | None = None

    def done(self, result: Any) -> None:
        """One more."""
        self.count, self.result = self.count + 1, result

    def catch_up(self, group: Group, random: Tensor) -> None:
        """Take over the result of what others had done with, and this device had not. Every device calls it.

        Args:
            random: torch's state of random numbers behind what this device has done with.
        """
        try:
            own = json.dumps([self.count, self.result, random.tolist()])
        except (TypeError, ValueError):
            own = json.dumps([self.count, None, random.tolist()])
        rows = [json.loads(text) for text in group.agree("works that are done with", own)]
        count, result, drawn = max(rows, key=lambda row: int(row[0]))
        if count > self.count:
            self.count, self.result = count, result
            self.drawn = torch.tensor(drawn, dtype=torch.uint8)
