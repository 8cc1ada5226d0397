"""`convoy fleet setup`: installs this machine's packages and project on the hosts of a fleet, with ssh, rsync and uv."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import tomlkit

from convoy.comm.environment import is_own
from convoy.errors import InputError, shown
from convoy.files import read_text, write_whole
from convoy.fleet import Fleet, Host
from convoy.launch.fleet import startable
from convoy.launch.ssh import remedy, ssh_call, ssh_program, ssh_words
from convoy.launch.supervisor import Interrupts, Signalled, Start, Supervisor, by_line

LIMIT_S = 6 * 3600.0  # for all hosts: a slow line may carry gigabytes of CUDA packages and data
DOCTOR_S = 60.0
PYTHON = "../venv/bin/python"  # path on a host, relative to the project's folder there

_PATH = "PATH=$PATH:$HOME/.local/bin:$HOME/.cargo/bin:/usr/local/bin:/opt/homebrew/bin"

BEGIN = f"""{_PATH}
for need in "rsync: apt install rsync" "uv: https://docs.astral.sh/uv"; do
  command -v "${{need%%:*}}" >/dev/null || {{ echo "there is no ${{need%%:*}} (${{need#*: }})"; exit 1; }}
done
mkdir -p "$1" && cd "$1" || exit 1
if [ ! -e convoy-setup.json ] && [ -n "$(ls -A)" ]; then
  echo "$1 is not empty, and setup did not create it: give another folder with --into, or remove it there"; exit 1
fi
touch convoy-setup.json && mkdir -p packages project
"""
"""First script on a host: checks the tools and creates the folders. $1: setup's folder."""

INSTALL = f"""{_PATH}
cd "$1/packages" || exit 1
exec 3<&0
(
  have=$(../venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  [ "$have" = "$2" ] || uv venv --quiet --clear --python "$2" ../venv || exit
  shift 2
  exec uv pip install --python {PYTHON} "$@" -r requirements.txt -c constraints.txt
) 3<&- </dev/null 2>&1 & child=$!
(cat <&3; kill $child) >/dev/null 2>&1 & watch=$!
wait $child; status=$?
kill $watch; exit $status
"""
"""Second script: installs the packages. $1: setup's folder, $2: Python's version, then options of uv. Ends with its input."""

REMEDY = (
    "correct this and run setup again. To use another disk: --into. Another package index: --index, or wheels of all packages "
    "with --wheels FOLDER --index none. Fewer packages: --requirements"
)


def setup_fleet(
    path: Path, into: str = "convoy", data: Sequence[Path] = (), requirements: Path | None = None,
    wheels: Path | None = None, index: str | None = None, print_lines: bool = False, doctor: bool | None = None,
) -> int:  # fmt: skip
    """Install this environment's packages and the current folder on the hosts of a fleet file. Return the exit status.

    Hosts with a `python` or `folder` that the user wrote into the file are skipped.

    Args:
        into: the parent folder on the hosts; a relative path starts in the user's home.
        data: files and folders of the project to send although git ignores them.
        requirements, wheels, index: see `pack`.
        print_lines: only print the commands.
        doctor: examine the fleet at the end; None: only if packages were installed.

    Raises:
        InputError: an option, file or package cannot be used, or hosts failed. The message names all failed hosts with
            remedies; the others were set up.
    """
    fleet, begin_s = startable(path), time.monotonic()
    if fleet is None:
        raise InputError(f"--fleet {path}: its hosts have no address; give each the `address` by which ssh reaches it")

    def report(text: str) -> None:
        print(f"{time.monotonic() - begin_s:6.1f} s  {text}", flush=True)

    project, ssh = Path.cwd(), ssh_program(os.environ)
    hosts = _to_set_up(fleet, project.name, report)
    root = {host.name: f"{into}/{project.name}-{host.name}" for host in hosts}
    with tempfile.TemporaryDirectory(prefix="convoy-setup-") as scratch, Interrupts() as interrupts:
        pack(Path(scratch), project, data, requirements, wheels, index)
        # PyTorch's own index has a build of torch for each GPU and driver.
        options = ["--torch-backend", "auto"] if index is None else []
        scripts = {host: host_script(host, root[host.name], Path(scratch), project, options, ssh) for host in hosts}
        if print_lines:
            print("\n".join(f"# host {host.name}\n{script}" for host, script in scripts.items()))
            return 0
        try:
            output = _run(scripts, interrupts, report)
        except Signalled as interrupted:
            print("interrupted: the next `convoy fleet setup` continues from here", file=sys.stderr)
            return interrupted.status
    _name_places(path, {name: f"{root[name]}/project" for name, (status, _) in output.items() if status == 0}, report)
    troubles = []
    for host in hosts:
        status, lines = output[host.name]
        if status != 0:
            cure = remedy(host, "\n".join(lines), "sh", ".") if status == 255 else REMEDY
            last = " | ".join([line for line in lines if line][-3:]) or "no message"
            troubles.append(f"host {host.name} ({host.address}): setup failed with status {status}: {last}; {cure}")
    if troubles:
        raise InputError("\n".join(troubles))
    installed = any(line.startswith("Installed ") for _, lines in output.values() for line in lines)
    if not (installed if doctor is None else doctor):
        return 0
    from convoy.doctor.doctor import run_doctor  # slow: it loads torch, which `sent_modules` does not need

    report("the doctor examines all hosts together")
    return run_doctor(path, None, DOCTOR_S)


def sent_modules(fleet: Fleet, project: Path) -> list[Path]:
    """Return the Python files that setup has sent to all hosts, and that must not differ when a script runs."""
    others = [host for host in fleet.hosts if not is_own(str(host.address))]
    if not others or not all((host.folder or "").endswith(f"/{project.name}-{host.name}/project") for host in others):
        return []
    return [Path(path) for path in project_files(project) if path.endswith(".py")]


def host_script(host: Host, root: str, scratch: Path, project: Path, options: Sequence[str], ssh: Sequence[str]) -> str:
    """Return a shell script for this machine that sets up a host. Pure.

    `root`: setup's folder on the host; `scratch`: the folder that `pack` has filled; `options`: of `uv pip install`.
    """
    address = f"[{host.address}]" if ":" in str(host.address) else str(host.address)
    rsync = ["rsync", "--protect-args", "-e", shlex.join(ssh_words(ssh, host))]

    def there(script: str, *words: str) -> list[str]:
        return ssh_call(ssh, host, shlex.join(["sh", "-c", script, "sh", root, *words]))

    # Compare packages by content (-c): a project's wheel is rebuilt each time, and uv reinstalls a file with another date.
    commands = [
        there(BEGIN),
        [*rsync, "-rLcp", f"{scratch}/packages/", f"{address}:{root}/packages/"],
        there(INSTALL, "{}.{}".format(*sys.version_info), *options),
        [*rsync, "-rLpt", "--from0", f"--files-from={scratch}/listing", f"{project}/", f"{address}:{root}/project/"],
    ]
    return "\n".join(["set -e", *map(shlex.join, commands)])


def _to_set_up(fleet: Fleet, project: str, report: Callable[[str], None]) -> list[Host]:
    chosen = []
    for host in fleet.hosts:
        if is_own(str(host.address)):
            report(f"{host.name}: this machine, needs no setup")
        elif (host.python or host.folder) and not (host.folder or "").endswith(f"/{project}-{host.name}/project"):
            report(f"{host.name}: skipped, because its [[host]] names its own python or folder")
        else:
            chosen.append(host)
    return chosen


def _run(
    scripts: Mapping[Host, str], interrupts: Interrupts, report: Callable[[str], None]
) -> dict[str, tuple[int, deque[str]]]:
    """Run the scripts of all hosts in parallel. Return each host's exit status and last lines, by name."""
    output = {host.name: deque[str](maxlen=200) for host in scripts}

    def sink(name: str) -> Callable[[bytes], None]:
        def take(line: bytes) -> None:
            output[name].append(text := line.decode(errors="replace").strip())
            if text and text[0] not in "+-~":  # uv's line for each package
                report(f"{name}: {text}")

        return by_line(take)

    with Supervisor(interrupts) as processes:
        for number, (host, script) in enumerate(scripts.items()):
            # The input stays open, because programs on the host stop when it closes.
            processes.start(
                Start(
                    device=number, name=host.name, command=["sh", "-c", script], stdin=subprocess.PIPE, stdout=sink(host.name),
                    stderr=sink(host.name), own_session=True,
                )
            )  # fmt: skip
        if not processes.listen(lambda: not processes.running, LIMIT_S):
            names = ", ".join(process.start.name for process in processes.running)
            raise InputError(f"hosts not ready after {LIMIT_S:g} s: {names}; run setup again to continue")
        return {ending.name: (ending.status, output[ending.name]) for ending in processes.endings}


def _name_places(path: Path, folders: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Write the python and folder of these hosts into the fleet file."""
    document = tomlkit.parse(read_text(path, "fleet file", "give a fleet file"))
    changed = []
    for table in document.get("host", []):
        folder = folders.get(str(table.get("name")))
        if folder is not None and (table.get("python"), table.get("folder")) != (PYTHON, folder):
            table["python"], table["folder"] = PYTHON, folder
            changed.append(str(table["name"]))
    if changed:
        write_whole(path, tomlkit.dumps(document))
        report(f"wrote python and folder of {', '.join(changed)} into {path}")


# --- packages and files to send ----------------------------------------------------------------------------

MOST_BYTES = 2_000_000_000  # a larger project probably contains data by mistake

BUILDS = re.compile(r"(nvidia|cuda|triton|pytorch-triton|intel|dpcpp|onemkl)(-.*)?|tbb|umf|tcmlib|impi-rt|pip")
"""Packages that are not listed: dependencies of a particular build of torch, and pip."""

_LEFT_OUT = {"__pycache__", "node_modules", "runs"}
_UV_S, _GIT_S = 300.0, 60.0


def pack(
    scratch: Path, project: Path, data: Sequence[Path], names: Path | None, wheels: Path | None, index: str | None
) -> None:
    """Write the folder `packages` and the file `listing` (paths in the project, each ended by a zero byte) into `scratch`.

    Args:
        names: a file of requirements; None: all packages of this environment.
        wheels: a folder of wheels, used before any index.
        index: the package index; "none": only `wheels`; None: the host's configuration.

    Raises:
        InputError: uv is missing here, or an option or file cannot be used.
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
        path.touch(mode=0o600)  # the index's URL may contain a password, which must not appear in a command line
        path.write_bytes(os.fsencode(text))


def requirements_here(folder: Path) -> list[str]:
    """Return the requirements of this environment. Write wheels of packages from local folders and files into `folder`.

    Raises:
        InputError: uv is missing, or cannot build a wheel.
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
            lines.append(f"{name}=={version(name)}")  # built on another machine, as conda's packages are
        else:
            lines.append(line.partition("+")[0] if line.startswith("torch") else line)  # without a label such as +cpu
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
        output = " | ".join(done.stderr.split("\n")[-4:]).strip(" |")
        raise InputError(f"uv {' '.join(words)} failed: {output}; correct this, or uninstall that package here")
    return done.stdout


def project_files(folder: Path) -> list[str]:
    """Return the files to send: tracked ones, and others unless ignored by git, hidden, or in a cache, environment or `runs`.

    Raises:
        InputError: they have more than `MOST_BYTES`.
    """
    tracked = _git_files(folder, "--cached")
    others = list(_walk(folder)) if tracked is None else _git_files(folder, "--others", "--exclude-standard")
    paths = [*(tracked or ()), *(path for path in others or () if not _is_left_out(folder, path))]
    sizes = {path: (folder / path).stat().st_size for path in sorted(paths) if (folder / path).is_file()}
    if (size := sum(sizes.values())) > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise InputError(
            f"the project in {folder} has {size / 1e9:.1f} GB, the largest file is {largest}: the limit without --data is "
            f"{MOST_BYTES / 1e9:g} GB; let git ignore the data, and name the data that the hosts need with --data"
        )
    return list(sizes)


def _git_files(folder: Path, *options: str) -> list[str] | None:
    """Return the files that `git ls-files` lists; None if the folder is in no repository."""
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
    """Return these files and folders as paths relative to the project.

    Raises:
        InputError: a path does not exist, or is not in the project.
    """
    found = []
    for path in named:
        full = Path(os.path.abspath(folder / path))
        if not (os.path.isfile(full) or os.path.isdir(full)) or not full.is_relative_to(folder):
            raise InputError(
                f"--data {shown(path)}: not a file or folder in the project {folder}, where scripts find it on all hosts; link "
                "other data into the project: ln -s FOLDER data"
            )
        found.append(str(full.relative_to(folder)))
    return found
