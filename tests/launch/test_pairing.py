"""A job's key is copied by a one-time code: to nobody without the code, for a few tries and minutes only."""

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from convoy.comm.environment import listen_at
from convoy.comm.job_key import JobKey, make_key, read_key_file, write_key_file
from convoy.errors import InputError
from convoy.launch import pairing
from convoy.launch.pairing import TRIES, _Channel, choose_key, receive_by_code, send_by_code
from tests.support.processes import ROOT, free_port

pytest.importorskip("spake2", reason="needs spake2: pip install 'spake2>=0.9'")

CODE, WRONG = "12345678", "1234-5679"
KEY = make_key()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen_at("127.0.0.1", 0) as made:
        yield made


@pytest.fixture
def sent(pool: ThreadPoolExecutor, listening: socket.socket) -> "Future[str]":
    """Return the sender, which ends at the latest with the test's own tries."""
    return pool.submit(send_by_code, KEY, listening, CODE)


def received(listening: socket.socket, code: str) -> JobKey:
    return receive_by_code(*listening.getsockname(), code)


def test_the_command_copies_the_key_file(tmp_path: Path) -> None:
    place, environment = f"127.0.0.1:{free_port()}", os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "convoy", "fleet", "key"]
    sender = subprocess.Popen([*command, "a.key", "--to", place], cwd=tmp_path, env=environment, stdout=-1, text=True)
    try:
        assert sender.stdout is not None
        told = [sender.stdout.readline(), sender.stdout.readline()]
        words = [*command, "b.key", "--from", place]
        assert told[0].endswith(f": convoy fleet key a.key --from {place}\n"), told
        code = told[1].split()[-1]
        subprocess.run(words, cwd=tmp_path, env=environment, input=f"{code}\n", text=True, timeout=60, check=True)
        assert sender.wait(60) == 0
    finally:
        sender.kill()
        sender.communicate()
    assert (tmp_path / "b.key").stat().st_mode & 0o777 == 0o600
    assert read_key_file(tmp_path / "b.key") == read_key_file(tmp_path / "a.key")


def test_a_wrong_code_gets_no_key_and_the_right_one_still_does(
    sent: "Future[str]", listening: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"no key from 127\.0\.0\.1.*5 tries and 10 minutes"):
        received(listening, WRONG)
    assert received(listening, "1234-5678\n") == KEY
    assert sent.result(20) == "127.0.0.1"
    assert capsys.readouterr().out == "A wrong code came from 127.0.0.1 (1 of 5)\n"


def assert_nobody_sends(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "ANSWER_S", 0.3)
    with pytest.raises(InputError, match="no key from"):
        received(listening, CODE)


def test_the_sixth_try_finds_nobody(
    sent: "Future[str]", listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(TRIES):
        with pytest.raises(InputError):
            received(listening, WRONG)
    with pytest.raises(InputError, match="was not sent: 5 wrong codes came; repeat the command"):
        sent.result(20)
    assert_nobody_sends(listening, monkeypatch)


def test_a_code_expires(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="was not sent: nobody typed its code in time; repeat the command"):
        send_by_code(KEY, listening, CODE, valid_s=0.01)
    assert_nobody_sends(listening, monkeypatch)


def test_a_code_is_used_once(sent: "Future[str]", listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert received(listening, CODE) == KEY
    sent.result(20)
    assert_nobody_sends(listening, monkeypatch)


@pytest.mark.parametrize("junk", [b"", b"\n", b"zz\n", b"00" * 33 + b"\n", b"42" + b"ff" * 32 + b"\n", b"x" * 100_000])
def test_junk_is_no_try(sent: "Future[str]", listening: socket.socket, junk: bytes) -> None:
    for _ in range(TRIES + 1):
        with socket.create_connection(listening.getsockname(), 20) as peer, suppress(OSError):
            peer.sendall(junk)
    assert received(listening, CODE) == KEY
    sent.result(20)


def test_an_eavesdropper_sees_no_key(
    sent: "Future[str]", listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, seen = _Channel._line_out, bytearray()

    def send_and_note(channel: _Channel, line: bytes) -> None:
        seen.extend(line)
        send(channel, line)

    monkeypatch.setattr(_Channel, "_line_out", send_and_note)
    assert received(listening, CODE) == KEY
    sent.result(20)
    assert len(seen) > len(KEY.pem)
    assert not [line for line in KEY.pem.split(b"\n") if len(line) > 10 and line in seen]
    assert CODE.encode() not in seen


def test_a_man_in_the_middle_without_the_code_cannot_pass_another_key(pool: ThreadPoolExecutor) -> None:
    """He plays the sender with a guessed code; `receive_by_code` with a guess is the other side of it."""
    with listen_at("127.0.0.1", 0) as between:

        def deceive() -> None:
            from spake2 import SPAKE2_A

            with between.accept()[0] as near:
                channel = _Channel(near, time.monotonic() + 20)
                channel.agree(SPAKE2_A, "87654321")
                assert channel.receive() == b"", "the proof tells him only that his guess was wrong"
                channel.send(make_key().pem)

        deceiver = pool.submit(deceive)
        with pytest.raises(InputError, match="its answer was made with another code"):
            received(between, CODE)
        deceiver.result(20)


@pytest.mark.parametrize(("name", "words"), [(None, "--pair without --job-key"), ("lab.key", "lab.key exists already")])
def test_pair_needs_a_new_file(tmp_path: Path, name: str | None, words: str) -> None:
    write_key_file(tmp_path / "lab.key")
    with pytest.raises(InputError, match=words):
        choose_key(None if name is None else tmp_path / name, "127.0.0.1:9")


def test_pair_receives_the_key_file_before_the_job_is_joined(
    sent: "Future[str]", listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVOY_JOB_KEY", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CODE}\n"))
    choose_key(tmp_path / "lab.key", "{}:{}".format(*listening.getsockname()))
    assert read_key_file(Path(os.environ["CONVOY_JOB_KEY"])) == KEY
    sent.result(20)
