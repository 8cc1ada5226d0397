"""The command, as a person meets it: training end to end, what it prints and writes, and what it says to bad input."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import convoy.app.train  # noqa: F401 - the nursery imports this file, so that the devices forked from it have it
from convoy import cli
from convoy.data import load
from convoy.errors import DeviceLostError, InputError
from convoy.plan.explain import LayerRow
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.strategy import Batch
from convoy.report.screen import Screen
from convoy.runlog.schema import DeviceLine
from convoy.runlog.writer import RunLog
from convoy.train.loop import History
from convoy.train.observer import EpochResult, Evaluation, StepResult
from tests.support.processes import PLACE, ROOT, on_processes

load("digits")  # imports scikit-learn, likewise

TINY = ["--net", "two-conv:4:6", "--limit", "80", "--batch", "32", "--lr", "0.05"]
"""Batches of 32, 32 and 16."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def convoy_in_process(monkeypatch: pytest.MonkeyPatch, argv: Sequence[str]) -> int:
    """The command with these arguments; its exit status."""
    monkeypatch.setattr(sys, "argv", ["convoy", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A good plan of this model for one device, made by the command itself."""
    path = tmp_path / "plan.json"
    assert convoy_in_process(monkeypatch, ["train", *TINY, "--speeds", "1", "--save-plan", str(path)]) == 0
    capsys.readouterr()
    return path


def edited(**changes: Any) -> Callable[[dict[str, Any]], str]:
    return lambda plan: json.dumps(plan | changes)


BAD_PLANS: dict[str, tuple[Callable[[dict[str, Any]], str], list[str], list[str]]] = {
    "shares do not sum": (
        edited(otherwise={"strategy": "batch", "shares": [31]}),
        [],
        ["shares (31,) sum to 31", "the axis has 32", "make them sum to 32"],
    ),
    "filters do not sum": (
        edited(layers={"0": {"strategy": "filter", "shares": [5]}}),
        [],
        ["layer '0'", "shares (5,) sum to 5", "the axis has 4"],
    ),
    "another model": (
        lambda plan: json.dumps(plan),
        ["--net", "two-conv:5:6"],
        ["another model", "make a plan for this model"],
    ),
    "another layer": (
        edited(layers={"conv9": {"strategy": "one", "device": 0}}),
        [],
        ["a layer 'conv9'", "its layers are input_1, 0, 1"],
    ),
    "more devices": (
        lambda plan: json.dumps(plan),
        ["--devices", "2"],
        ["--devices 2", "is for 1", "give --devices 1"],
    ),
    "another batch": (lambda plan: json.dumps(plan), ["--batch", "16"], ["--batch 16", "is for 32", "give --batch 32"]),
    "unknown key": (edited(colour="red"), [], ["unknown key 'colour'", "remove it"]),
    "missing key": (
        lambda plan: json.dumps({k: v for k, v in plan.items() if k != "reduce"}),
        [],
        ["'reduce' is missing"],
    ),
    "another format": (edited(format=2), [], ["has format 2", "this version reads 1"]),
    "no JSON": (lambda plan: json.dumps(plan)[:-5], [], ["cannot be read as JSON"]),
    "no such reduce": (edited(reduce="tree"), [], ["reduce", "'tree'", "ring"]),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_file_that_does_not_fit(
    case: str, plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, options, words = BAD_PLANS[case]
    plan_file.write_text(edit(json.loads(plan_file.read_text())))
    for step in ("convoy.launch.local.launch_local", "convoy.api.measure_speeds", "convoy.app.train.fit"):
        monkeypatch.setattr(step, lambda *_, **__: pytest.fail("it went on"))
    status = convoy_in_process(monkeypatch, ["train", *TINY, *options, "--plan", str(plan_file)])
    refusal = capsys.readouterr().err
    assert status == 2
    assert refusal.startswith("error: ")
    assert len(refusal.splitlines()) == 1
    for word in words:
        assert word in refusal


@pytest.fixture
def corrupt_cifar10(tmp_path: Path) -> Path:
    """Six files, one of which is not what its checksum says."""
    folder = tmp_path / "corrupt"
    folder.mkdir()
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    lines = []
    for name in names:
        (folder / name).write_bytes(name.encode())
        lines.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}")
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    (folder / "data_batch_3.bin").write_bytes(b"something else")
    return folder


TWO = ["--devices", "2"]

REFUSED: list[tuple[list[str], list[str]]] = [
    (["--plan", "dta"], ["unknown plan 'dta'", "a plan file", *PLANS]),
    (["--plan", "nowhere.json"], ["cannot read the plan nowhere.json", "give the path of a plan file"]),
    (["--net", "lenet:5"], ["unknown net 'lenet:5'", "alexnet:F", "resnet:DEPTH:WIDTH", "two-conv:K1:K2"]),
    (["--net", "two-conv:1:2:3"], ["'two-conv:1:2:3'", "two-conv:K1:K2", "1 or more"]),
    (["--data", "mnist"], ["'mnist'", "cifar10", "digits", "fashion-mnist"]),
    (
        ["--data", "cifar10", "--data-dir", "EMPTY"],
        ["cifar-10-batches-bin", "cifar-10-binary.tar.gz", "put the binary version"],
    ),
    (["--data", "cifar10", "--data-dir", "NOWHERE"], ["NOWHERE does not exist", "--data-dir"]),
    (
        ["--data", "cifar10", "--data-dir", "CORRUPT"],
        ["data_batch_3.bin has the sha256", "SHA256SUMS says", "fetch the file again"],
    ),
    (["--optimizer", "lion"], ["--optimizer 'lion'", "choose one of adam, adamw, sgd"]),
    (
        ["--reduce", "tree"],
        ["--reduce 'tree'", "give one of ", "butterfly", "inexact-butterfly-mixing", "ring", "star"],
    ),
    (["--batch", "0"], ["--batch 0", "give a whole number of 1 or more"]),
    (["--epochs", "0"], ["--epochs 0", "give a whole number of 1 or more"]),
    (["--limit", "0"], ["--limit 0", "give a whole number of 1 or more"]),
    (["--workers", "-1"], ["--workers -1", "give a whole number of 0 or more"]),
    (["--lr", "0"], ["--lr 0", "above 0"]),
    (["--lr", "nan"], ["--lr nan", "above 0"]),
    (["--lr", "inf"], ["--lr inf", "above 0"]),
    (["--momentum", "-0.5"], ["--momentum -0.5", "0 or more"]),
    (["--weight-decay", "-1"], ["--weight-decay -1", "0 or more"]),
    (["--label-smoothing", "1"], ["--label-smoothing 1", "from 0 to below 1"]),
    (["--ema", "1"], ["--ema 1", "from 0 to below 1"]),
    (["--clip-norm", "0"], ["--clip-norm 0", "above 0"]),
    (["--drop-factor", "2"], ["--drop-factor 2", "above 0, up to 1"]),
    (["--warmup-epochs", "-1"], ["--warmup-epochs -1", "0 or more"]),
    (["--schedule", "linear"], ["--schedule 'linear'", "constant, cosine, one-cycle, step"]),
    (["--accumulate", "0"], ["--accumulate 0", "1 or more"]),
    (["--accumulate", "5"], ["--accumulate 5 with --batch 32", "must be equal", "1, 2, 4, 8, 16, 32"]),
    (["--precision", "half"], ["--precision 'half'", "bf16, float32, fp16"]),
    (["--precision", "fp16"], ["--precision fp16 on a CPU", "use bf16"]),
    (["--evaluate-epochs", "0"], ["--evaluate-epochs 0", "1 or more"]),
    (["--evaluate-steps", "0"], ["--evaluate-steps 0", "1 or more"]),
    (["--seed", "-1"], ["--seed -1", "from 0 to"]),
    (["--timeout", "0"], ["--timeout 0", "above 0"]),
    (["--timeout", "inf"], ["'--timeout': 'inf'", "a time is a number with or without a unit"]),
    (["--devices", "0"], ["--devices 0", "from 1 to 1024"]),
    (["--devices", "99999999999"], ["--devices 99999999999", "from 1 to 1024"]),
    (["--devices", "cpu,,cpu"], ["'cpu,,cpu'", "commas"]),
    (["--devices", ""], ["--devices ''", "give a number"]),
    (["--devices", "gpu0"], ["'gpu0' cannot be used", "this machine has cpu"]),
    (["--page", "--log", "none"], ["--page with --log none", "leave one of them out"]),
    ([*TWO, "--slowdown", "1,1,4"], ["--slowdown 1,1,4", "each of the 2 devices", "--slowdown 1,1"]),
    ([*TWO, "--slowdown", "0.5,1"], ["--slowdown 0.5,1", "1 or more"]),
    ([*TWO, "--slowdown", "inf,1"], ["--slowdown 'inf,1'", "finite numbers"]),
    ([*TWO, "--slowdown", "1,fast"], ["--slowdown '1,fast'", "numbers with commas"]),
    ([*TWO, "--slowdown", ""], ["--slowdown ''", "numbers with commas"]),
    ([*TWO, "--speeds", "1"], ["speeds 1:", "each of the 2 devices"]),
    ([*TWO, "--speeds", "1,2,3,4,5"], ["speeds 1,2,3,4,5", "each of the 2 devices"]),
    ([*TWO, "--speeds", "0,1"], ["speeds 0,1", "one positive number"]),
    ([*TWO, "--speeds", "inf,1"], ["--speeds 'inf,1'", "finite numbers"]),
    ([*TWO, "--speeds", "quick,slow"], ["--speeds 'quick,slow'", "numbers with commas"]),
    ([*TWO, "--port", "70000"], ["--port 70000", "from 0 to 65535"]),
    ([*TWO, "--port", "-1"], ["--port -1", "from 0 to 65535"]),
    (["--save-plan", "NOWHERE/plan.json"], ["--save-plan", "NOWHERE does not exist", "make it or name another"]),
    (["--save-plan", "EMPTY"], ["--save-plan", "EMPTY is a folder", "name a file in it"]),
    (["--log", "NOWHERE/run.jsonl"], ["--log", "NOWHERE does not exist", "make it or name another"]),
    (["--save-run", "NOWHERE/run.toml"], ["--save-run", "NOWHERE does not exist", "make it or name another"]),
    ([*TWO, "--log", "NOWHERE/run.jsonl"], ["--log", "NOWHERE does not exist", "make it or name another"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: " ".join(value) if value else "")
def test_bad_input_is_told_before_anything_starts(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    corrupt_cifar10: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with the value, the rule and the remedy; status 2; nothing measured, trained, started or written."""
    for step in ("convoy.launch.local.launch_local", "convoy.api.measure_speeds", "convoy.app.train.fit"):
        monkeypatch.setattr(step, lambda *_, **__: pytest.fail("it went on"))
    (tmp_path / "EMPTY").mkdir()
    places = {"EMPTY": str(tmp_path / "EMPTY"), "NOWHERE": str(tmp_path / "NOWHERE"), "CORRUPT": str(corrupt_cifar10)}
    for place, path in places.items():
        options = [option.replace(place, path) for option in options]
    before = contents(tmp_path)
    log = [] if "--log" in options else ["--log", str(tmp_path / "run.jsonl")]
    status = convoy_in_process(monkeypatch, ["train", *TINY, *options, *log])
    output = capsys.readouterr()
    assert status == 2
    assert output.err.startswith("error: ")
    assert len(output.err.splitlines()) == 1
    assert output.out in ("", "Starting 1 device ...\n")
    for word in words:
        assert word in output.err
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["train", "--depth", "3"], "--depth"),
        (["train", "digits"], "cannot read the run file digits: No such file"),
        (["train", "--batch", "many"], "--batch"),
        (["plan9"], "'plan9'"),
    ],
)
def test_arguments_that_the_command_does_not_know(
    argv: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convoy_in_process(monkeypatch, argv) == 2
    assert word in capsys.readouterr().err


def test_an_older_log_and_plan_survive_a_job_that_is_refused(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("of another day\n")
    before = contents(tmp_path)
    for options in (
        ["--net", "two-conv:5:6", "--plan", str(plan_file)],
        ["--data", "cifar10", "--data-dir", str(tmp_path)],
    ):
        argv = ["train", *TINY, *options, "--log", str(log), "--save-plan", str(plan_file), "--speeds", "1"]
        assert convoy_in_process(monkeypatch, argv) == 2
        assert contents(tmp_path) == before


def test_a_port_in_use_is_told_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert convoy_in_process(monkeypatch, ["train", *TINY, *TWO, "--port", str(port)]) == 2
    assert f"error: cannot listen at 127.0.0.1 port {port}" in capsys.readouterr().err


def test_the_status_of_a_failed_demo_is_that_of_its_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it runs is a command that a person can repeat."""
    started: list[Sequence[str]] = []

    def fail(argv: Sequence[str], devices: Sequence[str], **_: object) -> int:
        started.append(list(argv))
        assert devices == ("cpu",) * 4
        return 2

    monkeypatch.setattr("convoy.launch.local.launch_local", fail)
    assert convoy_in_process(monkeypatch, ["demo", "--epochs", "1"]) == 2
    assert capsys.readouterr().out.startswith("$ convoy " + " ".join(started[0]))
    assert started[0][:3] == ["train", "--data", "digits"]
    assert {"--compare", "--page"} <= set(started[0])
    monkeypatch.setattr("convoy.launch.local.launch_local", lambda *_, **__: 0)
    assert convoy_in_process(monkeypatch, ["demo"]) == 0
    assert convoy_in_process(monkeypatch, ["demo", "--plan", "fastest"]) == 2


# ---------------------------------------------------------------------------------------------- which devices are meant


@pytest.mark.parametrize(
    ("gpus", "apple", "given", "expected"),
    [
        # The command alone takes every GPU; where there is none, the CPU, in this process.
        (0, False, None, ["alone"]),
        (1, False, None, ["alone"]),
        (3, False, None, ["cuda:0", "cuda:1", "cuda:2"]),
        (0, True, None, ["alone"]),
        (0, False, "all", ["alone"]),
        (1, False, "all", ["cuda:0", "cpu"]),
        (2, False, "all", ["cuda:0", "cuda:1", "cpu"]),
        (0, True, "all", ["mps:0", "cpu"]),
        (2, False, "1", ["alone"]),
        (2, False, "3", ["cpu", "cpu", "cpu"]),
        (2, False, "cpu,cuda:1", ["cpu", "cuda:1"]),
    ],
)
def test_the_devices_of_this_machine(
    gpus: int, apple: bool, given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    kind = "cuda" if gpus else "mps" if apple else None
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: kind and torch.device(kind))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus or int(apple))
    monkeypatch.setattr("convoy.launch.local.launch_local", lambda _, devices, **__: started.extend(devices) or 0)
    monkeypatch.setattr("convoy.app.train.run_device", lambda _: started.append("alone"))
    assert convoy_in_process(monkeypatch, ["train", *TINY, *(["--devices", given] if given else [])]) == 0
    assert started == expected


def test_a_device_named_by_the_environment_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setenv("CONVOY_DEVICE", "cpu")
    monkeypatch.setattr("convoy.comm.accelerator.local_devices", lambda: ("cuda:0", "cuda:1", "cpu"))
    monkeypatch.setattr("convoy.app.train.run_device", lambda _: started.append("alone"))
    assert convoy_in_process(monkeypatch, ["train", *TINY]) == 0
    assert started == ["alone"]


# ------------------------------------------------------------------------------- every plan, on one device and on three


def train_all(device: int, runs: list[list[str]]) -> list[str]:  # noqa: ARG001
    """On processes: what each of these trainings prints here."""
    texts = []
    for argv in runs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            cli.app(args=["train", *argv], standalone_mode=False)
        texts.append(printed.getvalue())
    return texts


def results(text: str) -> list[tuple[float, str]]:
    """(loss, accuracy) of every epoch, as printed."""
    return [(float(loss), right) for loss, right in re.findall(r"loss ([\d.]+), test accuracy ([\d.]+%)", text)]


def assert_close(found: list[tuple[float, str]], expected: list[tuple[float, str]]) -> None:
    assert [right for _, right in found] == [right for _, right in expected]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=1.5e-4), "the last digit"


def test_every_plan_prints_the_results_of_one_device(tmp_path: Path) -> None:
    """Also a plan that was saved, with another way of summing; and the inexact mode, which does not and says so."""
    base = [*TINY, "--epochs", "2"]
    fast = ["--speeds", "4,2,1"]
    file, log = tmp_path / "plan.json", tmp_path / "run.jsonl"
    runs = [[*base, *fast, "--plan", plan] for plan in PLANS]
    runs[list(PLANS).index("hybrid")] += ["--save-plan", str(file), "--log", str(log), "--explain"]
    again = [*base, *fast, "--plan", str(file)]
    mixing = [*base, *fast, "--plan", "data", "--reduce", "inexact-butterfly-mixing"]
    runs += [again, [*again, "--reduce", "star"], mixing]
    on_three = on_processes(3, "tests.app.test_cli:train_all", runs, joined=False, limit_s=100)
    ((one,),) = on_processes(1, "tests.app.test_cli:train_all", [[*base, "--speeds", "1"]], joined=False)
    expected = results(one)
    assert len(expected) == 2
    assert on_three[1] == on_three[2] == [""] * len(runs), "only device 0 prints"
    texts = dict(zip([*PLANS, "file", "file, star", "mixing"], on_three[0], strict=True))
    for name, text in texts.items():
        if name != "mixing":
            assert_close(results(text), expected)
            assert "INEXACT" not in text
    assert "Plan data-by-speed: batch 32, sums by ring" in texts["data-by-speed"]
    shares = re.search(r"│ 0 +│ conv +│ batch +│ +(\d+) │ +(\d+) │ +(\d+) │", texts["data-by-speed"])
    assert shares is not None
    assert shares.groups() == ("18", "9", "5"), "32 in shares of 4 : 2 : 1"
    assert "speeds given by --speeds" in texts["data"]
    check_mixing(texts["mixing"], expected)
    check_saved(texts, file)
    check_log(log, results(texts["hybrid"]))


def check_mixing(text: str, expected: list[tuple[float, str]]) -> None:
    assert "sums by inexact-butterfly-mixing" in text
    assert "INEXACT: butterfly mixing does not follow the trajectory of one device." in text
    assert results(text) != expected


def check_saved(texts: dict[str, str], file: Path) -> None:
    """The plan in the file is the one that ran, so everything about it is printed again but the step list."""
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
    """Every line is JSON; a step each with its loss, an epoch each with its results, a device each with its times."""
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
    """On processes: device 1 was started with other options; what each says."""
    try:
        cli.app(args=["train", *argv, *(stranger if device == 1 else [])], standalone_mode=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        (["--net", "two-conv:5:6"], "--net is two-conv:4:6 on device 0, but two-conv:5:6 on device 1"),
        (["--plan", "model"], "--plan is data-by-speed on device 0, but model on device 1"),
        (["--lr", "0.5"], "--lr is 0.05 on device 0, but 0.5 on device 1"),
        (["--weight-decay", "1"], "--weight-decay is 0.0 on device 0, but 1.0 on device 1"),
    ],
)
def test_devices_with_other_options_are_named(stranger: list[str], words: str) -> None:
    """A learning rate of its own would let the copies of the weights drift apart without a sign."""
    for said in on_processes(3, "tests.app.test_cli:train_differently", TINY, stranger, joined=False):
        assert said.startswith("MismatchError: ")
        assert words in said
        assert "start every device with the same options" in said


# ------------------------------------------------------------------------------------------ the screen and the log


def history(loss: float, samples_per_s: float = 1234567.8) -> History:
    return History([loss] * 3, [EpochResult(0, loss, 0.5, 1e6 / samples_per_s, samples_per_s, 0.01)])


FOUR = [("cpu (1 thread)", "attic", slowdown) for slowdown in (6.0, 4.0, 16.0, 8.0)]


def uses(compute_s: float, exchange_s: float) -> list[DeviceLine]:
    return [
        DeviceLine(device=device, slowdown=slowdown, speed_share=0.25, work_share=0.25, compute_s=compute_s,
                   exchange_s=exchange_s, sent_bytes=0)
        for device, (_, _, slowdown) in enumerate(FOUR)
    ]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_printed_as_they_are_and_nothing_is_cut_off(terminal: bool) -> None:
    """A bracket in a plan's name is no markup; the widest numbers fit into 80 columns."""
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.console._force_terminal = terminal
    if terminal:
        screen.console.width = 80
    name = "[b]mine[/] :cat: [/]"
    with screen.progress(name, 2, 100) as bar:
        bar.on_step(StepResult(0, 0, 2.5, 50, 0.01))
        bar.on_evaluation(Evaluation(0, 1, 0.25, ends_epoch=False, is_best=True))
        bar.on_epoch(EpochResult(0, 2.5, 0.5, 1.0, 50.0, 0.01))
        bar.on_epoch(EpochResult(1, 2.5, None, 1.0, 50.0, 0.01))
    screen.plan(
        Plan(name, "x", 2, 4, {}, Batch((2, 2))),
        [LayerRow("0", "conv", "batch", ("2", "2"), 5, "[/] note")],
        (0.5, 0.5),
    )
    screen.comparison(history(2.5), history(2.5), FOUR[:1], uses(1, 1)[:1])
    screen.comparison(
        history(2.5), history(0.5), FOUR, uses(1, 1), inexact="wire inexact-bf16 rounds", precision="bf16"
    )
    text = file.getvalue()
    assert text.count(name) >= 2
    assert "* 0: [/] note" in text
    assert "…" not in text
    assert "1,234,568" in text
    assert "at most 0 apart (rounding of float32" in text
    assert "at most 2 apart (INEXACT: wire inexact-bf16 rounds)" in text
    assert "step 1: test accuracy 25.00%, the best so far" in text
    assert "epoch 2/2: loss 2.5000, 50 samples/s" in text, "not tested"


@pytest.mark.parametrize(("devices", "together", "loss", "inexact", "says"), [
    # Solo speeds of 4/6, 1, 1/4 and 1/2 of the fastest: 2.4 times as fast is the possible.
    (FOUR, 2000.0, 1.0, "", "4 devices trained 2.0 times as fast as the fastest of them alone: 83% of the 2.4 that their "
     "speeds add up to, with the same losses (to 0)."),
    (FOUR[:2], 1500.0, 1.00002, "", "2 devices trained 1.5 times as fast as the fastest of them alone: 90% of the 1.7 that "
     "their speeds add up to, with the same losses (to 2e-05)."),
    (FOUR[:2], 1500.0, 1.0, "rounds", "90% of the 1.7 that their speeds add up to."),
    # What one alone would reach there is not known.
    ([*FOUR[:2], ("cpu (1 thread)", "cellar", 1.0)], 1500.0, 1.0, "",
     "3 devices trained 1.5 times as fast as one CPU alone, with the same losses (to 0)."),
    ([("cuda:0", "attic", 1.0)] * 2, 1500.0, 1.0, "", "2 devices trained 1.5 times as fast as one CPU alone, with"),
])  # fmt: skip
def test_a_comparison_ends_with_how_many_times_faster(
    devices: list[tuple[str, str, float]], together: float, loss: float, inexact: str, says: str
) -> None:
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.comparison(history(loss, together), history(1.0, 1000.0), devices, uses(9, 1), inexact=inexact)
    last = file.getvalue().splitlines()[-1]
    assert says in last
    assert last.endswith(".")


@pytest.mark.parametrize(("compute_s", "exchange_s", "why"), [
    (1.0, 2.5, "the devices wait for each other longer than they compute (10.0 s beside 4.0 s"),
    (2.5, 1.0, f"the 4 processes share {os.cpu_count()} cores"),
])  # fmt: skip
def test_a_fleet_that_one_device_beats_is_told_so_and_why(compute_s: float, exchange_s: float, why: str) -> None:
    file = io.StringIO()
    screen = Screen(visible=True)
    screen.console.file = file
    screen.comparison(history(1.0, 900.0), history(1.0, 1000.0), FOUR, uses(compute_s, exchange_s))
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("One device alone was faster here: ")
    assert why in last
    assert "times as fast" not in last


def test_an_invisible_screen_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(visible=False)
    with screen.working("something"), screen.progress("something", 1, 10) as bar:
        bar.on_step(StepResult(0, 0, 1.0, 10, 0.01))
    screen.lines(["one", "two"])
    assert capsys.readouterr() == ("", "")


def test_a_training_that_diverges_still_writes_json(tmp_path: Path) -> None:
    """NaN is no JSON: most readers refuse a line that holds one."""
    with RunLog(tmp_path / "log") as log:
        log.on_step(StepResult(0, 0, float("nan"), 5, 0.5))
        log.on_evaluation(Evaluation(0, 1, 0.1, ends_epoch=True, is_best=True))
        log.on_epoch(EpochResult(0, float("inf"), 0.1, 1.0, 5.0, 0.5))
        log.run({"times": [1.0, float("nan")]}, images=5)
    lines = (tmp_path / "log").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert rows[0].pop("s") >= 0
    run = rows.pop()
    assert rows == [
        {"what": "step", "step": 0, "epoch": 0, "loss": None, "samples": 5, "lr": 0.5},
        {"what": "evaluation", "step": 1, "epoch": 0, "accuracy": 0.1, "best": True},
        {"what": "epoch", "epoch": 0, "loss": None, "accuracy": 0.1, "train_s": 1.0, "samples_per_s": 5.0, "lr": 0.5},
    ]
    assert run["options"] == {"times": [1.0, None]}


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the log .*: No such file or directory; give a path"):
        RunLog(tmp_path / "nowhere" / "log")


# ------------------------------------------------------------------------------------------------- the real command


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "convoy", "train", *TINY, *argv]


QUIET = {
    **{k: v for k, v in os.environ.items() if k not in (*PLACE, "COLUMNS")},
    "PYTHONWARNINGS": "error",
    "PYTHONPATH": str(ROOT),
}


def test_a_training_as_a_person_starts_it(tmp_path: Path) -> None:
    """Measured speeds, one device beside it, worker processes; every warning would be an error; plain lines in a pipe."""
    log = tmp_path / "run.jsonl"
    options = [
        "--devices",
        "3",
        "--slowdown",
        "1,1,2",
        "--plan",
        "master",
        "--compare",
        "--page",
        "--workers",
        "1",
        "--log",
        str(log),
    ]
    done = subprocess.run(command(*options), cwd=tmp_path, env=QUIET, capture_output=True, text=True, timeout=100)
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
    assert re.search(r"3 devices trained .* times as fast as the fastest|One device alone was faster here", text)
    assert text.endswith(f"A page of this run: {log.with_suffix('.html')}\n")
    assert text.count("2x") == 2, "the slow-down, in the fleet and at the end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]


def test_bad_input_to_the_real_command(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    done = subprocess.run(
        command("--devices", "3", "--batch", "0"), cwd=tmp_path, env=QUIET, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: --batch 0: give a whole number of 1 or more\n",
    )
    assert time.monotonic() - begin_s < 60


@contextlib.contextmanager
def endless_training(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[int, psutil.Process]]]:
    """Three devices in mid-training, by number; whatever happens, nothing of it stays."""
    log = folder / "run.jsonl"
    argv = command("--devices", "3", "--speeds", "1,1,1", "--epochs", "1000000", "--log", str(log), "--spare", "none")
    launcher = subprocess.Popen(
        argv, cwd=folder, env=QUIET, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline_s = time.monotonic() + 90
        while not (log.exists() and '"step"' in log.read_text()):
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline_s, "the training did not start"
            time.sleep(0.1)
        children = psutil.Process(launcher.pid).children()
        devices = {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}
        assert sorted(devices) == [0, 1, 2]
        yield launcher, devices
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def test_a_device_that_is_killed_in_mid_training_is_named(tmp_path: Path) -> None:
    with endless_training(tmp_path) as (launcher, devices):
        devices[2].kill()
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 2
        _, alive = psutil.wait_procs(devices.values(), timeout=10)
        assert not alive
    assert re.search(r"^error: device 2 \(cpu\) was killed by SIGKILL", errors, re.M)
    assert "Traceback" not in errors
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines[-1]["what"] in ("step", "epoch", "evaluation", "system"), "what was done is kept, in whole lines"


def train_until_one_freezes(device: int, argv: list[str]) -> str:
    """On processes: device 1 stops in its third step; what the others say."""
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
    first, frozen, last = on_processes(3, "tests.app.test_cli:train_until_one_freezes", argv, joined=False)
    assert frozen is None
    for said in (first, last):
        assert re.match(r"device 1 \(host \S+, cpu\) .* 4 s", said), said
