"""The pages: every snippet runs, every command exists, every quoted message is in the code."""

import ast
import contextlib
import doctest
import io
import json
import operator
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

import convoy
from convoy.cli import app, main
from convoy.config.train_options import FIELDS, key_of
from docs import figures_plans, figures_rooms, figures_step
from docs.from_code import commands_markdown, settings_markdown
from tests.support.data_files import write_cifar10, write_images
from tests.support.doc_snippets import Block, PageError, blocks_of
from tests.support.processes import PLACE, ROOT
from tests.support.scripts import launch_on_forks

DOCS = ROOT / "docs"
MADE = ("accuracy.md", "benchmarks.md", "validation.md", "study.md", "gpu.md", "three.md", "quarter-of-an-hour.md")
"""Pages of results, with the commands that gave them: those take hours."""

PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if page.name not in MADE)]
LIMIT_S = 100.0
"""Of one command."""

SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

MY_MODULE = """
import torch
from torch import nn


def build():
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(1, 8, 8, generator=generator), number % 2) for number in range(64)]


def net(image, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(image[0] * image[1] * image[2], classes))
"""


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------- running the snippets


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write CIFAR-10's files in full size, with generated images, as the pages' folder D."""
    folder = tmp_path_factory.mktemp("cifar10")
    write_cifar10(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with the pages' prerequisites: pet pictures, a user module, the examples, and the commands on
    PATH."""
    for name in (*PLACE, "CONVOY_DEVICE", "CONVOY_FLEET", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    programs, folder = tmp_path / "programs", tmp_path / "page"
    programs.mkdir()
    for name, module in (("convoy", "-m convoy"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (programs / name).chmod(0o755)
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "my_module.py").write_text(MY_MODULE)
    for linked in ("examples", "benchmarks"):
        (folder / linked).symlink_to(ROOT / linked)
    x_NHWC = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), dtype=np.uint8)
    pets = [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(10)]
    write_images(folder / "pets", {name: Image.fromarray(x) for name, x in zip(pets, x_NHWC, strict=True)})
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    with contextlib.chdir(folder):
        yield folder
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def play(page: Path, *, slow: bool) -> None:
    """Run the blocks of a page in order; slow ones only on request."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.not_run or (block.slow and not slow):
            continue
        if block.part_of:
            assert block.text.strip() in (ROOT / block.part_of).read_text(), f"{block.place} is not in {block.part_of}"
        elif block.file:
            Path(block.file).write_text(block.text)
        else:
            _play(block, names)


def _play(block: Block, names: dict[str, Any]) -> None:
    match block.language:
        case "python":
            # Padded, so that a traceback shows the line of the page.
            exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
        case "pycon":
            _show(block, names)
        case "toml":
            tomllib.loads(block.text)
        case "json":
            json.loads(block.text)
        case "console" | "bash":
            for command, printed in block.commands():
                _run(block, command, printed)


def _show(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, block.place, block.page, block.line)
    told = io.StringIO()
    result = doctest.DocTestRunner(optionflags=SHOWN).run(test, out=told.write, clear_globs=False)
    names.update(test.globs)
    assert result.attempted, f"{block.place}: nothing to run after >>>"
    assert not result.failed, told.getvalue()


def _run(block: Block, command: str, printed: str) -> None:
    status, out, err = _bash(command) if _needs_a_shell(command) else _here(shlex.split(command))
    assert status == 0, f"{block.place}: {command}\n{out}{err}"
    shown = not printed or doctest.OutputChecker().check_output(printed, out, SHOWN)
    assert shown, f"{block.place}: {command}\nprinted\n{out}"


def _needs_a_shell(command: str) -> bool:
    """Return whether a command needs bash: more than one call of convoy, or one that starts scripts."""
    starts = command.startswith(("convoy demo", "convoy run"))
    return not command.startswith("convoy ") or starts or bool(re.search(r"[;|&<>$#\n]", command))


def _here(words: list[str]) -> tuple[int, str, str]:
    """Do as `_bash` for a call of convoy, without importing torch again."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", words)
        patch.setattr("convoy.launch.local.launch_local", launch_on_forks)
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def _bash(command: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command; kill all of it after a time limit."""
    process = subprocess.Popen(
        ["bash", "-ec", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, err


def prepared(page: Path, request: pytest.FixtureRequest, *, slow: bool) -> None:
    """Write CIFAR-10's large files for pages that train on them."""
    blocks = [block for block in blocks_of(page) if slow or not block.slow]
    if any("--data-dir D" in block.text for block in blocks):
        Path("D").symlink_to(request.getfixturevalue("cifar"))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", PAGES, ids=title)
def test_snippets(page: Path, request: pytest.FixtureRequest) -> None:
    prepared(page, request, slow=False)
    play(page, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- slow -->" in page.read_text()], ids=title)
def test_snippets_slow_ones_too(page: Path, request: pytest.FixtureRequest) -> None:
    prepared(page, request, slow=True)
    play(page, slow=True)


def test_most_snippets_are_run() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language not in ("text", "diff")]
    left_out = [block.place for block in blocks if block.not_run]
    assert len(blocks) > 40
    assert len(left_out) < 0.2 * len(blocks), left_out


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("```\nconvoy train\n```\n", "a block in ''"),
        ("<!-- not run: too lazy -->\n```console\n$ convoy train\n```\n", "the reasons are"),
        ("<!-- slow -->\n\n```console\n$ convoy train\n```\n", "directly before no block"),
        ("```text\nconvoy train\n```\n", "a command in a text block"),
    ],
)
def test_unrunnable_block_is_found(source: str, says: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(source)
    with pytest.raises(PageError, match=re.escape(says)):
        blocks_of(page)


@pytest.mark.parametrize(
    ("source", "fails"),
    [
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("```pycon\n>>> 1 + 1\n3\n```\n", AssertionError),
        ("```console\n$ echo one\ntwo\n```\n", AssertionError),
        ("```toml\nbatch = \n```\n", tomllib.TOMLDecodeError),
        ("<!-- part of: examples/four_lines.py -->\n```python\nnot there\n```\n", AssertionError),
    ],
)
def test_failing_snippet_is_found(source: str, fails: type[Exception], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n{source}")
    with pytest.raises(fails):
        play(page, slow=False)


# --------------------------------------------------------------------------------------------------- commands, messages


def commands() -> Iterator[tuple[str, list[str]]]:
    """Return every call of convoy on any page, run or not: location and arguments."""
    for page in PAGES:
        for block in (block for block in blocks_of(page) if block.is_shell):
            text = "\n".join(command for command, _ in block.commands()).replace("\\\n", " ")
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                for start in (index + 1 for index, word in enumerate(words) if word == "convoy"):
                    stop = words.index("--", start) if "--" in words[start:] else len(words)
                    yield block.place, words[start:stop]


def test_every_documented_command_parses() -> None:
    """This finds a renamed option without running anything."""
    top: Any = typer.main.get_command(app)
    seen = set()
    for place, words in commands():
        verb, *rest = words
        seen.add(verb)
        try:
            command = top.commands[verb]
            if hasattr(command, "commands"):
                command, rest = command.commands[rest[0]], rest[1:]
            command.make_context(verb, [*rest, "--", "true"] if verb == "emulate" else rest)
        except typer.Exit:
            continue  # --help
        except Exception as error:
            raise AssertionError(f"{place}: convoy {' '.join(words)}: {error}") from None
    assert seen >= {"train", "demo", "measure", "plan", "emulate"}


def spoken() -> list[str]:
    """Return every text in the sources, with … for inserted values."""
    texts = []
    for path in (ROOT / "convoy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_quoted_messages_exist_in_the_code() -> None:
    quoted = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    texts = spoken()
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.S)
        assert any(pattern.search(text) for text in texts), f"troubleshooting.md quotes {message!r}: no code says so"
    assert len(quoted) > 30


# ----------------------------------------------------------------------------------------------- what is made from code


def test_committed_figures_match_the_code() -> None:
    for name, drawing in (figures_plans.figures() | figures_step.figures() | figures_rooms.figures()).items():
        drawn = (DOCS / "figures" / name).read_text(encoding="utf-8")
        assert drawn == drawing.to_svg(), f"{name} is not what the code draws now: make docs"


def test_all_settings_and_commands_are_documented() -> None:
    settings, told = settings_markdown(), commands_markdown()
    assert all(f"| `{key_of(name)}` |" in settings for name in FIELDS)
    top: Any = typer.main.get_command(app)
    groups = {name: getattr(verb, "commands", None) for name, verb in top.commands.items()}
    verbs = {name: verb for name, verb in top.commands.items() if not groups[name] and not verb.hidden}
    verbs |= {f"{name} {inner}": verb for name, group in groups.items() for inner, verb in (group or {}).items()}
    for name, verb in verbs.items():
        assert f"## `convoy {name}`" in told
        shown = [each for each in verb.params if not getattr(each, "hidden", False)]
        own = [each for each in shown if each.name not in FIELDS or name != "train"]
        assert all(f"`{each.opts[0]}`" in told for each in own if each.opts[0].startswith("--"))


def test_names_in_diffs_exist() -> None:
    """Only changed lines of foreign files are shown; the Convoy names in them must exist."""
    added = [
        line
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "diff"
        for line in block.text.splitlines()
        if line.startswith("+")
    ]
    called = {name for line in added for name in re.findall(r"convoy\.([\w.]+)\(", line)}
    assert called >= {"prepare", "is_first"}
    for name in called:
        operator.attrgetter(name)(convoy)


RECIPES = sorted(page for page in (DOCS / "recipes").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", RECIPES, ids=title)
def test_recipes_name_source_command_and_limits(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    assert re.search(r"[\w.-]+/[\w.-]+ #\d+", source), "no thread is named"
    assert "\n## The command\n" in source
    assert "\n## When not to use Convoy\n" in source
    assert any(block.is_shell for block in blocks_of(page))
    assert f"]({page.name})" in (DOCS / "recipes" / "index.md").read_text(encoding="utf-8")
