"""Where the processor time of a step goes: each second once."""

import socket
import threading

import pytest
import torch
from torch import nn

from benchmarks import operations
from benchmarks.operations import Books, Ledger, Seen, backward, table_of


def test_each_second_counts_once_under_what_was_begun_last(monkeypatch: pytest.MonkeyPatch) -> None:
    # (when a kind begins or ends is read, and the time from which the next one counts)
    times = iter([0.0, 1.0, 1.0, 3.0, 3.0, 7.0, 7.5, 8.0, 8.0])
    monkeypatch.setattr(operations.time, "thread_time", lambda: next(times))
    ledger = Ledger("rest")
    ledger.enter("send", "python")
    ledger.enter("send", "torch")
    ledger.leave()
    ledger.leave()
    assert dict(ledger.spent) == {("rest", "python"): 1.0, ("send", "python"): 2.5, ("send", "torch"): 4.0}


def test_calls_are_told_apart_also_inside_a_backward() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(_ctx: object, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return books.wrapped(lambda: 2 * g, "inside")()  # type: ignore[no-any-return]

    books = Books(deep=True)
    ledger, x = books.own(), nn.Parameter(torch.ones(3))
    a, b = socket.socketpair()
    with a, b, books.every_call():
        loss = Twice.apply(x).sum()  # type: ignore[no-untyped-call]
        backward(loss)
        books.wrapped(lambda: (a.send(b"x"), b.recv(1), threading.Lock().locked()), "message")()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    assert ledger.calls["inside", "torch"] == 1  # the product
    assert ledger.calls["message", "system calls"] == 3 + 1  # and the lock was made


def test_the_table_has_python_as_the_rest() -> None:
    plain = Seen(1.0, 0.008, 0.001, 3.0, [("send", "python", 0.005)], [], 6.0, 2.0, 100.0, 0.0)
    deep = Seen(1.0, 0.1, 0.001, 3.0, [("send", "torch", 0.002), ("send", "system calls", 0.0015)],
                [("send", "torch", 500.0), ("send", "system calls", 7.0)], 6.0, 2.0, 100.0, 1e-6)  # fmt: skip
    table = table_of("net", 8, [plain], [deep])
    rows = [[str(cell) for cell in column.cells] for column in table.columns]
    assert [column[0] for column in rows] == ["send", "5.00", "2.01", "1.50", "1.49", "0.00", "7"]
    assert rows[1][-1] == "3.00"  # of the process, in no thread that was watched
