"""Memory that is freed is used again: large tensors lie in the heap, which stays, not in pages that come and go."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from convoy.comm import malloc

GLIBC = platform.libc_ver()[0] == "glibc"

WHERE = """
import sys, torch, convoy
if sys.argv[1] == "joined":
    convoy.join("cpu")
x = torch.zeros(12 << 20)  # 48 MB
rows = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
edges = [[int(edge, 16) for edge in row[0].split("-")] for row in rows]
print(any(start <= x.data_ptr() < stop for start, stop in edges))
"""


def in_heap(how: str, **settings: str) -> bool:
    own = {"RANK", "WORLD_SIZE", *malloc.OWN_SETTINGS}
    env = {name: value for name, value in os.environ.items() if name not in own} | settings
    done = subprocess.run(
        [sys.executable, "-c", WHERE, how], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip() == "True"


@pytest.mark.skipif(not GLIBC, reason="malloc of glibc")
def test_a_device_keeps_what_its_tensors_leave() -> None:
    """Each step's large tensors were fresh pages, which the kernel fills with zeros: on one device, with 52 samples of
    two-conv 150:800, Convoy was a tenth slower than plain PyTorch, which holds a few of them less."""
    assert in_heap("joined")
    assert not in_heap("alone"), "importing alone changes nothing"


@pytest.mark.skipif(not GLIBC, reason="malloc of glibc")
def test_who_has_chosen_otherwise_is_left_alone() -> None:
    assert not in_heap("joined", MALLOC_MMAP_THRESHOLD_="131072")


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in malloc.OWN_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not malloc.keep_freed_memory()
