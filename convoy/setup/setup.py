"""`convoy fleet setup`: brings the hosts of a fleet to the state of this machine. A thin front of ssh, rsync and uv."""

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

LIMIT_S = 6 * 3600.0  # for all hosts: gigabytes of CUDA and of data over a slow line
DOCTOR_S = 60.0
PYTHON = "../venv/bin/python"  # of a host, seen from the project's folder there

_PATH = "PATH=$PATH:$HOME/.local/bin:$HOME/.cargo/bin:/usr/local/bin:/opt/homebrew/bin"

BEGIN = f"""{_PATH}
for need in "rsync: apt install rsync" "uv: https://docs.astral.sh/uv"; do
  command -v "${{need%%:*}}" >/dev/null || {{ echo "there is no ${{need%%:*}} (${{need#*: }})"; exit 1; }}
done
mkdir -p "$1" && cd "$1" || exit 1
if [ ! -e convoy-setup.json ] && [ -n "$(ls -A)" ]; then
  echo "$1 is not empty, and not setup's own: give another folder with --into, or remove it there"; exit 1
fi
touch convoy-setup.json && mkdir -p packages project
"""
"""Runs first on a host; $1: the folder."""

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
"""Runs between; $1: the folder, $2: Python's version, then options of uv. It ends with its input: when ssh does."""

REMEDY = (
    "mend that and run setup again. Another disk: --into. Another package index: --index, or wheels of all packages with "
    "--wheels FOLDER --index none. Fewer packages: --requirements"
)


def setup_fleet(
    path: Path, into: str = "convoy", data: Sequence[Path] = (), requirements: Path | None = None,
    wheels: Path | None = None, index: str | None = None, print_lines: bool = False, doctor: bool | None = None,
) -> int:  # fmt: skip
    """Bring the hosts of a fleet file to the state of this machine; return the exit status.

    The project is the current folder. Hosts whose `python` or `folder` a person has named in the file are left as they are.

    Args:
        into: the folder on the hosts in which setup makes one for the project; without a leading / in the user's home.
        data: files and folders of the project that are sent though git ignores them.
        requirements, wheels, index: see `pack`.
        print_lines: change nothing, print what would be done.
        doctor: examine the fleet at the end; None: where packages were installed.

    Raises:
        InputError: an option, file or package that cannot be used; or hosts that failed: names all of them, each with the
            remedy. The others were set up.
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
            print("interrupted: what was begun is finished by the next `convoy fleet setup`", file=sys.stderr)
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
    """Return the Python files of a project that setup has sent to all hosts: they must be the same when a script runs."""
    others = [host for host in fleet.hosts if not is_own(str(host.address))]
    if not others or not all((host.folder or "").endswith(f"/{project.name}-{host.name}/project") for host in others):
        return []
    return [Path(path) for path in project_files(project) if path.endswith(".py")]


def host_script(host: Host, root: str, scratch: Path, project: Path, options: Sequence[str], ssh: Sequence[str]) -> str:
    """Return the lines for a shell here that bring a host to the state of this machine. Pure.

    `root` is setup's folder there, `scratch` as `pack` has filled it; `options` are of `uv pip install`.
    """
    address = f"[{host.address}]" if ":" in str(host.address) else str(host.address)
    rsync = ["rsync", "--protect-args", "-e", shlex.join(ssh_words(ssh, host))]

    def there(script: str, *words: str) -> list[str]:
        return ssh_call(ssh, host, shlex.join(["sh", "-c", script, "sh", root, *words]))

    # Packages by content: a project's wheel is rebuilt each time, and uv reinstalls a file with another date.
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
            report(f"{host.name}: this machine, as it is")
        elif (host.python or host.folder) and not (host.folder or "").endswith(f"/{project}-{host.name}/project"):
            report(f"{host.name}: left as it is, since its [[host]] names a python or folder that is not setup's")
        else:
            chosen.append(host)
    return chosen


def _run(
    scripts: Mapping[Host, str], interrupts: Interrupts, report: Callable[[str], None]
) -> dict[str, tuple[int, deque[str]]]:
    """Run the scripts of all hosts at a time; return the exit status and the last lines of each host, by name."""
    output = {host.name: deque[str](maxlen=200) for host in scripts}

    def sink(name: str) -> Callable[[bytes], None]:
        def take(line: bytes) -> None:
            output[name].append(text := line.decode(errors="replace").strip())
            if text and text[0] not in "+-~":  # uv's line for each package
                report(f"{name}: {text}")

        return by_line(take)

    with Supervisor(interrupts) as processes:
        for number, (host, script) in enumerate(scripts.items()):
            # The input stays open: what runs on the host ends with it.
            processes.start(
                Start(
                    device=number, name=host.name, command=["sh", "-c", script], stdin=subprocess.PIPE, stdout=sink(host.name),
                    stderr=sink(host.name), own_session=True,
                )
            )  # fmt: skip
        if not processes.listen(lambda: not processes.running, LIMIT_S):
            names = ", ".join(process.start.name for process in processes.running)
            raise InputError(f"hosts not ready after {LIMIT_S:g} s: {names}; run setup again, it continues from there")
        return {ending.name: (ending.status, output[ending.name]) for ending in processes.endings}


def _name_places(path: Path, folders: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Write python and folder of hosts into the fleet file, where they are not there yet."""
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


# --- what is sent ------------------------------------------------------------------------------------------

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
        output = " | ".join(done.stderr.split("\n")[-4:]).strip(" |")
        raise InputError(f"uv {' '.join(words)} failed: {output}; mend that, or uninstall that package here")
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
