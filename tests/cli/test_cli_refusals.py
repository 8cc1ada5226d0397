"""Bad input to the command is refused, and devices are chosen, before anything starts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.config import checks
from convoy.model.nets.builtin import NETS
from convoy.plan.presets import PLANS
from tests.support.commands import TINY, convoy_in_process

# -------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a valid plan of this model for one device, made by the command."""
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
    "another model": (
        lambda plan: json.dumps(plan),
        ["--net", "two-conv:5:6"],
        ["another model", "make a plan for this model"],
    ),
    "more devices": (
        lambda plan: json.dumps(plan),
        ["--devices", "2"],
        ["--devices 2", "is for 1", "give --devices 1"],
    ),
    "another batch": (lambda plan: json.dumps(plan), ["--batch", "16"], ["--batch 16", "is for 32", "give --batch 32"]),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_plan_file_that_does_not_fit_is_refused(
    case: str, plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, options, words = BAD_PLANS[case]
    plan_file.write_text(edit(json.loads(plan_file.read_text())))
    for step in (
        "convoy.launch.local.launch_local",
        "convoy.measure.planning.measure_speeds",
        "convoy.cli.train_session.fit",
    ):
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
    """Write only the last of CIFAR-10's binary files."""
    folder = tmp_path / "corrupt"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes(30_730_000))
    return folder


TWO = ["--devices", "2"]

REFUSED: list[tuple[list[str], list[str]]] = [
    (["--plan", "dta"], ["unknown plan 'dta'", "a plan file", *PLANS]),
    (["--plan", "nowhere.json"], ["cannot read the plan nowhere.json", "give the path of a plan file"]),
    (["--net", "resnet50"], ["unknown net 'resnet50'", "two-conv, alexnet", "torchvision:resnet50", "MODULE:FUNCTION"]),
    ([*TWO, "--net", "nowhere.nets:build"], ["--net nowhere.nets:build", "no module 'nowhere'", "installed"]),
    ([*TWO, "--data", "folder:NOWHERE"], ["--data", "NOWHERE is no folder"]),
    ([*TWO, "--data", "nowhere:pictures"], ["--data nowhere:pictures", "no module 'nowhere'"]),
    (["--net", "two-conv:1:2:3"], ["'two-conv:1:2:3'", "two-conv:K1:K2", "1 or more"]),
    (["--net", "unet:4"], ["--net unet:4 gives a class for every pixel", "in Python, with convoy.loss"]),
    (["--data", "mnist"], ["'mnist'", "cifar10", "digits", "fashion-mnist"]),
    (
        ["--data", "cifar10", "--data-dir", "EMPTY"],
        ["EMPTY holds no cifar-10-batches-bin", "unpack https://", "leave --data-dir out to download"],
    ),
    (["--data", "cifar10", "--data-dir", "NOWHERE"], ["NOWHERE is no folder", "--data-dir"]),
    (["--data", "cifar10", "--data-dir", "CORRUPT"], ["data_batch_1.bin cannot be read", "add it"]),
    (["--optimizer", "lion"], ["--optimizer 'lion'", "choose one of adam, adamw, sgd"]),
    (["--reduce", "tree"], ["--reduce 'tree'", "butterfly", "ring", "star"]),
    (["--batch", "0"], ["--batch 0: input should be greater than or equal to 1"]),
    (["--lr", "inf"], ["--lr inf: input should be a finite number"]),
    (["--checkpoint-steps", "5"], ["--checkpoint-steps without --checkpoint: name the folder"]),
    (["--resume"], ["--resume without --checkpoint: name the folder"]),
    (["--plan", "auto", "--speeds", "1"], ["--speeds with --plan auto"]),
    (["--accumulate", "5"], ["--accumulate 5 with --batch 32", "must be equal", "1, 2, 4, 8, 16, 32"]),
    (["--precision", "fp16"], ["precision fp16, but device 0 is a CPU", "use bf16"]),
    (["--timeout", "inf"], ["'--timeout': 'inf'", "a time is a number with or without a unit"]),
    (["--devices", "0"], ["--devices 0", "from 1 to 1024"]),
    (["--devices", "cpu,,cpu"], ["'cpu,,cpu'", "commas"]),
    (["--devices", ""], ["--devices ''", "give a number"]),
    (["--devices", "gpu0"], ["'gpu0' cannot be used", "this machine has cpu"]),
    (["--page", "--log", "none"], ["--page with --log none", "leave one of them out"]),
    ([*TWO, "--slowdown", "1,1,4"], ["--slowdown 1,1,4", "each of the 2 devices", "--slowdown 1,1"]),
    ([*TWO, "--slowdown", "0.5,1"], ["--slowdown 0.5,1", "from 1 to 10000"]),
    ([*TWO, "--slowdown", "inf,1"], ["--slowdown 'inf,1'", "a finite number"]),
    ([*TWO, "--speeds", "1"], ["speeds 1:", "each of the 2 devices"]),
    ([*TWO, "--speeds", "0,1"], ["speeds 0,1", "one positive number"]),
    (["--save-plan", "NOWHERE/plan.json"], ["--save-plan", "NOWHERE does not exist", "make it or name another"]),
    (["--save-plan", "EMPTY"], ["--save-plan", "EMPTY is a folder", "name a file in it"]),
    ([*TWO, "--log", "NOWHERE/run.jsonl"], ["--log", "NOWHERE does not exist", "make it or name another"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: " ".join(value) if value else "")
def test_bad_input_is_refused_before_anything_starts(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    corrupt_cifar10: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Expect one line with value, rule and remedy, status 2, and no other effect."""
    for step in (
        "convoy.launch.local.launch_local",
        "convoy.measure.planning.measure_speeds",
        "convoy.cli.train_session.fit",
    ):
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
def test_unknown_arguments_are_refused(
    argv: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convoy_in_process(monkeypatch, argv) == 2
    assert word in capsys.readouterr().err


def test_refused_job_keeps_older_log_and_plan(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_failed_demo_returns_the_status_of_its_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It also prints a command that a user can repeat."""
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
def test_local_devices_are_listed(
    gpus: int, apple: bool, given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    kind = "cuda" if gpus else "mps" if apple else None
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: kind and torch.device(kind))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus or int(apple))
    monkeypatch.setattr("convoy.launch.local.launch_local", lambda _, devices, **__: started.extend(devices) or 0)
    monkeypatch.setattr("convoy.cli.train_job.run_device", lambda _: started.append("alone"))
    assert convoy_in_process(monkeypatch, ["train", *TINY, *(["--devices", given] if given else [])]) == 0
    assert started == expected


def test_environment_selects_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setenv("CONVOY_DEVICE", "cpu")
    monkeypatch.setattr("convoy.machine.accelerator.local_devices", lambda: ("cuda:0", "cuda:1", "cpu"))
    monkeypatch.setattr("convoy.cli.train_job.run_device", lambda _: started.append("alone"))
    assert convoy_in_process(monkeypatch, ["train", *TINY]) == 0
    assert started == ["alone"]


def test_net_names_need_no_torch() -> None:
    assert tuple(NETS) == checks.NETS
