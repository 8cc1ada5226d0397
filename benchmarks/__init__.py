"""Benchmarks: each states hardware, versions, date and command, and keeps what it measured in results/."""
