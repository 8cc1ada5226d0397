"""What make does where the environment is there, and where it is another checkout's."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.programs import needs


@pytest.mark.parametrize("of_another", [False, True], ids=["none yet", "a link"])
@needs("make")
def test_linked_environment_is_used_unchanged(tmp_path: Path, of_another: bool) -> None:
    """`make check` failed in a second worktree: venv refuses a link, and pip would have put this checkout into the other."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "theirs").mkdir()
    if of_another:
        (tmp_path / ".venv").symlink_to("theirs")
    told = subprocess.run(
        ["make", "-n", "check"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20
    ).stdout
    assert ("pip install" in told, "-m venv" in told) == (not of_another, not of_another)
    assert ".venv/bin/mypy" in told
