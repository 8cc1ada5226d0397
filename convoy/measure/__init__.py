"""Measuring: run, time, report medians. Only this room and `execute` touch devices, clocks and the network."""
