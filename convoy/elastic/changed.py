"""How the devices of a training change: the errors by which it ends for one of them or all, or they meet anew; and the line of
text that tells it."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.elastic.agreement import Pairs
from convoy.elastic.regroup import UnnamedLossError
from convoy.errors import ConvoyError, DeviceLostError


class StateLostError(DeviceLostError):
    """With the devices that were lost went a part of the model that nobody else had."""


class LeftError(DeviceLostError):
    """This device has left the job, as it was asked to."""


class StoppedError(ConvoyError):
    """The whole training has ended after a step, as it was asked to."""


class GrownError(DeviceLostError):
    """Newcomers are let in: the devices meet anew."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Who went and who came, as one device sees it.

    Attributes:
        me: this device's id.
        count: so many train now.
        error: what ended the last step.
        lost: the ids of those that are gone.
        came: those that have come, in words.
        parted: pairs that did not reach each other, the second one of which is out for it; also of losses before this one.
        step: finished step after which all go on.
        done: steps that this device had finished.
        saved: whether that step is the one of a checkpoint.
        joins: whether this device is one of those that have come.
    """

    me: int
    count: int
    error: ConvoyError
    lost: Sequence[int]
    came: Sequence[str]
    parted: Pairs
    step: int
    done: int
    saved: bool
    joins: bool

    def line(self) -> str:
        """How the devices have changed, and after which step they go on."""
        after = f"after step {self.step}"
        if self.joins:
            return f"joined as device {self.me}; {self.count} train {after}"
        what = self._gone()
        if self.came:
            joined = f"{' and '.join(self.came)} joined"
            what = f"{what}, {joined}" if self.lost else joined
        where = f"from the checkpoint of step {self.step}, since {pieces_lost(self.lost)}" if self.saved else after
        again = f"; finished steps that are repeated: {self.done - self.step}" if self.done > self.step else ""
        return f"{what}; {self.count} go on {where}{again}"

    def _gone(self) -> str:
        """Who is lost, and how."""
        parted = sorted(pair for pair in self.parted if pair[1] in self.lost)
        silent = [d for d in self.lost if all(d != pair[1] for pair in parted)]
        names, why = ", ".join(map(str, silent)), str(self.error).partition(". ")[0]
        gone = f"device{'s' * (len(silent) > 1)} {names} lost" if silent else "a connection was lost"
        if parted:  # what this device had found out may be of another one, which has not heard of them either
            pairs = (
                f"devices {one} and {other} do not reach each other: device {other} is out" for one, other in parted
            )
            return "; ".join([*([gone] if silent else []), *pairs])
        if len(self.lost) == 1 and why.startswith(f"device {self.lost[0]} "):
            return why  # it names the device, and how it was lost
        if not isinstance(self.error, UnnamedLossError | GrownError):
            gone += f" ({why})"
        return gone


def pieces_lost(lost: Sequence[int]) -> str:
    """That with these devices went a part of the model."""
    names = ", ".join(map(str, lost))
    return f"with device{'s' * (len(lost) > 1)} {names} went pieces of the model that no other device has"
