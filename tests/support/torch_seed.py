"""Random numbers of a seed for several threads at once: torch has one generator for all of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Torch's random numbers are those of this seed here, and go on afterwards as if nothing had been drawn.

    Threads that stand for devices wait for each other: two that set the seed and draw in turns would get mixed numbers.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
