"""The command as users run it: training end to end, with its output and files."""

import itertools
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from convoy import cli
from convoy.errors import DeviceLostError
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from tests.support.commands import QUIET, TINY, assert_close, command, results, train_all
from tests.support.processes import on_processes

# ------------------------------------------------------------------------------- every plan, on one device and on three


def test_every_plan_prints_the_results_of_one_device(tmp_path: Path) -> None:
    """Include a saved plan with another collective."""
    base = [*TINY, "--epochs", "2"]
    fast = ["--speeds", "4,2,1"]
    file, log = tmp_path / "plan.json", tmp_path / "run.jsonl"
    runs = [[*base, *fast, "--plan", plan] for plan in PLANS]
    runs[list(PLANS).index("hybrid")] += ["--save-plan", str(file), "--log", str(log), "--explain"]
    again = [*base, *fast, "--plan", str(file)]
    runs += [again, [*again, "--reduce", "star"]]
    on_three = on_processes(3, "tests.support.commands:train_all", runs, joined=False, limit_s=100)
    ((one,),) = on_processes(1, "tests.support.commands:train_all", [[*base, "--speeds", "1"]], joined=False)
    expected = results(one)
    assert len(expected) == 2
    assert on_three[1] == on_three[2] == [""] * len(runs), "only device 0 prints"
    texts = dict(zip([*PLANS, "file", "file, star"], on_three[0], strict=True))
    for text in texts.values():
        assert_close(results(text), expected)
        assert "INEXACT" not in text
    assert "Plan data-by-speed: batch 32, sums by ring" in texts["data-by-speed"]
    shares = re.search(r"│ 0 +│ conv +│ batch +│ +(\d+) │ +(\d+) │ +(\d+) │", texts["data-by-speed"])
    assert shares is not None
    assert shares.groups() == ("18", "9", "5"), "32 in shares of 4 : 2 : 1"
    assert "speeds given by --speeds" in texts["data"]
    check_saved(texts, file)
    check_log(log, results(texts["hybrid"]))


def check_saved(texts: dict[str, str], file: Path) -> None:
    """Check that the saved plan is the one that ran: everything but the step list is printed again."""
    assert Plan.load(file).name == "hybrid"
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask(), "as readable as any new file"
    tables = [re.search(r"Plan hybrid.*?└[─┴]+┘", texts[name], re.DOTALL) for name in ("hybrid", "file")]
    assert tables[0] is not None
    assert tables[1] is not None
    assert tables[0][0] == tables[1][0]
    assert "sums by star" in texts["file, star"]
    assert "sum, butterfly: gradients of" in texts["hybrid"]
    assert "one step of 32 samples on 3 devices\nforward:\n     0  compute  0: input_1 batch(18,9,5)" in texts["hybrid"]
    assert "one step of" not in texts["file"]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def check_log(path: Path, expected: list[tuple[float, str]]) -> None:
    """Check that every line is JSON: one per step with its loss, per epoch with results, per device with times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_kind = {what: [line for line in lines if line["what"] == what] for what in ("run", "step", "epoch", "device")}
    assert [len(by_kind[what]) for what in ("run", "step", "epoch", "device")] == [1, 6, 2, 3]
    assert lines[0]["options"]["plan"] == "hybrid"
    assert lines[0]["options"]["log"] == str(path)
    assert [(line["step"], line["epoch"], line["samples"]) for line in by_kind["step"]] == [
        *((0, 0, 32), (1, 0, 32), (2, 0, 16)),
        *((3, 1, 32), (4, 1, 32), (5, 1, 16)),
    ]
    for epoch, line in enumerate(by_kind["epoch"]):
        steps = [step for step in by_kind["step"] if step["epoch"] == epoch]
        assert line["loss"] == pytest.approx(sum(s["loss"] * s["samples"] for s in steps) / 80)
        assert f"{line['loss']:.4f}" == f"{expected[epoch][0]:.4f}"
        assert f"{line['accuracy']:.2%}" == expected[epoch][1]
    assert [line["device"] for line in by_kind["device"]] == [0, 1, 2]
    assert sum(line["work_share"] for line in by_kind["device"]) == pytest.approx(1)
    assert all(line["sent_bytes"] > 0 and line["compute_s"] > 0 for line in by_kind["device"])


def train_differently(device: int, argv: list[str], stranger: list[str]) -> str:
    """Start device 1 with other options; return each device's error."""
    try:
        cli.app(args=["train", *argv, *(stranger if device == 1 else [])], standalone_mode=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        (["--net", "two-conv:5:6"], "--net is two-conv:4:6 on device 0, but two-conv:5:6 on device 1"),
        (["--lr", "0.5"], "--lr is 0.05 on device 0, but 0.5 on device 1"),
    ],
)
def test_devices_with_other_options_are_named(stranger: list[str], words: str) -> None:
    """With its own learning rate, a device's weight copies would silently diverge."""
    for said in on_processes(3, "tests.cli.test_cli:train_differently", TINY, stranger, joined=False):
        assert said.startswith("MismatchError: ")
        assert words in said
        assert "start every device with the same options" in said


# ------------------------------------------------------------------------------------------------- the real command


def test_command_trains_and_compares_with_one_device(tmp_path: Path) -> None:
    """Use measured speeds, one device, warnings as errors, and plain lines in a pipe."""
    log = tmp_path / "run.jsonl"
    options = ["--devices", "3", "--slowdown", "1,1,2", "--plan", "master", "--compare", "--page", "--log"]
    done = subprocess.run(
        command(*options, str(log)), cwd=tmp_path, env=QUIET, capture_output=True, text=True, timeout=100
    )
    assert done.stderr == ""
    assert done.returncode == 0
    text = done.stdout
    assert "\x1b" not in text
    assert "\r" not in text
    assert "…" not in text, "nothing is cut off"
    headings = [
        "every device times the model's layers ...",
        "Fleet: 3 devices, speeds measured on the model's own layers",
        "Plan master: batch 32, sums by ring",
        "Training on 3 devices, plan master: 1 epoch of 80 images",
        "Devices over",
        "Training on one device, plain PyTorch: 1 epoch of 80 images",
        "The same training on one device (plain PyTorch)",
        "Loss curves over 3 steps: at most",
    ]
    places = [text.find(heading) for heading in headings]
    assert -1 not in places
    assert places == sorted(places)
    together, alone = results(text)
    assert_close([together], [alone])
    (apart,) = re.findall(r"at most (\S+) apart \(rounding of float32", text)
    assert float(apart) < 1e-4
    assert re.search(r"3 devices trained .* times as fast as the fastest|One device alone was faster", text)
    assert text.endswith(f"A page of this run: {log.with_suffix('.html')}\n")
    assert text.count("2x") == 2, "the slow-down, in the fleet and at the end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]


def train_until_one_freezes(device: int, argv: list[str]) -> str:
    """Stop device 1 in its third step; return the errors of the others."""
    step, steps = torch.optim.SGD.step, itertools.count()

    def freeze(optimizer: torch.optim.SGD) -> None:
        if device == 1 and next(steps) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        step(optimizer)

    torch.optim.SGD.step = freeze  # type: ignore[method-assign, assignment]
    try:
        train_all(device, [argv])
    except DeviceLostError as error:
        return str(error)
    return "trained"


def test_a_device_that_freezes_is_named() -> None:
    argv = [*TINY, "--epochs", "1000", "--speeds", "1,1,1", "--timeout", "4", "--spare", "none"]
    first, frozen, last = on_processes(3, "tests.cli.test_cli:train_until_one_freezes", argv, joined=False)
    assert frozen is None
    for said in (first, last):
        assert re.match(r"device 1 \(host \S+, cpu\) .* 4[.\d]* s", said), said
