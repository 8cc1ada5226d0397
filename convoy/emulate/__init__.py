"""Emulates a fleet on one Linux machine: a network namespace per host, a CPU quota per device. Needs root."""
