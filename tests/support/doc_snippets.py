"""Read the code blocks of a Markdown page and run them.

A page is a story: its blocks are run in order, in one folder, Python in one namespace.

| block | what is done with it |
|---|---|
| `python` | executed; one that begins with a comment that is a file's name (`# my_nets.py`) is written to that file instead |
| `pycon` | executed, and what it shows must come out (`...` stands for anything) |
| `console` | every line after `$ ` is run by bash; the lines below are what it prints (`...` again); none: whatever it prints |
| `bash` | every line is run by bash |
| `toml` | begins with a file's name, and is written there; else it is read as TOML |
| `json` | read as JSON |
| `text` | shown only; no command may hide in it |
| `diff` | shown only: the file is not ours; what the new lines call must be there |

Comments directly before a block say more:

| mark | meaning |
|---|---|
| `<!-- file: NAME -->` | written to that file |
| `<!-- part of: FILE -->` | a part of that file of the repository, which a test of its own runs |
| `<!-- slow -->` | run with the slow tests only |
| `<!-- smaller: A => B; C => D -->` | run with smaller numbers |
| `<!-- not run: REASON -->` | left out, for one of `REASONS` |
"""

import re
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("python", "pycon", "console", "bash", "toml", "json", "diff", "text")

REASONS = (
    "sets up an environment",
    "needs several machines",
    "needs root",
    "needs a torchvision that matches torch",
    "waits for a person",
)
"""Why a block may be left out."""

_BLOCK = re.compile(
    r"(?P<marks>(?:^<!-- .*? -->\n)*)^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)
_COMMENT = re.compile(r"^<!-- (.*?) -->$", re.M)
_MARK = re.compile(r"(?P<what>file|part of|slow|smaller|not run)(?:: (?P<rest>.*))?")
_NAME = re.compile(r"# (?P<name>[\w./-]+\.(?:py|toml|json))\n")


class PageError(AssertionError):
    """A block that cannot be run, or an unknown mark."""


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page, line: where it stands.
        text: as it is run, with the smaller numbers in it.
        file: where it is written to, instead of being run.
        part_of: the file that it is a part of.
        not_run: the reason; empty where it is run.
    """

    page: str
    line: int
    language: str
    text: str
    file: str = ""
    part_of: str = ""
    slow: bool = False
    not_run: str = ""

    @property
    def place(self) -> str:
        return f"{self.page} line {self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in ("console", "bash")

    def commands(self) -> list[tuple[str, str]]:
        """Return (command, output) pairs of a shell block."""
        if self.language == "bash":
            return [(line, "") for line in self.text.splitlines() if line.strip()]
        rows: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                rows.append((line.removeprefix("$ "), ""))
            elif rows:
                command, printed = rows[-1]
                rows[-1] = (command, f"{printed}{line}\n")
            else:
                raise PageError(f"{self.place}: a console block begins with a command after '$ ', not with {line!r}")
        return rows


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order.

    Raises:
        PageError: a language, a mark or a reason that is not known, a comment that stands before no block, a smaller number for
            one that is not there.
    """
    source = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(source))
    before = sum(len(_COMMENT.findall(match["marks"])) for match in found)
    if loose := len(_COMMENT.findall(source)) - before:
        raise PageError(f"{page.name}: {loose} comments stand directly before no block: move or remove them")
    return [_block(page.name, source, match) for match in found if not match["language"].startswith("{")]


def _block(page: str, source: str, match: re.Match[str]) -> Block:
    place = f"{page} line {source.count(chr(10), 0, match.start('fence')) + 1}"
    language, text, marks = match["language"].strip(), match["text"], _marks(place, match["marks"])
    if language not in LANGUAGES:
        raise PageError(f"{place}: a block in {language!r}: write one of {', '.join(LANGUAGES)} after the backticks")
    if "not run" in marks and marks["not run"] not in REASONS:
        raise PageError(f"{place}: not run: {marks['not run']!r}; the reasons are {', '.join(REASONS)}")
    for pair in marks.get("smaller", "").split("; ") if "smaller" in marks else ():
        large, _, small = pair.partition(" => ")
        if large not in text:
            raise PageError(f"{place}: {large!r} is to be smaller, but is not there")
        text = text.replace(large, small)
    if language == "text" and re.search(r"^(\$ |convoy |python |make |torchrun )", text, re.M):
        raise PageError(f"{place}: a command in a text block: make it a console block")
    named = _NAME.match(text) if language in ("python", "toml") else None
    return Block(
        page, source.count("\n", 0, match.start("fence")) + 1, language, text,
        file=marks.get("file", named["name"] if named else ""), part_of=marks.get("part of", ""),
        slow="slow" in marks, not_run=marks.get("not run", ""),
    )  # fmt: skip


def _marks(place: str, comments: str) -> dict[str, str]:
    marks = {}
    for comment in _COMMENT.findall(comments):
        mark = _MARK.fullmatch(comment)
        if mark is None:
            raise PageError(f"{place}: {comment!r} before a block means nothing: see tests/support/doc_snippets.py")
        marks[mark["what"]] = mark["rest"] or ""
    return marks
