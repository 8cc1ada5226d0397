"""The page of a run as it goes on: who may see it, what it survives, how it ends. The browser's side: with the page."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from convoy import cli
from convoy.report import serve
from convoy.report.serve import LivePage, PageServer
from tests.support.run_logs import RESHARE, RUN, epoch, whole_run, write

LIMIT_S = 20.0


@contextlib.contextmanager
def serving(*runs: Path) -> Iterator[PageServer]:
    with PageServer(LivePage(runs)) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(LIMIT_S)


def ask(
    server: PageServer, path: str | None = None, host: str = "localhost", method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers; the page itself where no path is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)
    try:
        connection.putrequest(method, f"/{server.token}/" if path is None else path, skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def version_of(text: str) -> str:
    found = re.search(r'<body data-version="([^"]+)">', text)
    assert found
    return found[1]


def update(server: PageServer, text: str) -> tuple[int, str]:
    """What the page is told next, after this state of it."""
    status, fresh, _ = ask(server, f"/{server.token}/update?after={version_of(text)}")
    return status, fresh


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOOK_S", 0.02)
    monkeypatch.setattr(serve, "REST", 0)
    monkeypatch.setattr(serve, "LEAST_REST_S", 0.0)


# ------------------------------------------------------------------------------------------------------- who may see it


def test_who_knows_the_address_sees_the_page_and_nobody_else(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", whole_run())
    with serving(tmp_path) as server:
        status, text, headers = ask(server)
        assert status == 200
        assert "Finished: 40 of 40 steps." in text
        assert "connect-src &#39;self&#39;" in text
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Server" not in headers or "Python" not in headers["Server"]
        token = server.token
        assert len(token) >= 22
        for path in (
            "/", "/update", f"/{token}", f"/{token[:-1]}/", f"/{token}x/", f"/{'a' * len(token)}/",
            f"/{token}/log.jsonl", f"/{token}/../{token}/", f"/{token}/../../../etc/passwd",
            f"/{token}/%2e%2e/%2e%2e/etc/passwd", f"/{token}/{log}", f"http://localhost/{token}/", f"/{token}/update/", "*",
            "/%ff%fe", f"/?{token}/",
        ):  # fmt: skip
            status, text, _ = ask(server, path)
            assert status == 404, path
            assert "conv" not in text
            assert token not in text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:99"])
def test_names_of_this_machine_are_answered(tmp_path: Path, host: str) -> None:
    with serving(tmp_path) as server:
        assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", "a@b", "[", "10.0.0.1", "::1"]
)  # fmt: skip
def test_another_name_is_a_page_that_rebound_its_name_to_this_machine(tmp_path: Path, host: str) -> None:
    """It would know the token of no run, but shall not even be told so."""
    with serving(tmp_path) as server:
        status, text, _ = ask(server, host=host)
        assert status == 421
        assert "Waiting" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "BREW"])
def test_it_can_only_be_read(tmp_path: Path, method: str) -> None:
    with serving(tmp_path) as server:
        assert ask(server, method=method)[0] == 501


def test_it_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1"
        others = [
            each.address for interface in psutil.net_if_addrs().values() for each in interface
            if each.family == socket.AF_INET and not each.address.startswith("127.")
        ]  # fmt: skip
        for address in others:
            with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
                socket.create_connection((address, server.server_port), 1.0)


def test_two_servers_have_two_secrets(tmp_path: Path) -> None:
    with serving(tmp_path) as one, serving(tmp_path) as other:
        assert one.token != other.token
        assert ask(one, f"/{other.token}/")[0] == 404


# -------------------------------------------------------------------------------------------------------- what it shows


@pytest.mark.usefixtures("quick")
def test_a_run_that_begins_after_the_page(tmp_path: Path) -> None:
    """No folder, an empty folder, half a line, the first line, steps: each is a page, and each leads to the next."""
    run = tmp_path / "runs" / "mine"
    with serving(run) as server:
        _, text, _ = ask(server)
        assert f"There is no log in {run} yet." in text
        run.mkdir(parents=True)
        (run / "log.jsonl").write_text('{"what": "ru')
        status, text = update(server, text)
        assert (status, "it is empty" in text) == (200, True)
        write(run / "log.jsonl", [RUN])
        status, text = update(server, text)
        assert (status, "Not finished: 0 of 40 steps" in text) == (200, True)
        write(run / "log.jsonl", [RUN, *epoch(0)])
        status, text = update(server, text)
        assert (status, "Not finished: 20 of 40 steps" in text) == (200, True)


@pytest.mark.usefixtures("quick")
def test_a_folder_of_runs_shows_the_latest(tmp_path: Path) -> None:
    """`convoy report --serve`, then `convoy train`: its folder has a name that nobody knew before."""
    with serving(tmp_path / "runs") as server:
        _, text, _ = ask(server)
        assert "There is no log in" in text
        for name, rows in (("b", [RUN]), ("a", whole_run())):
            (tmp_path / "runs" / name).mkdir(parents=True)
            write(tmp_path / "runs" / name / "log.jsonl", rows)
            _, text = update(server, text)
        assert "Finished: 40 of 40 steps." in text


@pytest.mark.usefixtures("quick")
def test_a_log_that_is_cut_off_replaced_or_deleted(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", whole_run())
    with serving(tmp_path) as server:
        _, text, _ = ask(server)
        log.write_text("")
        _, text = update(server, text)
        assert "it is empty" in text
        other = write(tmp_path / "other", [RUN | {"options": {"net": "another"}}, *epoch(0)])
        other.replace(log)
        _, text = update(server, text)
        assert "another on images" in text
        log.unlink()
        _, text = update(server, text)
        assert "There is no log in" in text
        log.write_text("no log\n")
        _, text = update(server, text)
        assert "line 1 is no JSON" in text
        log.unlink()
        log.mkdir()
        _, text = update(server, text)
        assert "it is a folder" in text
        log.rmdir()
        write(log, [RUN])
        _, text = update(server, text)
        assert "Not finished" in text


@pytest.mark.usefixtures("quick")
def test_several_runs_are_compared_as_they_go_on(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", whole_run()), tmp_path / "two.jsonl"
    with serving(one, two) as server:
        _, text, _ = ask(server)
        assert f"There is no log in {two} yet." in text
        write(two, [RUN, *epoch(0)])
        _, text = update(server, text)
        assert "<h1>2 runs</h1>" in text
        assert "Not finished: 20 of 40 steps" in text


# --------------------------------------------------------------------------------------------------- what it costs others


def test_a_question_waits_for_news_and_looks_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WAIT_S", 1.4)
    write(tmp_path / "log.jsonl", [RUN])
    looks: list[float] = []
    seen = LivePage._seen
    monkeypatch.setattr(LivePage, "_seen", lambda page: looks.append(time.monotonic()) or seen(page))
    with serving(tmp_path) as server:
        _, text, _ = ask(server)
        looks.clear()
        start_s, used_s = time.monotonic(), time.process_time()
        assert update(server, text) == (204, "")
        assert 1.2 < time.monotonic() - start_s < 4.0
        assert time.process_time() - used_s < 0.3
        assert len(looks) <= 4
        server.closing.wait(1.0)
        assert len(looks) <= 4, "nobody waits, and nobody looks"


def test_a_page_that_takes_long_is_not_made_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training is what the processor is for."""
    monkeypatch.setattr(serve, "LOOK_S", 0.01)
    made: list[str] = []
    monkeypatch.setattr(LivePage, "_render", lambda _, version: made.append(version) or time.sleep(0.2) or version)
    log, page, closing = write(tmp_path / "log.jsonl", [RUN]), LivePage([tmp_path]), threading.Event()
    text, end_s = page.newer("", closing), time.monotonic() + 1.5
    while time.monotonic() < end_s:
        with log.open("a") as file:
            file.write("\n")
        threading.Timer(0.1, closing.set).start()
        text = page.newer(text or "", closing) or text
        closing.clear()
    assert len(made) == 1, "it took 0.2 s, and rests for 2 s"


def test_many_silent_visitors_take_nothing_from_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve._Handler, "timeout", 3.0)
    with serving(tmp_path) as server, contextlib.ExitStack() as stack:
        deadline_s = time.monotonic() + LIMIT_S
        for visitors in range(1, serve.MOST_CONNECTIONS + 1):  # one by one: more would wait to be accepted for a second
            visitor = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), LIMIT_S))
            visitor.sendall(b"GET /")
            while len(server._open) < visitors and time.monotonic() < deadline_s:
                time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", server.server_port), LIMIT_S) as one_more:
            assert one_more.recv(100) == b"", "it is turned away at once"
        assert len(server._open) == serve.MOST_CONNECTIONS, "while all others are there"
        while server._open and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert ask(server)[0] == 200, "who is silent for too long is left"
        assert threading.active_count() < 10


def test_a_question_of_megabytes_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert ask(server, "/" + "a" * 200_000)[0] == 414
        assert ask(server)[0] == 200


# ------------------------------------------------------------------------------------------------------------ the command


def started(*argv: str | Path, folder: Path) -> tuple["subprocess.Popen[str]", str]:
    """The command, and the address that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "convoy", "report", "--serve", *argv], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"CONVOY_RUNS": "runs"},
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline()


def test_ctrl_c_ends_it_cleanly_also_while_a_page_waits(tmp_path: Path) -> None:
    process, line = started(folder=tmp_path)
    stack = contextlib.ExitStack()
    try:
        found = re.match(r"http://127\.0\.0\.1:(\d+)/([\w-]{22,})/ ", line)
        assert found, line
        connection = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=LIMIT_S))
        )
        connection.request("GET", f"/{found[2]}/")
        text = connection.getresponse().read().decode()
        assert "There is no log in runs yet." in text
        connection.request("GET", f"/{found[2]}/update?after={version_of(text)}")
        time.sleep(0.2)
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err
        assert time.monotonic() - start_s < 10.0, "a question is held for twice as long"
    finally:
        stack.close()
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--serve", "-o", "page.html"], "--serve with --output"),
        (["--port", "8000"], "--port without --serve"),
        ([], "there is no run in runs yet"),
        (["a.jsonl", "b.jsonl"], "cannot read the log a.jsonl: No such file"),
    ],
)
def test_what_does_not_go_together(
    argv: Sequence[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVOY_RUNS", "runs")
    monkeypatch.setattr(sys, "argv", ["convoy", "report", *argv])
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path) as server:
        port = str(server.server_port)
        told = f"error: --port {port}: Address already in use; leave it out for a free one\n"
        test_what_does_not_go_together(["--serve", "--port", port], told, tmp_path, monkeypatch, capsys)


def test_reshared_plans_are_followed(tmp_path: Path, quick: None) -> None:  # noqa: ARG001
    rows = whole_run()
    place = rows.index(RESHARE)
    log = write(tmp_path / "log.jsonl", rows[:place])
    with serving(tmp_path) as server:
        _, text, _ = ask(server)
        assert "From step 10 on" not in text
        write(log, rows)
        _, text = update(server, text)
        assert "<details open><summary>From step 10 on" in text
