"""What can go wrong, as one small family.

::

    ConvoyError            everything Convoy raises on purpose
    ├── InputError         something a person wrote cannot be used: a name, a number, a file, a plan
    │   ├── PlanError      a plan that does not fit: this model, these devices, these shares
    │   └── DataError      images that are missing, truncated or not what their checksum says
    ├── DivergedError      the loss is no number any more, and the training was to stop there
    ├── MismatchError      the devices of one job disagree: models, plans, versions
    └── DeviceLostError    a device died, froze or left; the message names it

Every message gives the value that was met, the rule it broke and the remedy. None is longer than a screen: `shown` shortens a
value, and `bounded` a whole message.
"""

import difflib
from collections.abc import Iterable
from typing import Self

MOST_SHOWN = 200
"""Characters of a value in a message."""

MOST_LINE, MOST_LINES = 1500, 60
"""Characters of a line of a message, and its lines."""


def shown(value: object) -> str:
    """A value as messages show it: of a text, number or container its repr, of a path its name; at most `MOST_SHOWN` long."""
    try:
        text = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | dict | None) else str(value)
    except (RecursionError, ValueError):  # nested too deep, or a number of more than 4,300 digits
        return f"a {type(value).__name__} too large to be shown"
    return shortened(text)


def bounded(message: str) -> str:
    """A message whose lines, and whose number of lines, are limited: it loses its middle, since it begins with the value and
    ends with the remedy. What no UTF-8 can say, as of a file's name, is escaped."""
    message = message.encode("utf-8", "backslashreplace").decode()
    lines = [shortened(line, MOST_LINE) for line in message.split("\n")]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines ...", *lines[-half:]]
    return "\n".join(lines)


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """A text without its middle, where it is longer."""
    if len(text) <= most:
        return text
    left = (most - 40) * 2 // 3
    right = most - 40 - left
    return f"{text[:left]} ... {len(text) - left - right:,} characters ... {text[-right:]}"


class ConvoyError(Exception):
    """Everything that Convoy raises on purpose. The command line prints it without a traceback."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))

    def again(self) -> Self:
        """The same, to be raised. What is kept for later must not be raised itself: with its traceback it would keep everything
        that was in use there, and a tensor of autograd's among that can keep it for ever, since Python's collector does not
        see through graphs of autograd."""
        made = type(self).__new__(type(self), *self.args)
        vars(made).update(vars(self))
        return made


class InputError(ConvoyError, ValueError):
    """Something a person wrote cannot be used."""


class PlanError(InputError):
    """A plan that does not fit the model, the devices or itself."""


class DataError(InputError):
    """Images that are missing, truncated or not what their checksum says."""


class DivergedError(ConvoyError):
    """The loss of a step is NaN or infinite."""


class MismatchError(ConvoyError):
    """The devices of one job disagree on something that must be the same everywhere."""


class DeviceLostError(ConvoyError):
    """A device of the job died, froze past the time limit or left.

    Attributes:
        device: index of the lost device, as in the fleet.
    """

    def __init__(self, device: int, message: str) -> None:
        super().__init__(message)
        self.device = device


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """The error for a name that is none of the known ones: it lists them, and says which one is nearly it."""
    choices = sorted(choices)
    known = {choice.partition(":")[0]: choice for choice in choices}
    near = difflib.get_close_matches(name.partition(":")[0][:80], known, n=1)
    meant = f"; did you mean {known[near[0]]}?" if near else ""
    return InputError(f"unknown {kind} {shown(name)}: choose one of {', '.join(choices)}{meant}")
