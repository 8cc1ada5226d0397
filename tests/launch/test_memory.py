"""Memory settings: processes that Convoy starts reuse freed memory; other processes are unchanged."""

import os
import platform
import sys
from pathlib import Path

import pytest

from convoy.launch.host_job import MALLOC_NAMES, memory_environment
from convoy.launch.local import launch_local

THP = "THP_MEM_ALLOC_ENABLE"
OWN = (THP, *MALLOC_NAMES, "GLIBC_TUNABLES", "LD_PRELOAD")

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc")

WHERE = """
import os, sys
before = dict(os.environ)
import torch, convoy
group = convoy.join("cpu")
read_once = dict.fromkeys(("CONVOY_PARENT_PIPE", "CONVOY_JOB_KEY_PIPE", "CONVOY_LISTENER"), "")
assert {**before, **read_once} == {**os.environ, **read_once}, "joining has set a variable"
x = torch.zeros(12 << 20)  # 48 MB
rows = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
edges = [[int(edge, 16) for edge in row[0].split("-")] for row in rows]
in_heap = any(start <= x.data_ptr() < stop for start, stop in edges)
open(sys.argv[1] + "/" + os.environ.get("RANK", "alone"), "w").write(f"{in_heap} {os.environ.get('THP_MEM_ALLOC_ENABLE')}")
"""


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OWN, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@glibc
def test_started_device_reuses_freed_memory(tmp_path: Path) -> None:
    """Each step's large tensors were fresh pages, which the kernel fills with zeros: on one device, with 52 samples of
    two-conv 150:800, Convoy was a tenth slower than plain PyTorch, which holds a few of them less."""
    assert launch_local([WHERE, str(tmp_path)], ["cpu", "cpu"], command=(sys.executable, "-c")) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True 1"] * 2


def test_memory_settings_keep_the_users_values() -> None:
    assert memory_environment({}).keys() == {THP, *MALLOC_NAMES}
    for other in (*MALLOC_NAMES, "GLIBC_TUNABLES", "LD_PRELOAD"):
        assert memory_environment({other: "x"}) == {THP: "1"}, "another malloc, or other settings of it"
    assert memory_environment({THP: "0"})[THP] == "0"
    given = dict(os.environ)
    memory_environment(os.environ)
    assert dict(os.environ) == given
