"""Numbers with units: accepted spellings and refusals."""

import pytest

from convoy.errors import InputError
from convoy.fleet.units import Dimension, quantity

READ: list[tuple[object, Dimension, float]] = [
    ("12 GB", "bytes", 12e9),
    ("12gb", "bytes", 12e9),
    (12e9, "bytes", 12e9),
    ("12e9", "bytes", 12e9),
    ("1_000", "bytes", 1000),
    ("64 GiB", "bytes", 64 * 2**30),
    ("512 kB", "bytes", 512e3),
    ("1 Gbit/s", "bytes_per_s", 125e6),
    ("1Gbit", "bytes_per_s", 125e6),
    ("2.5 GBit/s", "bytes_per_s", 312.5e6),
    ("1 Gbps", "bytes_per_s", 125e6),
    ("100 Mbit", "bytes_per_s", 12.5e6),
    ("110MB/s", "bytes_per_s", 110e6),
    ("936 GBps", "bytes_per_s", 936e9),
    ("1 GiB/s", "bytes_per_s", 2**30),
    ("10 Gb/s", "bytes_per_s", 1.25e9),
    (125e6, "bytes_per_s", 125e6),
    ("450 ms", "s", 0.45),
    ("50us", "s", 50e-6),
    ("50 µs", "s", 50e-6),
    ("3 min", "s", 180),
    (".5 s", "s", 0.5),
    ("12.7 TFLOPS", "flop_per_s", 12.7e12),
    ("80 GFLOP/s", "flop_per_s", 80e9),
    ("170W", "W", 170),
]

REFUSED: list[tuple[object, Dimension, str]] = [
    ("12 Gx", "bytes", "'Gx' is no unit"),
    ("12 Gbit", "bytes", "'Gbit' is no unit of an amount of memory"),
    ("450 ms", "bytes_per_s", "'ms' is no unit of a rate"),
    ("1 gb/s", "bytes_per_s", "'gb/s' is no unit"),  # bits or bytes?
    ("1 ps", "s", "'ps' is no unit"),
    ("GB", "bytes", "a number with or without a unit"),
    ("", "bytes", "a number with or without a unit"),
    ("nan", "s", "a number with or without a unit"),
    ("1e999", "s", "finite"),
    (float("inf"), "s", "a number"),
    (True, "W", "a number"),
    (None, "W", "a number"),
    ("1,5 GB", "bytes", "is no unit"),
]


@pytest.mark.parametrize(("text", "dimension", "number"), READ)
def test_common_unit_spellings_are_read(text, dimension, number):
    assert quantity(text, dimension) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(("text", "dimension", "words"), REFUSED)
def test_wrong_quantity_is_refused_with_examples(text, dimension, words):
    with pytest.raises(InputError, match=r"write e\.g\. ") as refusal:
        quantity(text, dimension)
    assert words in str(refusal.value)
