"""Run the command in tests: as a user, in this process, or on forked devices; and parse its output."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

import pytest

import convoy.cli.train_job  # noqa: F401 - the nursery imports this file, so that the devices forked from it have it
from convoy import cli
from convoy.data import load
from tests.support.processes import PLACE, ROOT

load("digits")  # imports scikit-learn, likewise

TINY = ["--net", "two-conv:4:6", "--limit", "80", "--batch", "32", "--lr", "0.05"]
"""Batches of 32, 32 and 16."""

QUIET = {
    **{k: v for k, v in os.environ.items() if k not in (*PLACE, "COLUMNS")},
    "PYTHONWARNINGS": "error",
    "PYTHONPATH": str(ROOT),
}


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "convoy", "train", *TINY, *argv]


def convoy_in_process(monkeypatch: pytest.MonkeyPatch, argv: Sequence[str]) -> int:
    """Run the command in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["convoy", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def train_all(device: int, runs: list[list[str]]) -> list[str]:  # noqa: ARG001
    texts = []
    for argv in runs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            cli.app(args=["train", *argv], standalone_mode=False)
        texts.append(printed.getvalue())
    return texts


def results(text: str) -> list[tuple[float, str]]:
    """Return (loss, accuracy) of every epoch, as printed."""
    return [(float(loss), right) for loss, right in re.findall(r"loss ([\d.]+), test accuracy ([\d.]+%)", text)]


def assert_close(found: list[tuple[float, str]], expected: list[tuple[float, str]]) -> None:
    assert [right for _, right in found] == [right for _, right in expected]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=1.5e-4), "the last digit"
