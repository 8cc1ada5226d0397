"""Random numbers that depend on a key alone: whoever loads a sample, where and when, draws the same for it."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch


def uniforms(seed: int, epoch: int, indices: Sequence[int], count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for samples of a data set, shape `(len(indices), count)`.

    A row depends on the seed, the epoch and the sample's index and on nothing else. Counter-based: Philox-4x64-10 (Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed and the epoch as its key, the index in its counter.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    u_NK = np.empty((len(indices), count))
    for row, index in enumerate(indices):
        # The lowest word counts the blocks of one sample.
        counter = np.array([0, index, 0, 0], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(count)
        u_NK[row] = (words >> np.uint64(11)) * 2.0**-53
    return u_NK


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Random numbers drawn inside leave no trace in the streams of the program."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def reseed(key: str) -> None:
    """Make the streams of Python, NumPy and torch depend on the key alone, for data sets that draw from those."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
