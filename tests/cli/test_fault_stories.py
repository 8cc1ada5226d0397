"""Faults while users train: damaged checkpoints, NaN losses, full disks, odd files."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.utils.data import Dataset

from convoy import cli
from tests.support.processes import PLACE, ROOT

TINY = [
    *("--data", "digits", "--net", "two-conv:4:6", "--limit", "80", "--batch", "20", "--speeds", "1", "--lr", "0.05")
]
"""Epochs of four steps, on one device."""

Output = tuple[int, str, str]


@pytest.fixture
def convoy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run the command in this process; return exit status, output and errors."""
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: str) -> Output:
        monkeypatch.setattr(sys, "argv", ["convoy", *argv])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def refused(output: Output) -> str:
    """Return the one line of an error."""
    status, out, err = output
    assert status == 2
    assert out in ("", "Starting 1 device ...\n"), "nothing was trained"
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 2000
    return err


# ---------------------------------------------------------------------------------------------------- damaged checkpoints


def steps_of(log: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["what"] == "step"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_damaged_checkpoint_error_gives_a_working_command(tmp_path: Path, convoy: Callable[..., Output]) -> None:
    """Regression: the advised command started again at step 0 inside that folder, with exit status 0."""
    run, whole = tmp_path / "my run", tmp_path / "whole.jsonl"
    saving = ["--checkpoint", str(run), "--checkpoint-steps", "3"]
    assert convoy("train", *TINY, "--epochs", "3", "--log", str(whole))[0] == 0
    assert convoy("train", *TINY, *saving, "--epochs", "2")[0] == 0
    last, before = run / "000004-step-8", run / "000003-step-6"
    (last / "model.safetensors").write_bytes(b"nothing")
    kept = contents(run)
    error = refused(convoy("train", *TINY, *saving, "--epochs", "3", "--resume"))
    assert contents(run) == kept
    advice = re.search(r"give that folder \((.*?)\); this one stays", error)
    assert advice
    status, out, _ = convoy("train", *TINY, *saving, "--epochs", "3", *shlex.split(advice[1]))
    assert status == 0
    assert f"continues from {before}: step 6, epoch 1" in out
    names = sorted(path.name for path in run.glob("*-step-*"))
    assert names[-3:] == ["000006-step-9", "000007-step-12", "000008-step-12"]
    assert steps_of(run / "log.jsonl") == pytest.approx(steps_of(whole), rel=1e-4), "the curve is that of one run"
    assert not list(before.parent.glob("*/*/log.jsonl")), "nothing was written into a checkpoint"


def test_checkpoint_folder_can_be_resumed_but_not_used_for_a_new_run(
    tmp_path: Path, convoy: Callable[..., Output]
) -> None:
    run = tmp_path / "run"
    assert convoy("train", *TINY, "--checkpoint", str(run), "--checkpoint-steps", "3")[0] == 0
    for folder in (run / "000001-step-3", run / "best"):
        said = refused(convoy("train", *TINY, "--checkpoint", str(folder)))
        assert "of another run: resume it (--resume)" in said
    copy = tmp_path / "good one"
    os.rename(run / "000001-step-3", copy)
    said = refused(convoy("train", *TINY, "--checkpoint", str(copy), "--resume"))
    advice = re.search(r"copy it into the folder of a new run, as (.*)$", said)
    assert advice
    fresh = Path(shlex.split(advice[1])[0])
    shutil.copytree(copy, fresh)
    status, out, _ = convoy("train", *TINY, "--checkpoint", str(fresh), "--resume")
    assert (status, f"continues from {fresh}: step 3" in out) == (0, True)
    gone = run / "000009-step-99"
    assert "holds no checkpoint" in refused(convoy("train", *TINY, "--checkpoint", str(gone), "--resume"))


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (
            lambda run: (run / "best" / "model.safetensors").write_bytes(b""),
            ["--resume", "--epochs", "2"],
            "has 0 bytes",
        ),
        (lambda _: None, ["--resume", "--epochs", "2", "--seed", "4"], "seed is 0 there and 4 here"),
        (lambda _: None, ["--resume"], "is complete: 1 epochs are done"),
        (lambda _: None, [], "of another run: resume it (--resume)"),
    ],
)
def test_static_errors_are_reported_before_measuring(
    spoil: Callable[[Path], Any], options: Sequence[str], words: str,
    tmp_path: Path, convoy: Callable[..., Output], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Regression: the error came 4 to 14 s late, below the table of the plan."""
    run = tmp_path / "run"
    assert convoy("train", *TINY, "--checkpoint", str(run))[0] == 0
    spoil(run)
    monkeypatch.setattr("convoy.cli.train_parts.load_images", lambda *_: pytest.fail("it went on"))
    assert words in refused(convoy("train", *TINY, "--checkpoint", str(run), *options))


# ------------------------------------------------------------------------------------------------- a loss that is no number

DIVERGES = [*TINY[:-2], "--lr", "1e10", "--epochs", "2"]


def test_first_nan_loss_is_reported_with_its_step(tmp_path: Path, convoy: Callable[..., Output]) -> None:
    """Regression: training ended with "Best test accuracy: 10.28%" and exit status 0, without a message."""
    log = tmp_path / "log.jsonl"
    status, out, _ = convoy("train", *DIVERGES, "--log", str(log))
    assert status == 0
    first = min(step for step, loss in steps_of(log).items() if loss is None)
    told = re.findall(r"^WARNING: the loss of step (\d+) is (?:nan|inf): the training has diverged.*--lr.*", out, re.M)
    assert told == [str(first + 1)]
    assert f"WARNING: the training has diverged: its loss is not finite since step {first + 1}\n" in out


def test_nan_loss_can_stop_training_and_earlier_checkpoints_stay_good(
    tmp_path: Path, convoy: Callable[..., Output]
) -> None:
    run = tmp_path / "run"
    saving = ["--checkpoint", str(run), "--checkpoint-steps", "1"]
    status, _, err = convoy("train", *DIVERGES, *saving, "--on-nan", "stop")
    assert status == 2
    found = re.match(
        r"error: the loss of step (\d+) is \S+: the training has diverged, and stops before that step", err
    )
    assert found
    saved = sorted(run.glob("*-step-*"))
    assert saved[-1].name.endswith(f"-step-{int(found[1]) - 1}")


def test_nan_weights_are_not_resumed(tmp_path: Path, convoy: Callable[..., Output]) -> None:
    """Regression: they were accepted, and three bad checkpoints removed the last good one."""
    run = tmp_path / "run"
    saving = ["--checkpoint", str(run), "--checkpoint-steps", "1"]
    assert convoy("train", *TINY, *saving, "--epochs", "1")[0] == 0
    assert convoy("train", *DIVERGES, *saving, "--epochs", "3", "--resume")[0] == 2, "another learning rate"
    other = tmp_path / "other"
    saving = ["--checkpoint", str(other), "--checkpoint-steps", "1"]
    assert convoy("train", *DIVERGES, *saving)[0] == 0
    error = refused(convoy("train", *DIVERGES, *saving, "--epochs", "4", "--resume"))
    assert re.search(
        r"the weights of the checkpoint .* are useless: some are NaN or infinite, so the training had", error
    )
    advice = re.search(r"give that folder \((.*?)\)", error)
    assert advice, "the last checkpoint whose weights are numbers is still there"
    good = Path(shlex.split(advice[1])[1])
    weights = safetensors.torch.load_file(good / "model.safetensors")
    assert all(torch.isfinite(each).all() for each in weights.values())


# ----------------------------------------------------------------------------------------------------- disks that are full


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_training_survives_a_full_disk_under_the_log(convoy: Callable[..., Output]) -> None:
    status, out, err = convoy("train", *TINY, "--epochs", "2", "--log", "/dev/full")
    assert (status, err) == (0, "")
    assert len(re.findall(r"^WARNING: cannot write the log /dev/full \(No space left", out, re.M)) == 1
    assert "epoch 2/2" in out


def test_written_checkpoint_is_not_reported_as_lost(tmp_path: Path, convoy: Callable[..., Output]) -> None:
    """Regression: with a user folder named `best`, the error named a checkpoint that existed."""
    run = tmp_path / "run"
    (run / "best" / "mine").mkdir(parents=True)
    status, out, err = convoy("train", *TINY, "--checkpoint", str(run))
    assert (status, err) == (0, "")
    assert f"{run / '000001-step-4'} is saved, but " in out
    assert "could not be tidied (" in out
    assert (run / "best" / "mine").is_dir()


# ------------------------------------------------------------------------------------------------------------- odd values

LONG = "x" * 400_000

ODD: list[tuple[list[str], str]] = [
    (["--timeout", "1e30"], "--timeout 1e+30: input should be less than or equal to 1000000"),
    (["--speeds", "1e308"], "from 1e-12 to 1e12"),
    (["--batch", "1000000000"], "--batch 1000000000 with 80 training images"),
    (["--augment", "crop:99999"], "crop:99999"),
    (["--devices", "cuda:0,cuda:1"], "this machine has cpu; choose one of them"),
    (["--devices", "-2"], "--devices '-2': give a number, or names"),
    (["--job-key", "none.key"], "none.key cannot be read: No such file"),
    (["--net", "two-con:4:6"], "did you mean two-conv?"),
    (["--devices", "²"], "device '²' cannot be used"),
    (["--devices", "9" * 5000], "give a number from 1 to 1024"),
    (["--checkpoint", ""], "--checkpoint '': give a path: this is empty"),
    (["--data", "folder:"], "--data 'folder:': name a data set"),
    (["--net", "two-conv:4\n"], "give a text in UTF-8, without line breaks"),
    (["--net", "x" * 19_000], "unknown net 'xxx"),
    (["--plan", LONG], "unknown plan 'xxx"),
    ([f"--{LONG}"], "No such option"),
]


@pytest.mark.parametrize(("options", "words"), ODD, ids=[f"{row[0][0][:20]} {row[0][-1][:20]}" for row in ODD])
def test_odd_values_are_refused_in_one_bounded_line(
    options: Sequence[str], words: str, convoy: Callable[..., Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.cli.train_session.fit", lambda *_, **__: pytest.fail("it went on"))
    speeds = [] if options[0] in ("--speeds", "--devices") else ["--speeds", "1"]
    argv = [*TINY[:8], *speeds, *options, *([] if options[0] == "--log" else ["--log", "none"])]
    assert words in refused(convoy("train", *argv))


@pytest.mark.parametrize("value", ["abc", "nan", "1e30"])
def test_odd_slowdown_in_the_environment_is_refused(
    value: str, convoy: Callable[..., Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVOY_SLOWDOWN", value)
    assert f"CONVOY_SLOWDOWN='{value}' in the environment: it must be a number from 1" in refused(
        convoy("train", *TINY)
    )


# ---------------------------------------------------------------------------------------------------------- the real command


def real(*argv: str) -> list[str]:
    return [sys.executable, "-m", "convoy", *argv]


QUIET = {k: v for k, v in os.environ.items() if k not in (*PLACE, "COLUMNS")} | {"PYTHONPATH": str(ROOT)}


def test_closed_output_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    """As with `convoy train | head -1`."""
    command = subprocess.Popen(
        real("train", *TINY[:8], "--epochs", "1000000"),
        cwd=tmp_path,
        env=QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None
    assert command.stdout.readline()
    command.stdout.close()
    command.stdout = None
    _, errors = command.communicate(timeout=60)
    assert (command.returncode, errors) == (141, b"")


def test_ctrl_c_ends_the_command_soon(tmp_path: Path) -> None:
    """Regression: it took 7 s without a message."""
    log = tmp_path / "log.jsonl"
    with (tmp_path / "errors").open("wb") as errors:
        argv = real("train", *TINY[:8], "--epochs", "1000000", "--log", str(log))
        out = subprocess.DEVNULL
        command = subprocess.Popen(argv, cwd=tmp_path, env=QUIET, stdout=out, stderr=errors, start_new_session=True)
    try:
        deadline_s = time.monotonic() + 60
        while not (log.exists() and '"step"' in log.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(timeout=30) == 130
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)
            command.wait()
    said = (tmp_path / "errors").read_text()
    assert said == "interrupted\n"


class Spoilt(Dataset[Any]):
    """A data set with an unreadable eleventh sample."""

    targets = torch.arange(20) % 2

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 11:
            raise KeyError("no such row")
        return torch.zeros(1, 8, 8), index % 2


@pytest.mark.parametrize("workers", [0, 1])
def test_data_set_error_names_the_sample(workers: int) -> None:
    from convoy.train.loader import Loader

    with pytest.raises(KeyError) as raised:
        list(Loader(Spoilt(), 5, shuffle=False, workers=workers))
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "The data set raised this for sample 11." in told
