"""Memory of the processor that is used again from step to step."""

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""As <malloc.h> numbers them."""

LARGEST_BYTES = 2**31 - 1
"""The largest number that `mallopt` takes."""

OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep what is freed for the next tensor, also of large ones; whether it does.

    By itself it gives tensors of 32 MB or more back to the kernel when they are freed. The next step's take fresh pages, which
    the kernel fills with zeros first: a tenth of a step of two-conv 150:800 with 52 samples. The process then holds the most
    memory that it ever needed. Whoever has chosen otherwise in the environment, or another malloc, is left alone.
    """
    if any(os.environ.get(name) for name in OWN_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_BYTES)) and bool(mallopt(TRIM_THRESHOLD, LARGEST_BYTES))
