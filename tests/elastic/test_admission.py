"""When a process that asks to join counts as gone."""

import socket
import time
from collections.abc import Iterator

import pytest

from convoy.comm.connection import Connection
from convoy.elastic.admission import Applicant, Applicants


@pytest.fixture
def connection() -> Iterator[Connection]:
    one, other = socket.socketpair()
    with one, other:
        yield Connection(one, None, b"", answers=True)


def asked(applicants: Applicants, connection: Connection, ago_s: float) -> None:
    applicants.ask(Applicant("a mark", ("127.0.0.1", 9), {}, connection, time.monotonic() - ago_s))


def test_a_process_whose_connection_is_closed_counts_as_gone_until_it_connects_again(connection: Connection) -> None:
    applicants = Applicants()
    asked(applicants, connection, 0.0)
    assert applicants.waiting("none")
    connection.close()
    assert not applicants.waiting("none")
    one, other = socket.socketpair()
    with one, other:
        asked(applicants, Connection(one, None, b"", answers=True), 0.0)
        assert applicants.waiting("none")


@pytest.mark.parametrize("gap_s", [0.0, 20.0])
def test_a_silent_process_counts_as_gone_after_eight_times_the_longest_pause_between_its_requests(
    connection: Connection, gap_s: float
) -> None:
    applicants = Applicants()
    limit_s = max(3.0, 8 * gap_s)
    for ago_s, waits in ((limit_s - 1, True), (limit_s + 1, False)):
        asked(applicants, connection, ago_s + gap_s)
        asked(applicants, connection, ago_s)
        assert bool(applicants.waiting("none")) == waits
        applicants = Applicants()
