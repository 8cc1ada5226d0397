"""Errors that leave their process."""

import pickle

from convoy.errors import DeviceLostError


def test_lost_device_error_can_be_pickled() -> None:
    """Ray sends a worker's error to its controller."""
    error = DeviceLostError(2, "device 2 was lost")
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.device, str(copy), copy.__notes__) == (DeviceLostError, 2, "device 2 was lost", ["a note"])
