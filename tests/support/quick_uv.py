"""A stand-in for uv: makes an environment without pip and unpacks wheels into it, in half a second where pip takes ten.

It runs as a program of its own, with the standard library only, and knows no more than what `convoy setup` asks of uv.
"""

import re
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path


def wanted(requirements: Path) -> Iterator[Path]:
    """The wheels that a file of requirements names, by their paths or as name==version in its --find-links."""
    links: list[Path] = []
    for line in requirements.read_text().splitlines():
        if line.startswith("--find-links "):
            links += Path(line.removeprefix("--find-links ")).glob("*.whl")
        elif line.endswith(".whl"):
            yield Path(line)
        elif "==" in line:
            name, version = line.split("==")
            stem = f"{re.sub('[-.]+', '_', name)}-{version}-".lower()
            yield next(path for path in links if path.name.lower().startswith(stem))


def main(verb: str, *words: str) -> None:
    if verb == "venv":
        assert words[:2] == ("--clear", "--python")
        venv.create(words[-1], clear=True, symlinks=True)
        return
    given = words[words.index("--python") + 2 :]
    assert (verb, words[0], given[0]) == ("pip", "install", "-r"), words
    python = Path(words[words.index("--python") + 1])
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    for wheel in wanted(Path(given[1])):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        print(f" + {wheel.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
