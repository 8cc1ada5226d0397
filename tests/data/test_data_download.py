"""Downloads: whole or not there at all, bounded in time and size, and what is said when they fail."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.data import fetch
from convoy.errors import DataError
from tests.support.data_files import assert_says, content
from tests.support.web_server import BODY, BODY_MD5, Server, closed_url, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as server:
        yield server


def test_a_good_download_is_there_whole(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destination = tmp_path / "new" / "folder" / "file.bin"
    fetch.download([server.url + "good"], destination, BODY_MD5)
    assert destination.read_bytes() == BODY
    assert content(destination.parent) == ["file.bin"]
    assert server.agents[0].startswith("convoy/")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"downloading {server.url}good\n")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("bad", f"not {BODY_MD5} (1024000 bytes)"),
        ("missing", "the server answered 404 Not Found"),
        ("short", "the connection ended after 1000 of 1024000 bytes"),
        ("silent", "timed out after 1000 bytes"),
        ("slow", "not finished after 0.3 s"),
    ],
)
def test_a_bad_download_leaves_nothing(server: Server, tmp_path: Path, path: str, says: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(DataError) as error:
        fetch.download([server.url + path], tmp_path / "file.bin", BODY_MD5, timeout_s=0.2, limit_s=0.3)
    assert_says(error, "could not download file.bin", server.url + path, says)
    assert_says(error, f"download {server.url}{path} by hand and put it into {tmp_path}", "--data-dir")
    assert content(tmp_path) == []
    assert time.monotonic() - started_s < 20


def test_a_file_is_complete_when_it_gets_its_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.folder = tmp_path / "web"
    server.folder.mkdir()
    (server.folder / "tiny").write_bytes(b"tiny")
    rename, seen = os.replace, []

    def watched(part: Path, destination: Path) -> None:
        seen.append(Path(part).read_bytes())
        rename(part, destination)

    monkeypatch.setattr(os, "replace", watched)
    fetch.download([server.url + "tiny"], tmp_path / "file.bin", hashlib.md5(b"tiny").hexdigest())
    assert seen == [b"tiny"]


def test_a_bad_download_leaves_the_old_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"old")
    with pytest.raises(DataError):
        fetch.download([server.url + "bad"], tmp_path / "file.bin", BODY_MD5)
    assert (tmp_path / "file.bin").read_bytes() == b"old"


def test_a_file_without_end_is_given_up(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longer than 5000 bytes"):
        fetch.download([server.url + "good"], tmp_path / "file.bin", BODY_MD5, limit_bytes=5000)
    assert content(tmp_path) == []


def test_nobody_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url = closed_url()
    with pytest.raises(DataError) as error:
        fetch.download([url], tmp_path / "file.bin", BODY_MD5)
    assert_says(error, url, "Connection refused", "--data-dir")
    assert content(tmp_path) == []


def test_the_next_address_helps_and_all_failures_are_told(server: Server, tmp_path: Path) -> None:
    urls = [closed_url(), server.url + "missing", server.url + "bad"]
    fetch.download([*urls, server.url + "good"], tmp_path / "file.bin", BODY_MD5)
    assert (tmp_path / "file.bin").read_bytes() == BODY
    with pytest.raises(DataError) as error:
        fetch.download(urls, tmp_path / "other.bin", BODY_MD5)
    assert_says(error, *urls, "Connection refused", "404", "md5")
    assert content(tmp_path) == ["file.bin"]


def test_several_downloads_at_once_do_not_meet(server: Server, tmp_path: Path) -> None:
    destination = tmp_path / "file.bin"
    failures: list[Exception] = []

    def fetch_it() -> None:
        try:
            fetch.download([server.url + "together"], destination, BODY_MD5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=fetch_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    assert destination.read_bytes() == BODY
    assert content(tmp_path) == ["file.bin"]


def test_an_interrupt_leaves_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        digest_size = 16

        def update(self, _chunk: bytes) -> None:
            assert len(content(tmp_path)) == 1
            raise KeyboardInterrupt

    monkeypatch.setattr(hashlib, "md5", lambda **_: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        fetch.download([server.url + "good"], tmp_path / "file.bin", BODY_MD5)
    assert content(tmp_path) == []


def test_what_a_killed_download_left_goes_after_an_hour(server: Server, tmp_path: Path) -> None:
    old, running, other = (tmp_path / name for name in (".file.bin.1.part", ".file.bin.2.part", ".else.bin.3.part"))
    for path in (old, running, other):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    os.utime(other, (time.time() - 7200,) * 2)
    fetch.download([server.url + "good"], tmp_path / "file.bin", BODY_MD5)
    assert content(tmp_path) == sorted([running.name, other.name, "file.bin"])


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as error:
        fetch.download([server.url + "good"], tmp_path / "file" / "x.bin", BODY_MD5)
    assert_says(error, tmp_path / "file" / "x.bin", "cannot write", "XDG_CACHE_HOME", "--data-dir")
