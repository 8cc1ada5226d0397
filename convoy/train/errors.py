"""What is raised where a device, or the whole training, ends after a step; and where the devices meet anew."""

from convoy.errors import ConvoyError, DeviceLostError


class StateLostError(DeviceLostError):
    """With the devices that were lost went a part of the model that nobody else had."""


class LeftError(DeviceLostError):
    """This device has left the job, as it was asked to."""

    ends = "left"


class StoppedError(ConvoyError):
    """The whole training has ended after a step, as it was asked to."""

    ends = "stopped"


class GrownError(DeviceLostError):
    """Newcomers are let in: the devices meet anew."""
