"""Points at which plans are priced: arrays of device counts, batches, speeds and links."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Self

import numpy as np

from convoy.errors import InputError
from studies.collectives import Floats, Numbers


@dataclass(frozen=True, slots=True)
class Points:
    """Points at which plans are priced: arrays of one length.

    Attributes:
        devices: how many equal devices.
        batch: global batch, in samples.
        flop_per_s: peak of a device; dense kernels reach `efficiency` of it.
        memory_bytes_per_s: memory bandwidth of a device.
        link_bytes_per_s: of each NIC, each direction.
        latency_s: of a message.
        message_s: processor seconds per message sent or received.
    """

    devices: Floats
    batch: Floats
    flop_per_s: Floats
    memory_bytes_per_s: Floats
    link_bytes_per_s: Floats
    latency_s: Floats
    message_s: Floats
    efficiency: Floats

    @classmethod
    def of(
        cls,
        *,
        devices: Numbers,
        batch: Numbers,
        flop_per_s: Numbers,
        memory_bytes_per_s: Numbers,
        link_bytes_per_s: Numbers,
        latency_s: Numbers = 5e-5,
        message_s: Numbers = 0.0,
        efficiency: Numbers = 1.0,
    ) -> Self:
        """Return points from numbers and arrays that broadcast to one axis.

        Raises:
            InputError: a value that is not finite or not above zero; a device count or batch that is not whole.
        """
        given = (
            devices, batch, flop_per_s, memory_bytes_per_s, link_bytes_per_s, latency_s, message_s, efficiency,
        )  # fmt: skip
        arrays = [np.ravel(a).astype(np.float64) for a in np.broadcast_arrays(*given)]
        points = cls(*arrays)
        points._check()
        return points

    @classmethod
    def grid(cls, **axes: Numbers) -> Self:
        """Return every combination of the attributes' values; the last axis varies fastest. See `of`."""
        columns = np.array(list(product(*(np.ravel(v) for v in axes.values()))), dtype=np.float64)
        return cls.of(**{name: columns[:, i] for i, name in enumerate(axes)})

    def __len__(self) -> int:
        return len(self.devices)

    def columns(self) -> Mapping[str, Floats]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _check(self) -> None:
        for name, values in self.columns().items():
            least = 0.0 if name in ("latency_s", "message_s") else np.nextafter(0.0, 1.0)
            wrong = ~np.isfinite(values) | (values < least)
            if name in ("devices", "batch"):
                wrong |= values != np.floor(values)
            if wrong.any():
                rule = "whole numbers, 1 or more" if name in ("devices", "batch") else "finite and above 0"
                raise InputError(f"{name} = {values[wrong][0]:g}: must be {rule}; correct the sweep")
