"""What can go wrong, as one small family.

::

    ConvoyError            everything Convoy raises on purpose
    ├── InputError         something a person wrote cannot be used: a name, a number, a file, a plan
    │   ├── PlanError      a plan that does not fit: this model, these devices, these shares
    │   └── DataError      images that are missing, truncated or not what their checksum says
    ├── MismatchError      the devices of one job disagree: models, plans, versions
    └── DeviceLostError    a device died, froze or left; the message names it

Every message gives the value that was met, the rule it broke and the remedy.
"""

from collections.abc import Iterable


class ConvoyError(Exception):
    """Everything that Convoy raises on purpose. The command line prints it without a traceback."""


class InputError(ConvoyError, ValueError):
    """Something a person wrote cannot be used."""


class PlanError(InputError):
    """A plan that does not fit the model, the devices or itself."""


class DataError(InputError):
    """Images that are missing, truncated or not what their checksum says."""


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
    """The error for a name that is none of the known ones: it lists them."""
    return InputError(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(choices))}")
