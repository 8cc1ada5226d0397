"""Benchmarks. Each records hardware, versions, date and command, and writes its measurements to results/."""
