"""The packages of this environment, as the hosts shall have them, and wheels of those that no index has."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import convoy
from convoy._version import __version__
from convoy.errors import InputError
from convoy.files import read_text
from convoy.setup.torch_builds import FAMILY

OWN = "convoy-train"
_BUILD_S = 300.0
_EPOCH = "315532800"
"""1980, the first date that a wheel can hold: the same files make the same wheel."""

_OF_BUILDS = re.compile(r"(nvidia|cuda|triton|pytorch-triton|intel|dpcpp|onemkl)(-.*)?|tbb|umf|tcmlib|impi-rt|pip")
"""Libraries that belong to one build of torch, which brings its own; and pip."""


@dataclass
class Packages:
    """As `Wish` has them; `wheels` are files here. `left_out`: what the system's package manager has installed."""

    pinned: dict[str, str] = field(default_factory=dict)
    torch: dict[str, str] = field(default_factory=dict)
    direct: dict[str, str] = field(default_factory=dict)
    wheels: dict[str, Path] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def normal(name: str) -> str:
    """A package's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages_here(scratch: Path, requirements: Path | None = None) -> Packages:
    """The packages of this environment.

    Args:
        scratch: an empty folder for wheels that are made.
        requirements: a file of names, one a line: then only these, and what they need, at the versions that are installed here.

    Raises:
        InputError: a name that is not installed here, or a project in a folder of which no wheel can be made.
    """
    installed = {normal(each.metadata["Name"]): each for each in distributions() if each.metadata["Name"]}
    names = set(installed) if requirements is None else _needed(_named(requirements, installed), installed)
    made = Packages(wheels={OWN: own_wheel(scratch, installed.get(OWN))})
    for name in sorted(names - {OWN}):
        package = installed[name]
        if _OF_BUILDS.fullmatch(name):
            continue
        version = package.version.partition("+")[0] if name in FAMILY else package.version
        if name in FAMILY:
            made.torch[name] = version
        elif not (package.read_text("INSTALLER") or "").strip():
            made.left_out.append(name)
        elif (source := _source(package)) is None:
            made.pinned[name] = version
        elif isinstance(source, str):
            made.pinned[name] = version
            made.direct[name] = f"{name} @ {source}"
        elif source.is_dir():
            made.wheels[name] = _built(name, source, scratch)
        else:
            made.wheels[name] = source
    return made


def _named(requirements: Path, installed: Mapping[str, Distribution]) -> list[str]:
    text = read_text(requirements, "requirements", "give a file with a package's name on each line")
    found = (re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line) for line in text.splitlines())
    names = [normal(match[1]) for match in found if match]
    if missing := [name for name in names if name not in installed]:
        raise InputError(
            f"{requirements} names {', '.join(missing)}, which this environment has not: the hosts get the versions that are "
            "installed here; install it here first"
        )
    return names


def _needed(names: Iterable[str], installed: Mapping[str, Distribution]) -> set[str]:
    """These packages, Convoy, and all that they need and that is installed here."""
    found, todo = set(), [OWN, *names]
    while todo:
        name = todo.pop()
        if name in found or name not in installed:
            continue
        found.add(name)
        for line in installed[name].requires or ():
            match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
            if match and not re.search(r";.*\bextra\b", line):
                todo.append(normal(match[0]))
    return found


def _source(package: Distribution) -> Path | str | None:
    """Where a package was installed from, if not by name: a folder or a wheel here, or an address that pip understands."""
    try:
        told = json.loads(package.read_text("direct_url.json") or "null")
    except ValueError:
        return None
    if not isinstance(told, dict) or "url" not in told:
        return None
    url = str(told["url"])
    if urlsplit(url).scheme != "file":
        vcs = told.get("vcs_info")
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
    path = Path(url2pathname(urlsplit(url).path))
    # What was built elsewhere, as conda's packages are, is found by its name.
    return path if path.is_dir() or (path.is_file() and path.suffix == ".whl") else None


def _built(name: str, folder: Path, scratch: Path) -> Path:
    """The wheel of a project in a folder."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, str(folder)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_BUILD_S, check=False, start_new_session=True,
                env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH},
            )  # fmt: skip
            said = done.stderr.strip().splitlines()
        except subprocess.TimeoutExpired:
            said = [f"not ended within {_BUILD_S:g} s"]
        made = list(Path(place).glob("*.whl"))
        if len(made) != 1:
            raise InputError(
                f"{name} is installed here from the folder {folder}, and pip makes no wheel of it "
                f"({said[-1] if said else 'no message'}): see `pip wheel --no-deps {folder}`, or uninstall it here"
            )
        return made[0].rename(scratch / made[0].name)


def own_wheel(folder: Path, installed: Distribution | None) -> Path:
    """A wheel of the Convoy that runs here, whether it was installed or lies in a checkout; the same files, the same bytes.

    Raises:
        InputError: it has no metadata: it was not installed by pip or uv.
    """
    metadata = None if installed is None else installed.read_text("METADATA")
    if installed is None or metadata is None:
        raise InputError(
            "Convoy itself is not installed in this environment: install it with pip or uv, e.g. pip install -e ."
        )
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {__version__}", metadata, count=1)
    top, info = Path(convoy.__path__[0]), f"convoy_train-{__version__}.dist-info"
    files = {
        f"convoy/{path.relative_to(top).as_posix()}": path.read_bytes()
        for path in sorted(top.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: convoy setup\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name, content in files.items():
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={sha256}", len(content)])
    writer.writerow([f"{info}/RECORD", "", ""])
    files[f"{info}/RECORD"] = rows.getvalue().encode()
    target = folder / f"convoy_train-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return target
