"""Counts what the devices have done between two steps."""

import json
from typing import Any

import torch
from torch import Tensor

from convoy.comm.group import Group


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
