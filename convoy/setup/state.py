"""What every host shall have, and what one has. Pure."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field

OWNED = "convoy-setup.json"
"""The file in the folder on a host that says it is setup's own, what was put there, and which wheels are installed."""


@dataclass(frozen=True)
class Piece:
    """A file.

    Attributes:
        path: relative to the folder that it is in, with slashes.
        sha256: of its content.
        executable: whether its owner may run it.
    """

    path: str
    size_bytes: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True)
class Wish:
    """What every host shall have.

    Attributes:
        python: major and minor version, such as "3.11".
        packages: versions by normalised name, as installed here; without those of `torch` and `wheels`.
        torch: versions of torch and what is built for it, without the label of a build.
        direct: requirements by name of what was installed here from an address, such as "tool @ git+https://...".
        wheels: made or found here, by name: what no index has.
        extra: wheels that any package may be taken from, before an index.
        project: files of the project and of named data.
        index: the package index; "none": only `extra`; None: as the host is configured.
    """

    python: str
    packages: Mapping[str, str]
    torch: Mapping[str, str] = field(default_factory=dict)
    direct: Mapping[str, str] = field(default_factory=dict)
    wheels: Mapping[str, Piece] = field(default_factory=dict)
    extra: tuple[Piece, ...] = ()
    project: tuple[Piece, ...] = ()
    index: str | None = None


@dataclass(frozen=True)
class Interpreter:
    """A Python of a host.

    Attributes:
        version: major and minor.
        makes_environments: whether it has venv and ensurepip.
    """

    path: str
    version: str
    makes_environments: bool


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU: its product's name, compute capability (such as 8.6), and the major version of its driver."""

    name: str
    capability: float
    driver: int


@dataclass(frozen=True)
class Found:
    """What a host has.

    Attributes:
        root: setup's folder there, absolute.
        system, machine: as uname says: Linux, x86_64.
        pythons: those that were found, best first.
        uv, rsync: paths of the programs.
        owned: whether the folder is setup's; None: there is none yet, or an empty one.
        environment: the version of its environment's Python; None: there is none that runs.
        packages: versions by normalised name in that environment.
        installed: digests of the sent wheels that were installed, by name.
        placed: paths that setup has put into the project's folder.
        other: paths of the wish's project, and of its wheels (as "wheels/NAME"), that are missing there or differ.
        free_bytes: room on the disk of the folder.
    """

    root: str
    system: str
    machine: str
    pythons: tuple[Interpreter, ...] = ()
    uv: str | None = None
    rsync: str | None = None
    gpus: tuple[Gpu, ...] = ()
    owned: bool | None = None
    environment: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    installed: Mapping[str, str] = field(default_factory=dict)
    placed: tuple[str, ...] = ()
    other: frozenset[str] = frozenset()
    free_bytes: int = 1 << 62

    @property
    def python(self) -> str:
        """The Python of its environment."""
        return posixpath.join(self.root, "venv/bin/python")

    @property
    def project(self) -> str:
        """The folder of the project's files."""
        return posixpath.join(self.root, "project")

    @property
    def wheels(self) -> str:
        """The folder of sent wheels."""
        return posixpath.join(self.root, "wheels")
