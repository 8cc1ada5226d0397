"""What is to be done on a host, from what it has and what it shall have. Pure: nothing here touches a host."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from convoy.errors import InputError
from convoy.setup.state import Found, Piece, Wish
from convoy.setup.torch_builds import INDEX, build_for, fits

ENVIRONMENT_S, INSTALL_S = 300.0, 3600.0
"""Time limits of making an environment, and of installing packages: gigabytes of CUDA over a slow line."""

SPARE_BYTES = 100_000_000

_SHOWN = 5


@dataclass(frozen=True)
class Own:
    """Note that the folder is setup's, with what it has put there.

    Attributes:
        placed: paths in the project's folder.
        installed: what is installed of sent wheels and addresses, by name.
    """

    title = "a note of what is there"
    placed: tuple[str, ...]
    installed: Mapping[str, str]


@dataclass(frozen=True)
class Command:
    """Run a program there.

    Attributes:
        title: what it does, for people.
        text: a file that is written before, for its owner's eyes only: it may hold an index's password.
        text_path: where, absolute.
    """

    title: str
    argv: tuple[str, ...]
    limit_s: float
    text_path: str | None = None
    text: str = field(default="", repr=False)


@dataclass(frozen=True)
class Send:
    """Send files.

    Attributes:
        source: which of this machine's: "wheels" or "project".
        folder: where to, absolute.
        rsync: whether the host has it.
    """

    source: str
    folder: str
    pieces: tuple[Piece, ...]
    rsync: bool

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def title(self) -> str:
        count = len(self.pieces)
        return f"sending {count:,} file{'s' * (count != 1)} of the {self.source}, {amount(self.size_bytes)}"


@dataclass(frozen=True)
class Remove:
    """Remove files of the project that setup has put there, and that are no more."""

    folder: str
    paths: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"removing {len(self.paths):,} files that the project has no more"


Action = Own | Command | Send | Remove


def actions(wish: Wish, found: Found, kinds: Collection[str]) -> tuple[Action, ...]:
    """All that is to be done, in this order; nothing if the host has all of the wish.

    Args:
        kinds: of the host's devices.

    Raises:
        InputError: it cannot be done there; names the value, the rule and the remedy, but not the host.
    """
    if found.owned is False:
        raise InputError(
            f"{found.root} there is not empty, and not setup's own: give another folder with --into, or remove it there"
        )
    wheels = _send("wheels", found.wheels, (*wish.wheels.values(), *wish.extra), "wheels/", found)
    project = _send("project", found.project, wish.project, "", found)
    need_bytes = sum(send.size_bytes for send in (*wheels, *project))
    if need_bytes + SPARE_BYTES > found.free_bytes:
        raise InputError(
            f"the files take {amount(need_bytes)}, and {found.root} has room for {amount(found.free_bytes)}: make room there, "
            "or give a folder on another disk with --into"
        )
    placed = tuple(sorted(piece.path for piece in wish.project))
    stale = tuple(sorted(set(found.placed) - set(placed)))
    done: tuple[Action, ...] = (
        *wheels,
        *_environment(wish, found, kinds),
        *project,
        *([Remove(found.project, stale)] if stale else []),
    )
    own = Own(placed, dict(wish.direct) | {name: piece.sha256 for name, piece in wish.wheels.items()})
    noted = found.owned and (own.placed, own.installed) == (tuple(sorted(found.placed)), found.installed)
    if noted and not done:
        return ()
    # First what may come to lie there, so that it can be told from other files if this is cut off.
    begun = Own(tuple(sorted({*found.placed, *placed})), found.installed)
    return (*([begun] if done else []), *done, own)


def _send(source: str, folder: str, pieces: Collection[Piece], prefix: str, found: Found) -> list[Send]:
    lacking = tuple(piece for piece in pieces if prefix + piece.path in found.other)
    return [Send(source, folder, lacking, found.rsync is not None)] if lacking else []


def _environment(wish: Wish, found: Found, kinds: Collection[str]) -> list[Command]:
    """The environment and its packages, as far as they are not there."""
    fresh = found.environment != wish.python
    made = [_make(wish, found)] if fresh else []
    have = {} if fresh else found.packages
    stamps = {**wish.direct, **{name: wheel.sha256 for name, wheel in wish.wheels.items()}}
    build = build_for(found, kinds, wish.torch["torch"]) if wish.index is None and "torch" in wish.torch else None
    unfit = [name for name, version in wish.torch.items() if not fits(have.get(name), version, build)]
    if unfit and build is not None:
        exact = "" if build == "cpu" else f"+{build}"
        pins = [f"{name}=={wish.torch[name]}{exact}" for name in unfit]
        made.append(
            Command(
                f"installing {' '.join(pins)}, build {build}",
                (*_install(found), "--no-deps", "--index-url", f"{INDEX}/{build}", *pins),
                INSTALL_S,
            )
        )
    lacking = [name for name, version in wish.packages.items() if have.get(name) != version]
    changed = [name for name, stamp in stamps.items() if have and stamp != found.installed.get(name)]
    absent = [name for name in stamps if name not in have]
    if lacking or absent or unfit:
        count = len({*lacking, *absent, *([] if build else unfit)})
        path = f"{found.root}/requirements.txt"
        title = f"installing {count} package{'s' * (count != 1)}" if count else "installing what torch needs"
        made.append(Command(title, (*_install(found), "-r", path), INSTALL_S, path, requirements(wish, found)))
    again = [name for name in changed if name not in absent]
    if again:
        words = [
            f"{found.wheels}/{wish.wheels[name].path}" if name in wish.wheels else wish.direct[name] for name in again
        ]
        force = ("--no-deps", "--reinstall" if found.uv else "--force-reinstall")
        made.append(Command(f"installing {', '.join(again)} anew", (*_install(found), *force, *words), INSTALL_S))
    return made


def _make(wish: Wish, found: Found) -> Command:
    """An empty environment. What was begun there before goes."""
    folder, title = f"{found.root}/venv", f"making an environment with Python {wish.python}"
    if found.uv is not None:
        return Command(title, (found.uv, "venv", "--clear", "--python", wish.python, folder), ENVIRONMENT_S)
    fitting = [each for each in found.pythons if each.version == wish.python]
    for each in fitting:
        if each.makes_environments:
            return Command(title, (each.path, "-m", "venv", "--clear", folder), ENVIRONMENT_S)
    package = f"python{wish.python}-venv"
    if fitting:
        raise InputError(
            f"its {fitting[0].path} cannot make environments: install what is missing (Debian, Ubuntu: apt install {package}), "
            "or uv"
        )
    versions = ", ".join(sorted({each.version for each in found.pythons})) or "none"
    raise InputError(
        f"it has no Python {wish.python}, as here, but {versions}: install it (Debian, Ubuntu: apt install {package}), or uv, "
        "which brings one: https://docs.astral.sh/uv"
    )


def _install(found: Found) -> tuple[str, ...]:
    if found.uv is not None:
        return (found.uv, "pip", "install", "--no-progress", "--python", found.python)
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    return (found.python, "-m", "pip", "install", *quiet)


def requirements(wish: Wish, found: Found) -> str:
    """The file of all packages, for pip and uv. Secrets in the index's address stand here and in no command."""
    lines = ["# Written by convoy setup: the packages of the machine that it was started on."]
    if wish.index is not None:
        lines.append("--no-index" if wish.index == "none" else f"--index-url {wish.index}")
    if wish.extra:
        lines.append(f"--find-links {found.wheels}")
    lines += [f"{found.wheels}/{piece.path}" for piece in wish.wheels.values()]
    lines += wish.direct.values()
    pins = {**wish.packages, **wish.torch}
    lines += [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in wish.direct]
    return "\n".join([*lines, ""])


def shell_lines(action: Action, call: str) -> list[str]:
    """What an action does, as lines for a shell; those that begin with # tell what it sends.

    Args:
        call: the command that runs one there, such as "ssh ann@cellar".
    """
    match action:
        case Own():
            return []
        case Command():
            before = (
                []
                if action.text_path is None
                else [f"# {action.text_path} there: {len(action.text.splitlines())} lines"]
            )
            return [*before, f"{call} {shlex.quote(shlex.join(action.argv))}"]
        case Send():
            names = ", ".join(piece.path for piece in action.pieces[:_SHOWN])
            more = ", ..." if len(action.pieces) > _SHOWN else ""
            by = "rsync" if action.rsync else "ssh"
            return [f"# {action.title}, to {action.folder} by {by}: {names}{more}"]
        case Remove():
            return [
                f"{call} {shlex.quote(shlex.join(['rm', '--', *(f'{action.folder}/{path}' for path in action.paths)]))}"
            ]


def amount(size_bytes: float) -> str:
    """Bytes for people: "1.2 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            break
        size_bytes /= 1000
    return f"{size_bytes:.3g} {unit}" if unit != "GB" else f"{size_bytes:.1f} GB"
