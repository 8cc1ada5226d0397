"""The folder that lists a user's devices: no other user may create or read it."""

import os
import stat
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.machine import roster


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(roster, "SHARED", tmp_path)
    monkeypatch.setattr(roster, "_mine", None)
    return tmp_path


def test_roster_folder_is_private(shared: Path) -> None:
    assert roster.rows() == []
    (folder,) = shared.iterdir()
    assert folder.name == f"convoy-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["open to others", "another user's", "a link", "a file"])
def test_folder_of_another_user_is_refused(shared: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a stranger wrote would have `convoy stop` signal processes of his choice, and tell him who trains what. A
    device trains without a row then."""
    if how == "another user's":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    path = shared / f"convoy-{os.geteuid()}"
    if how == "a link":
        (shared / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(shared / "elsewhere")
    elif how == "a file":
        path.touch(mode=0o600)
    else:
        path.mkdir()
        path.chmod(0o755 if how == "open to others" else 0o700)
    with pytest.raises(InputError, match="in a folder that only this user can access; have this one removed"):
        roster.rows()
    roster.enter("a job", 0, "cpu")
    assert roster.of_processes([os.getpid()]) == [None]
    assert not [*shared.glob("*/*.json")]
