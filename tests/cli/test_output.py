"""Output into a file whose disk is full for a while."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy import cli
from convoy.cli.output import patient_output
from tests.support.processes import ROOT


class SmallDisk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, handle: int) -> None:
        self.is_full, self.handle, self._write = False, handle, os.write
        monkeypatch.setattr("convoy.cli.output.os.write", self)

    def __call__(self, handle: int, data: bytes) -> int:
        if self.is_full and handle == self.handle:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(handle, data)


def test_what_finds_no_room_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training whose output went to a file ended when its disk was full."""
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        disk = SmallDisk(monkeypatch, file.fileno())
        with patient_output() as files:
            for text, is_full in (("epoch 1", False), ("epoch 2", True), ("epoch 3", True), ("epoch 4", False)):
                disk.is_full = is_full
                print(text, flush=True)
                sys.stdout.buffer.write(b".\n")
                sys.stdout.flush()
            assert files[0].left_out_bytes == 0
        assert sys.stdout is file
    said = (tmp_path / "out").read_text()
    assert said == "epoch 1\n.\n\n[20 bytes are missing here: the disk was full]\nepoch 4\n.\n"


def test_what_is_missing_in_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "argv", ["convoy", "--version"])
        SmallDisk(monkeypatch, file.fileno()).is_full = True
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: the output lacks its last ")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_nothing(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m convoy --version {closed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=60).returncode == 0
