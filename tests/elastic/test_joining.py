"""The addresses a joining device tries after single replies."""

from convoy.comm.connection import Credentials
from convoy.comm.job_key import make_key
from convoy.elastic.entrance import MOST_ADDRESSES, Entrance

A, B, C = ("a", 1), ("b", 2), ("c", 3)


def entrance() -> Entrance:
    return Entrance([A, B], Credentials(make_key()))


def test_unanswered_address_is_tried_last() -> None:
    joining = entrance()
    joining._ask_next()
    assert joining.addresses == [B, A]
    joining._ask_first([C, B])
    assert joining.addresses == [C, B, A]
    joining._ask_first([])
    assert joining.addresses == [B, A, C]


def test_a_joining_device_remembers_a_bounded_number_of_addresses() -> None:
    joining = entrance()
    joining._ask_first([("host", port) for port in range(200)])
    assert len(joining.addresses) == MOST_ADDRESSES
