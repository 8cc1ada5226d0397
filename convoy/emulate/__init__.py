"""A fleet on one Linux machine: every host a network namespace, its card shaped, its cores a quota.

`rehearse` runs a command on all devices of a fleet as torchrun would, at the fleet's rates and speeds, without the
fleet. It needs Linux and root, and it leaves nothing behind.
"""

from convoy.emulate.run import rehearse

__all__ = ["rehearse"]
