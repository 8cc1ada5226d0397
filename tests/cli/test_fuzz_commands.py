"""Thousands of odd options and words: each command does what it says, or refuses in one bounded message. No traceback, no hang.

The slow tests have the thousands, the fast ones a sample of the same.
"""

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from convoy import cli
from convoy.config.settings import FIELDS, key_of, kind_of
from convoy.data import load
from convoy.launch.survey import read_answer
from tests.support.good_files import (
    ANSWER,
    CLASSES,
    FLEET,
    MOST_CHARACTERS,
    NET,
    bounded_time,
    make_log,
    make_measurement,
    make_plan,
    written,
)
from tests.support.mutations import (
    TEXTS,
    changed_value,
    odd_value,
)
from tests.support.processes import PLACE
from tests.support.slow import most_slow

# ----------------------------------------------------------------------------------------------------------------- options

OPTIONS = [name for name in FIELDS if name not in ("port", "compare", "explain", "page", "save_run", "save_plan")]
"""All but those that only write more, or listen."""

GOOD: dict[str, list[str]] = {
    "data": ["digits"], "net": [NET, "resnet:8:4"], "plan": ["data", "master", "auto"], "devices": ["1", "2", "cpu", "cpu,cpu"],
    "slowdown": ["1,2", "1"], "speeds": ["1,2", "1"], "limit": ["80"], "batch": ["16", "32"], "accumulate": ["2"],
    "augment": ["crop,flip", "cutout:3"], "schedule": ["cosine", "step"], "ema": ["0.9"], "lr": ["0.1"], "epochs": ["2"],
}  # fmt: skip


def drawn_options(random: Random) -> list[str]:
    """A few options with values, most of which somebody could mean."""
    argv = ["--limit", "80", "--batch", "16"]
    for name in random.sample(OPTIONS, random.choice([1, 1, 2, 3, 5])):
        if kind_of(name) is bool:
            argv.append(random.choice([f"--{key_of(name)}", f"--no-{key_of(name)}"]))
            continue
        odd = odd_value(random)
        text = random.choice([str(odd), random.choice(TEXTS), ",".join(["1"] * random.choice([1, 2, 2000]))])
        if name in GOOD and random.random() < 0.5:
            text = random.choice(GOOD[name])
        argv += [f"--{key_of(name)}", text]
    if random.random() < 0.05:
        argv.append(random.choice(["--", "extra", "--nosuch", "-x", "x" * 300_000]))
    return argv


def fuzz_options(seeds: range, command: Callable[[list[str]], int]) -> int:
    """Up to where the devices would be measured; how many command lines were refused."""
    refused = 0
    for seed in seeds:
        argv = drawn_options(Random(f"options {seed}"))
        try:
            refused += command(["train", *argv]) == 2
        except BaseException as error:
            error.add_note(f"options, seed {seed}: {str(argv)[:2000]}")
            raise
    return refused


def test_a_sample_of_options(command: Callable[[list[str]], int]) -> None:
    assert fuzz_options(range(40), command) > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_options(command: Callable[[list[str]], int]) -> None:
    assert fuzz_options(range(1000, 3000), command) > 500


# -------------------------------------------------------------------------------------------------------- the other verbs

VERBS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "predict": (
        [NET, "--image", "1,8,8", "--classes", "10", "--batch", "16", "--on", "rtx3060,laptop-cpu"],
        {
            "--on": ["rtx3060+rtx3060,laptop-cpu", "3xraspberry-pi-5", "RTX 3060", "64xrtx3060", "rtx3060,,", "0xrtx3060", "x"],
            "--fleet": ["FLEET", "CLASSES"], "--batch": ["1", "64"], "--image": ["3,8,8"], "--classes": ["1", "10"],
            "--link": ["1Gbit", "110 MB/s", "1 gb/s"], "--latency": ["100us", "1 h", "-1 ms"], "--optimizer": ["adam"],
        },
    ),
    "plan": (
        [NET, "--fleet", "FLEET", "--image", "1,8,8", "--batch", "16"],
        {
            "--fleet": ["CLASSES", "MEASURED"], "--batch": ["1", "7"], "--image": ["1,8,8"], "--classes": ["10"],
            "--output": ["OUT"], "--optimizer": ["sgd"], "--least-energy": ["1", "1e-9"], "--wire": ["bf16"],
        },
    ),
    "simulate": (
        ["--output", "OUT", "--net", NET, "--fleet", "FLEET", "--image", "1,8,8", "--batch", "16", "--no-figures"],
        {
            "--output": ["FLEET"], "--net": [NET, "resnet:8:4"], "--fleet": ["CLASSES", "MEASURED"],
            "--plan": ["PLAN", "model"], "--batch": ["32"], "--image": ["1,8,8"], "--classes": ["10"],
        },
    ),
    "report": (["LOG"], {"--output": ["OUT", "FLEET"]}),
    "fleet setup": (
        ["--fleet", "ADDRESSES"],
        {
            "--fleet": ["CLASSES", "FLEET"], "--into": ["convoy", "/srv/lab"], "--data": ["PLAN", "FOLDER"],
            "--requirements": ["NAMES"], "--wheels": ["FOLDER"], "--index": ["none"], "--print": [], "--doctor": [],
        },
    ),
    "measure": (
        ["-o", "OUT", "--net", NET, "--data", "digits"],
        {
            "-o": ["FLEET"], "--fleet": ["CLASSES", "FLEET"], "--net": [NET], "--devices": ["2", "cpu"], "--batch": ["16"],
            "--slowdown": ["1,2"], "--precision": ["bf16"], "--budget": ["1", "0"], "--timeout": ["5"],
            "--port": ["29500", "0"],
        },
    ),
    "run": (
        ["SCRIPT", "--lr", "0.1"],
        {
            "--fleet": ["ADDRESSES", "CLASSES"], "--devices": ["auto", "all", "2", "cpu,cpu"], "--image": ["lab/convoy:1"],
            "--print": ["shell", "slurm", "kubernetes"], "--port": ["29500", "0", "65536"], "--module": ["pydoc"],
        },
    ),
    "fleet show": (["CLASSES"], {}),
    "fleet init": ([".", "ann@attic", "-o", "OUT"], {"-o": ["FLEET"], "--force": []}),
}  # fmt: skip
"""What people would write: the words of a good command, and options of which some are put before them."""


def drawn_words(verb: str, random: Random) -> list[str]:
    """A command of which most could be meant."""
    words, options = VERBS[verb]
    words = list(words)
    if random.random() < 0.2:
        place = random.randrange(len(words))
        words[place] = str(changed_value(words[place], random))
    front: list[str] = []
    for name in random.sample(sorted(options), random.randint(0, min(3, len(options)))):
        if not options[name]:
            front.append(name)
            continue
        good = random.choice(options[name])
        front += [name, random.choice([good, good, str(changed_value(good, random)), str(odd_value(random))])]
    # What follows a script is the script's own, and an option that is given twice counts as it is given last.
    return [*verb.split(), *(front + words if verb == "run" else words + front)]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], int]:
    """The command in this process, up to where it would start another one; its exit status."""
    load("digits")
    for name in (*PLACE, "CONVOY_DEVICE", "CONVOY_FLEET"):
        monkeypatch.delenv(name, raising=False)
    for target in ("convoy.launch.local.launch_local", "convoy.launch.fleet_command.run_on_fleet"):
        monkeypatch.setattr(target, lambda *_, **__: 0)
    for target in ("convoy.cli.job.make_plans", "convoy.cli.measure.measure_job", "os.execv", "os.execve"):
        monkeypatch.setattr(target, begins)
    monkeypatch.setattr("convoy.setup.setup._run", lambda scripts, *_: {host.name: (0, ()) for host in scripts})
    monkeypatch.setattr("convoy.setup.setup.requirements_here", lambda _: ["numpy==2.4.6"])
    monkeypatch.setattr("convoy.doctor.doctor.run_doctor", lambda *_: 0)
    monkeypatch.setattr("convoy.launch.survey.ask", lambda hosts: [read_answer(ANSWER)] * len(hosts))
    monkeypatch.chdir(tmp_path)

    def run(argv: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["convoy", *argv])
        with bounded_time(), pytest.raises((SystemExit, Begins)) as ended:
            cli.main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        status = int(ended.value.code or 0) if isinstance(ended.value, SystemExit) else 0
        if status:
            assert status == 2
            assert output.err.startswith("error: ")
            assert len(output.err) < MOST_CHARACTERS
            assert max(map(len, output.err.split("\n"))) < 2000
        return status

    return run


class Begins(BaseException):
    """The training would begin."""


def begins(*_: object, **__: object) -> None:
    raise Begins


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The good files that commands name."""
    folder = tmp_path_factory.mktemp("good")
    files = {"FLEET": written(folder / "described.toml", FLEET), "CLASSES": written(folder / "classes.toml", CLASSES)}
    addresses = CLASSES.replace('name = "shelf"', 'name = "shelf"\naddress = "192.168.1.21"', 1)
    files |= {"ADDRESSES": written(folder / "addresses.toml", addresses), "MEASURED": make_measurement(folder)}
    files |= {"PLAN": make_plan(folder), "LOG": make_log(folder), "SCRIPT": written(folder / "script.py", "print(1)")}
    files |= {"NAMES": written(folder / "names.txt", "torch\nrich")}
    return files


def places(good: dict[str, Path], folder: Path) -> dict[str, str]:
    """The good files, copied anew: a command may have written over them."""
    copies = {name: str(shutil.copyfile(path, folder / path.name)) for name, path in good.items()}
    return copies | {"FOLDER": str(folder), "OUT": str(folder / "out")}


Command = Callable[[list[str]], int]


def fuzz_verbs(verb: str, good: dict[str, Path], folder: Path, seeds: range, command: Command) -> int:
    """How many commands were refused."""
    refused = 0
    for seed in seeds:
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "out").unlink(missing_ok=True)
        named = places(good, folder)
        argv = [named.get(word, word) for word in drawn_words(verb, Random(f"{verb} {seed}"))]
        try:
            refused += command(argv) == 2
        except BaseException as error:
            error.add_note(f"{verb}, seed {seed}: {str(argv)[:2000]}")
            raise
    return refused


@pytest.mark.parametrize("verb", VERBS)
def test_a_sample_of_commands(verb: str, good: dict[str, Path], tmp_path: Path, command: Command) -> None:
    named = places(good, tmp_path)
    assert command([named.get(word, word) for word in [*verb.split(), *VERBS[verb][0]]]) == 0
    assert fuzz_verbs(verb, good, tmp_path, range(6), command) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", VERBS)
def test_hundreds_of_commands(verb: str, good: dict[str, Path], tmp_path: Path, command: Command) -> None:
    assert fuzz_verbs(verb, good, tmp_path, range(1000, 1300), command) > 25


def odd_places(folder: Path) -> dict[str, Path]:
    """What may be met where a file or a folder is named."""
    folder.mkdir()
    made = {
        name: folder / name.replace(" ", "-")
        for name in ("a folder", "a pipe", "a socket", "a circle", "nowhere", "a hole")
    }
    made["a folder"].mkdir()
    os.mkfifo(made["a pipe"])
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(made["a socket"]))
    made["a circle"].symlink_to("a-circle")
    made["nowhere"].symlink_to("not/there")
    with made["a hole"].open("wb") as file:
        file.truncate(1 << 40)
    texts = {"nothing": b"", "no text": b"\xff\xfe\x00", "another code": "é = 1".encode("utf-16"), "zeros": bytes(9)}
    texts |= {
        "a list": b"[]",
        "a number": b"7",
        "null": b"null",
        "a picture": b"\x89PNG\r\n\x1a\n",
        "a log": b"{}\n" * 9,
    }
    for name, content in texts.items():
        made[name] = folder / name.replace(" ", "-")
        made[name].write_bytes(content)
    return made | {
        "zeros for ever": Path("/dev/zero"), "full": Path("/dev/full"), "of the system": Path("/proc/self/mem"),
        "behind a file": made["nothing"] / "x", "read-only": Path("/proc/convoy"), "a long name": folder / ("x" * 300),
    }  # fmt: skip


TRAIN = ["train", "--data", "digits", "--net", NET, "--limit", "80", "--batch", "16", "--speeds", "1"]

PLACES: list[Any] = [
    ["plan", NET, "--fleet", "HERE"],
    pytest.param(["plan", NET, "--fleet", "FLEET", "-o", "HERE", "--image", "1,8,8"], marks=pytest.mark.slow, id="plan -o"),
    ["simulate", "-o", "HERE", "--fleet", "FLEET", "--net", NET, "--image", "1,8,8", "--no-figures"],
    ["simulate", "-o", "OUT", "--fleet", "FLEET", "--net", NET, "--image", "1,8,8", "--no-figures", "--plan", "HERE"],
    ["predict", NET, "--fleet", "HERE"], ["fleet", "show", "HERE"], ["fleet", "init", ".", "-o", "HERE", "--force"],
    ["report", "HERE"], ["report", "LOG", "-o", "HERE"], ["measure", "-o", "HERE"], ["measure", "-o", "OUT", "--fleet", "HERE"],
    ["run", "HERE"], ["run", "--fleet", "HERE", "SCRIPT"], ["emulate", "HERE", "--", "true"], ["train", "HERE"],
    [*TRAIN, "--plan", "HERE"], [*TRAIN, "--log", "HERE"], [*TRAIN, "--save-run", "HERE"], [*TRAIN, "--save-plan", "HERE"],
    [*TRAIN, "--checkpoint", "HERE"], [*TRAIN, "--checkpoint", "HERE", "--resume"], [*TRAIN, "--tensorboard", "HERE"],
    ["train", "--data", "folder:HERE"], ["train", "--data", "cifar10", "--data-dir", "HERE"],
    ["train", "--fleet", "HERE", "--data", "digits", "--net", NET], ["fleet", "setup", "--fleet", "HERE"],
    *(
        pytest.param(["fleet", "setup", "--fleet", "ADDRESSES", option, "HERE"], marks=pytest.mark.slow, id=f"setup {option}")
        for option in ("--requirements", "--wheels")
    ),
]  # fmt: skip


MOST_TELLING = ["a folder", "a pipe", "nowhere", "a hole", "no text", "a number", "zeros for ever", "behind a file"]
"""What may hang or fill the memory, and one of each other kind; the slow tests have all."""


@pytest.mark.parametrize("names", most_slow(1, [MOST_TELLING, []]), ids=["telling", "all"])
@pytest.mark.parametrize("words", PLACES, ids=lambda words: " ".join(w for w in words if w not in TRAIN[1:]))
def test_anything_may_lie_where_a_file_is_named(
    words: list[str], names: list[str], good: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    """Nothing waits for a pipe, reads a device for ever, or fills the memory."""
    named, statuses = places(good, tmp_path), {}
    odd = odd_places(tmp_path / "odd")
    for name, path in ((name, odd[name]) for name in names or odd):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            statuses[name] = command([named.get(word, word.replace("HERE", str(path))) for word in words])
        except BaseException as error:
            error.add_note(f"{name}: {path}")
            raise
    assert 2 in statuses.values()
