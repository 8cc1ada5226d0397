"""A notebook cell runs as a script on several devices."""

import io
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import convoy
from convoy.errors import ConvoyError
from tests.support.processes import PLACE


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE"):
        monkeypatch.delenv(name, raising=False)


class Shell:
    """The part of IPython that an extension uses."""

    def __init__(self) -> None:
        self.magics: dict[tuple[str, str], Callable[[str, str], None]] = {}

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        self.magics[magic_kind, magic_name] = function


def test_a_cell_runs_once_per_device_and_device_0_prints(capfd: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    convoy.load_ipython_extension(shell)
    names = "os.environ['CONVOY_RANK'], 'of', os.environ['CONVOY_WORLD_SIZE']"
    cell = f"import os\nprint('device', {names}, flush=True)\n"
    shell.magics["cell", "convoy"]("--devices 2", cell)
    assert capfd.readouterr().out.startswith("device 0 of 2\n")


def test_failing_cell_raises_in_the_cell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConvoyError, match="the cell ended with status 1"):
        convoy.notebook("raise SystemExit('no such layer')", "--devices 1")
    assert "no such layer" in capsys.readouterr().out


def test_an_interrupt_ends_the_devices() -> None:
    """As the stop button does."""
    cell = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"
    main = threading.main_thread().ident

    def stop() -> None:
        while "here" not in seen.getvalue():
            event.wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    event, seen = threading.Event(), io.StringIO()
    assert main is not None
    stopper = threading.Thread(target=stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", partial(print, file=seen))
        stopper.start()
        with pytest.raises(KeyboardInterrupt):
            convoy.notebook(cell, "--devices 2")
    stopper.join()
