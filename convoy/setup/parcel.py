"""What setup sends to every host: the packages of this environment, the files of the project, and named data."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from convoy.errors import InputError, shown
from convoy.files import read_text

MOST_BYTES = 2_000_000_000  # a larger project contains data that nobody meant to send

BUILDS = re.compile(r"(nvidia|cuda|triton|pytorch-triton|intel|dpcpp|onemkl)(-.*)?|tbb|umf|tcmlib|impi-rt|pip")
"""Libraries that a build of torch brings by itself; and pip."""

_LEFT_OUT = {"__pycache__", "node_modules", "runs"}
_UV_S, _GIT_S = 300.0, 60.0


def pack(
    scratch: Path, project: Path, data: Sequence[Path], names: Path | None, wheels: Path | None, index: str | None
) -> None:
    """Write what is sent into `scratch`: a folder `packages`, and `listing`, paths in the project ended by zero bytes.

    Args:
        names: a file of requirements; None: all packages of this environment.
        wheels: a folder of wheels that packages are taken from before any index.
        index: the package index; "none": only `wheels`; None: as each host is configured.

    Raises:
        InputError: there is no uv here; an option or file that cannot be used.
    """
    packages = scratch / "packages"
    packages.mkdir()
    extra = sorted(wheels.glob("*.whl")) if wheels is not None else []
    if wheels is not None and not extra:
        raise InputError(f"--wheels {wheels}: there are no wheels; make some, e.g. pip wheel -w {wheels} torch")
    if index == "none" and not extra:
        raise InputError("--index none without --wheels: packages must come from somewhere; give a folder of wheels")
    for wheel in extra:
        (packages / wheel.name).symlink_to(wheel.absolute())
    paths = [*project_files(project), *data_paths(project, data)]
    wanted = pins = requirements_here(packages)
    if names is not None:
        own = [line for line in pins if "convoy-train" in line.replace("_", "-")]
        wanted = [*own, read_text(names, "requirements", "give a file with a package's name on each line")]
    source = [] if index is None else ["--no-index" if index == "none" else f"--index-url {index}"]
    for path, text in (
        (packages / "requirements.txt", "\n".join([*source, "--find-links .", *wanted, ""])),
        (packages / "constraints.txt", "\n".join([*(line for line in pins if not line.startswith("./")), ""])),
        (scratch / "listing", "".join(f"{path}\0" for path in paths)),
    ):
        path.touch(mode=0o600)  # an index's address may hold a password, which must be in no command line
        path.write_bytes(os.fsencode(text))


def requirements_here(folder: Path) -> list[str]:
    """Return the packages of this environment as uv lists them; wheels of those from a folder or file here go into `folder`.

    Raises:
        InputError: there is no uv, or it builds no wheel of a project in a folder.
    """
    lines = []
    for line in _uv("pip", "freeze", "--python", sys.executable).splitlines():
        name, _, url = line.removeprefix("-e ").rpartition(" @ ")
        path = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
        if BUILDS.fullmatch(name or line.partition("==")[0]):
            continue
        if path is not None and path.is_dir():
            before = set(folder.iterdir())
            _uv("build", "--quiet", "--wheel", "--no-create-gitignore", "--out-dir", str(folder), str(path))
            lines += [f"./{wheel.name}" for wheel in set(folder.glob("*.whl")) - before]
        elif path is not None and path.is_file():
            (folder / path.name).symlink_to(path)
            lines.append(f"./{path.name}")
        elif path is not None:
            lines.append(f"{name}=={version(name)}")  # built elsewhere, as conda's packages are
        else:
            lines.append(line.partition("+")[0] if line.startswith("torch") else line)  # without the label of a build
    return lines


def _uv(*words: str) -> str:
    """Run uv here and return its output."""
    try:
        done = subprocess.run(["uv", *words], capture_output=True, text=True, timeout=_UV_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"uv {words[0]} cannot be run here ({error}): pip install uv, https://docs.astral.sh/uv"
        ) from None
    if done.returncode != 0:
        said = " | ".join(done.stderr.split("\n")[-4:]).strip(" |")
        raise InputError(f"uv {' '.join(words)} failed: {said}; mend that, or uninstall that package here")
    return done.stdout


def project_files(folder: Path) -> list[str]:
    """Return the project's files: tracked by git, or neither ignored by git nor hidden, a cache, an environment or runs.

    Raises:
        InputError: more than MOST_BYTES.
    """
    tracked = _git_files(folder, "--cached")
    others = list(_walk(folder)) if tracked is None else _git_files(folder, "--others", "--exclude-standard")
    paths = [*(tracked or ()), *(path for path in others or () if not _is_left_out(folder, path))]
    sizes = {path: (folder / path).stat().st_size for path in sorted(paths) if (folder / path).is_file()}
    if (size := sum(sizes.values())) > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise InputError(
            f"the project in {folder} has {size / 1e9:.1f} GB, the largest file is {largest}: at most "
            f"{MOST_BYTES / 1e9:g} GB are sent unnamed; let git ignore the data, and name what the hosts need with --data"
        )
    return list(sizes)


def _git_files(folder: Path, *options: str) -> list[str] | None:
    """Return what git lists; None where there is no repository."""
    words = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path] if done.returncode == 0 else None


def _walk(folder: Path) -> Iterable[str]:
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_left_out(Path(top), f"{name}/any")]
        yield from (os.path.relpath(os.path.join(top, name), folder) for name in files)


def _is_left_out(folder: Path, path: str) -> bool:
    parts = Path(path).parts
    return any(part.startswith(".") or part in _LEFT_OUT for part in parts) or any(
        folder.joinpath(*parts[:count], "pyvenv.cfg").exists() for count in range(1, len(parts))
    )


def data_paths(folder: Path, named: Iterable[Path]) -> list[str]:
    """Return named files and folders as paths in the project, where data that lies elsewhere can be linked in.

    Raises:
        InputError: data that is not there, or does not lie in the project.
    """
    found = []
    for path in named:
        full = Path(os.path.abspath(folder / path))
        if not (os.path.isfile(full) or os.path.isdir(full)) or not full.is_relative_to(folder):
            raise InputError(
                f"--data {shown(path)}: no file or folder of the project {folder}, where a script finds it on all hosts; link "
                "data that lies elsewhere into it: ln -s FOLDER data"
            )
        found.append(str(full.relative_to(folder)))
    return found
