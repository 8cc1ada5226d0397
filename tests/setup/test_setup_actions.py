"""What is to be done on a host, from what it has: values in, values out."""

from dataclasses import replace
from typing import Any

import pytest

from convoy.errors import InputError
from convoy.setup.actions import Command, Own, Remove, Send, actions, requirements, shell_lines
from convoy.setup.state import Found, Gpu, Interpreter, Piece, Wish
from convoy.setup.torch_builds import build_for, fits

OWN = Piece("convoy_train-1-py3-none-any.whl", 500, "c0")
SCRIPT, DATA = Piece("train.py", 30, "aa"), Piece("data/one.bin", 4_000_000, "bb")
WISH = Wish(
    "3.11", {"numpy": "2.4.6", "tool": "1.0"}, {"torch": "2.13.0"}, {"tool": "tool @ git+https://lab/tool@abc"},
    {"convoy-train": OWN}, (), (SCRIPT, DATA),
)  # fmt: skip
BARE = Found(
    "/home/ann/convoy/cnn-attic", "Linux", "x86_64", (Interpreter("/usr/bin/python3.11", "3.11", True),),
    other=frozenset({"wheels/" + OWN.path, "train.py", "data/one.bin"}),
)  # fmt: skip
READY = replace(
    BARE, owned=True, environment="3.11", other=frozenset(), placed=("data/one.bin", "train.py"),
    packages={"numpy": "2.4.6", "tool": "1.0", "torch": "2.13.0+cpu", "convoy-train": "1"},
    installed={"convoy-train": "c0", "tool": "tool @ git+https://lab/tool@abc"},
)  # fmt: skip


def commands(wish: Wish, found: Found, kinds: tuple[str, ...] = ("cpu",)) -> list[tuple[str, ...]]:
    return [each.argv for each in actions(wish, found, kinds) if isinstance(each, Command)]


def test_a_bare_host_gets_all_of_it_in_this_order() -> None:
    done = actions(WISH, BARE, ("cpu",))
    assert [type(each) for each in done] == [Own, Send, Command, Command, Command, Send, Own]
    pip = ("/home/ann/convoy/cnn-attic/venv/bin/python", "-m", "pip", "install")
    made, torch, rest = commands(WISH, BARE)
    assert made == ("/usr/bin/python3.11", "-m", "venv", "--clear", "/home/ann/convoy/cnn-attic/venv")
    assert torch[:4] == rest[:4] == pip
    assert torch[-4:] == ("--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0")
    assert rest[-2:] == ("-r", "/home/ann/convoy/cnn-attic/requirements.txt")
    begun, ended = done[0], done[-1]
    assert isinstance(begun, Own)
    assert isinstance(ended, Own)
    assert (begun.placed, begun.installed) == (("data/one.bin", "train.py"), {}), "noted before anything lies there"
    assert ended.installed == READY.installed


def test_a_host_that_has_all_of_it_needs_nothing() -> None:
    assert actions(WISH, READY, ("cpu",)) == ()
    assert actions(WISH, replace(READY, packages={**READY.packages, "more": "1"}), ("cpu",)) == (), (
        "what else is there stays"
    )


def test_the_file_of_packages() -> None:
    wheels = "/home/ann/convoy/cnn-attic/wheels"
    assert requirements(WISH, BARE).splitlines()[1:] == [
        f"{wheels}/{OWN.path}", "tool @ git+https://lab/tool@abc", "numpy==2.4.6", "torch==2.13.0",
    ]  # fmt: skip
    own = replace(WISH, index="https://ann:secret@lab/simple", extra=(Piece("a.whl", 1, "d"),))
    assert requirements(own, BARE).splitlines()[1:3] == [
        "--index-url https://ann:secret@lab/simple",
        f"--find-links {wheels}",
    ]
    assert requirements(replace(own, index="none"), BARE).splitlines()[1] == "--no-index"


def test_secrets_stand_in_no_command_and_in_nothing_that_is_printed() -> None:
    done = actions(replace(WISH, index="https://ann:secret@lab/simple"), BARE, ("cpu",))
    assert "secret" not in repr(done)
    assert "secret" not in "".join(line for each in done for line in shell_lines(each, "ssh attic"))
    assert any(isinstance(each, Command) and "secret" in each.text for each in done)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"packages": {**READY.packages, "numpy": "2.0"}}, [("-r",)]),
        ({"packages": {**READY.packages, "torch": "2.12.0+cpu"}}, [("--no-deps", "torch==2.13.0"), ("-r",)]),
        ({"installed": {**READY.installed, "convoy-train": "old"}}, [("--no-deps", "--force-reinstall", OWN.path)]),
        ({"installed": {**READY.installed, "tool": "old"}}, [("--force-reinstall", "tool @ git+https://lab/tool@abc")]),
        ({"environment": "3.12"}, [("venv",), ("torch==2.13.0",), ("-r",)]),
        ({"environment": None, "packages": {}}, [("venv",), ("torch==2.13.0",), ("-r",)]),
    ],
)
def test_only_what_differs_is_installed(change: dict[str, Any], words: list[tuple[str, ...]]) -> None:
    found = commands(WISH, replace(READY, **change))
    assert len(found) == len(words)
    for argv, expected in zip(found, words, strict=True):
        assert all(any(word in each for each in argv) for word in expected), (argv, expected)


def test_files_that_are_no_more_are_removed_and_only_those_that_setup_placed() -> None:
    (_, removed, own) = actions(WISH, replace(READY, placed=("data/one.bin", "old.py", "train.py")), ("cpu",))
    assert removed == Remove(READY.project, ("old.py",))
    assert isinstance(own, Own)
    assert own.placed == ("data/one.bin", "train.py")


def test_only_the_files_that_differ_are_sent() -> None:
    (_, sent, _) = actions(WISH, replace(READY, other=frozenset({"train.py"}), rsync="/usr/bin/rsync"), ("cpu",))
    assert sent == Send("project", READY.project, (SCRIPT,), rsync=True)
    assert shell_lines(sent, "ssh attic") == [
        "# sending 1 file of the project, 30 bytes, to /home/ann/convoy/cnn-attic/project by rsync: train.py"
    ]


def test_uv_makes_the_environment_where_it_is_there() -> None:
    """It brings its own Python, too."""
    made, torch, _ = commands(WISH, replace(BARE, uv="/opt/uv", pythons=()))
    assert made[:2] == ("/opt/uv", "venv")
    assert made[-3:-1] == ("--python", "3.11")
    assert torch[:3] == ("/opt/uv", "pip", "install")
    again = commands(WISH, replace(READY, uv="/opt/uv", installed={**READY.installed, "convoy-train": "old"}))
    assert "--reinstall" in again[0]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(BARE, owned=False), "is not empty, and not setup's own.*--into"),
        (replace(BARE, pythons=()), "no Python 3.11, as here, but none: install it .*python3.11-venv.*or uv"),
        (replace(BARE, pythons=(Interpreter("/usr/bin/python3", "3.9", True),)), "no Python 3.11, as here, but 3.9"),
        (
            replace(BARE, pythons=(Interpreter("/usr/bin/python3", "3.11", False),)),
            "python3 cannot make environments.*venv",
        ),
        (replace(BARE, free_bytes=50_000_000), "the files take 4 MB, and .* has room for 50 MB: make room"),
    ],
)
def test_what_cannot_be_set_up(found: Found, words: str) -> None:
    with pytest.raises(InputError, match=words):
        actions(WISH, found, ("cpu",))


# ------------------------------------------------------------------------------------------------- builds of PyTorch

V100, RTX3060, RTX5090, K80 = (
    ("Tesla V100", 7.0), ("RTX 3060", 8.6), ("RTX 5090", 12.0), ("Tesla K80", 3.7),
)  # fmt: skip


def with_gpus(*gpus: tuple[str, float], driver: int) -> Found:
    return replace(BARE, gpus=tuple(Gpu(*gpu, driver) for gpu in gpus))


@pytest.mark.parametrize(
    ("found", "kinds", "build"),
    [
        (BARE, ["cpu"], "cpu"),
        (replace(BARE, system="Darwin", machine="arm64"), ["mps", "cpu"], None),
        (BARE, ["xpu", "cpu"], "xpu"),
        (with_gpus(RTX3060, driver=580), ["cuda", "cpu"], "cu130"),
        (with_gpus(RTX3060, driver=535), ["cuda"], "cu126"),
        (with_gpus(V100, RTX3060, driver=580), ["cuda", "cuda"], "cu126"),
        (with_gpus(RTX5090, driver=590), ["cuda"], "cu130"),
        (with_gpus(RTX3060, driver=580), ["cpu"], "cpu"),
    ],
)
def test_the_build_for_a_hosts_devices(found: Found, kinds: list[str], build: str | None) -> None:
    assert build_for(found, kinds, "2.13.0") == build


@pytest.mark.parametrize(
    ("found", "torch", "words"),
    [
        (BARE, "2.13.0", "nvidia-smi there shows none: install NVIDIA's driver"),
        (with_gpus(RTX3060, driver=470), "2.13.0", "the driver 470 of its RTX 3060 is too old.*update it to 525"),
        (with_gpus(RTX5090, driver=570), "2.13.0", "update it to 580"),
        (with_gpus(RTX3060, driver=535), "2.15.0", "update it to 580"),
        (with_gpus(V100, RTX5090, driver=580), "2.13.0", "for both its Tesla V100 and its RTX 5090"),
        (with_gpus(V100, driver=580), "2.15.0", "torch 2.15.0 is not built for its Tesla V100"),
        (with_gpus(K80, driver=525), "2.13.0", "not built for its Tesla K80"),
    ],
)
def test_devices_that_no_build_is_for(found: Found, torch: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_for(found, ["cuda"], torch)


def test_a_cuda_host_gets_its_build_by_its_exact_name() -> None:
    found = replace(READY, gpus=(Gpu(*V100, 560),))
    (torch, *_) = commands(WISH, found, ("cuda", "cpu"))
    assert torch[-2:] == ("https://download.pytorch.org/whl/cu126", "torch==2.13.0+cu126")
    assert not fits("2.13.0+cpu", "2.13.0", "cu126")
    assert fits("2.13.0+cu126", "2.13.0", "cu126")
    assert fits("2.13.0+cu126", "2.13.0", "cpu"), "any build computes on a CPU"
    assert not fits(None, "2.13.0", "cpu")
