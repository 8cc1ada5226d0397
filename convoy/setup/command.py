"""`convoy setup`: all hosts of a fleet at a time, their places in the fleet file, and the doctor at the end."""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import tomlkit

from convoy.comm.environment import is_own
from convoy.errors import ConvoyError, InputError
from convoy.files import read_text, write_whole
from convoy.fleet import Fleet, Host
from convoy.launch.fleet import startable
from convoy.launch.ssh import by_hand
from convoy.launch.supervisor import POLL_S, Interrupted, Interrupts, Supervisor
from convoy.setup.actions import Action, Command, Own, actions, amount, shell_lines
from convoy.setup.packages import packages_here
from convoy.setup.session import There
from convoy.setup.state import Found, Piece, Wish
from convoy.setup.tree import data_files, piece, pieces, project_files

MOST_HOSTS = 32
"""That are set up at a time."""

DOCTOR_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Of the command.

    Attributes:
        into: the folder on the hosts in which setup makes one for the project; without a leading / in the user's home.
        data: files and folders of the project that are sent though git ignores them.
        requirements: a file that names packages; None: all of this environment.
        wheels: a folder of wheels that packages are taken from before any index.
        index: the package index; "none": only `wheels`; None: as each host is configured.
        print_lines: change nothing, print what would be done.
        doctor: examine the fleet at the end; None: where packages were installed.
    """

    into: str = "convoy"
    data: tuple[Path, ...] = ()
    requirements: Path | None = None
    wheels: Path | None = None
    index: str | None = None
    print_lines: bool = False
    doctor: bool | None = None


class _Stop(Interrupts):
    """Tells the threads of the hosts to stop."""

    asked = False

    def check(self) -> None:
        if self.asked:
            raise InputError("interrupted")


class _Told:
    """Prints lines of several threads, each with the time since the beginning."""

    def __init__(self) -> None:
        self._begin_s, self._lock = time.monotonic(), threading.Lock()

    def __call__(self, text: str) -> None:
        with self._lock:
            print(f"{time.monotonic() - self._begin_s:6.1f} s  {text}", flush=True)


def setup_fleet(path: Path, options: Options) -> int:
    """Bring the hosts of a fleet file to the state of this machine; the exit status.

    The project is the current folder. Hosts whose `python` or `folder` a person has named in the file are left as they are.

    Raises:
        InputError: an option, file or package that cannot be used; or hosts that failed: names all of them, each with the
            remedy. The others were set up.
    """
    fleet = startable(path)
    if fleet is None:
        raise InputError(f"--fleet {path}: its hosts have no address; give each the `address` by which ssh reaches it")
    project, told = Path.cwd(), _Told()
    hosts = _to_set_up(fleet, project.name, told)
    with tempfile.TemporaryDirectory(prefix="convoy-setup-") as scratch, Interrupts() as interrupts:
        try:
            wish, here = _wish(options, Path(scratch), told)
            jobs = {
                host.name: _Job(host, f"{options.into}/{project.name}-{host.name}", kinds, told)
                for host, kinds in hosts
            }
            found = _all(jobs, lambda job, stop: job.look(wish, stop), interrupts)
            if not options.print_lines:
                _name_places(path, found, told)
            wish, files = _with_project(wish, project, options.data, told)
            here["project"] = files
            done = _all(jobs, lambda job, stop: job.bring(wish, here, options.print_lines, stop), interrupts)
        except Interrupted as interrupted:
            print("interrupted: what was begun is finished by the next `convoy setup`", file=sys.stderr)
            return interrupted.status
    if options.print_lines:
        return 0
    if not any(done.values()):
        told("every host has all of it already")
    installed = any(isinstance(action, Command) for todo in done.values() for action in todo)
    if not (installed if options.doctor is None else options.doctor):
        return 0
    from convoy.doctor.command import run_doctor

    told("the doctor looks at all hosts together")
    return run_doctor(path, None, DOCTOR_S)


def sent_modules(fleet: Fleet, project: Path) -> list[Path]:
    """Python files of a project that setup has sent to all hosts of a fleet: they must be the same there when a script runs."""
    others = [host for host in fleet.hosts if not is_own(str(host.address))]
    if not others or not all((host.folder or "").endswith(f"/{project.name}-{host.name}/project") for host in others):
        return []
    return [Path(path) for path in project_files(project) if path.endswith(".py")]


def _to_set_up(fleet: Fleet, project: str, told: _Told) -> list[tuple[Host, list[str]]]:
    """The hosts that setup makes ready, with the kinds of their devices."""
    chosen = []
    for host in fleet.hosts:
        own = f"/{project}-{host.name}"
        if is_own(str(host.address)):
            told(f"{host.name}: this machine, as it is")
        elif (host.python and not host.python.endswith(f"{own}/venv/bin/python")) or (
            host.folder and not host.folder.endswith(f"{own}/project")
        ):
            told(f"{host.name}: left as it is, since its [[host]] names a python or folder that is not setup's")
        else:
            chosen.append((host, [fleet.devices[rank].kind for rank in fleet.devices_on(host.name)]))
    return chosen


def _wish(options: Options, scratch: Path, told: _Told) -> tuple[Wish, dict[str, dict[str, Path]]]:
    """What the hosts shall have, but for the project; and the files to send of it."""
    packages = packages_here(scratch, options.requirements)
    extra = sorted(options.wheels.glob("*.whl")) if options.wheels is not None else []
    if options.wheels is not None and not extra:
        raise InputError(
            f"--wheels {options.wheels}: there are no wheels; make some, e.g. pip wheel -w {options.wheels} torch"
        )
    if options.index == "none" and not extra:
        raise InputError(
            "--index none without --wheels: the packages must come from somewhere; give a folder of wheels"
        )
    made = {name: piece(path.parent, path.name) for name, path in packages.wheels.items()}
    wish = Wish(
        python="{}.{}".format(*sys.version_info), packages=packages.pinned, torch=packages.torch, direct=packages.direct,
        wheels=made, extra=tuple(piece(path.parent, path.name) for path in extra), index=options.index,
    )  # fmt: skip
    count = len(wish.packages) + len(wish.torch) + len(wish.wheels)
    told(f"this machine: Python {wish.python}, torch {wish.torch.get('torch', 'none')}, {count} packages")
    if packages.left_out:
        few = ", ".join(packages.left_out[:3])
        told(
            f"left out: {len(packages.left_out)} packages of this system, such as {few}; --requirements names what is needed"
        )
    return wish, {"wheels": {path.name: path for path in (*packages.wheels.values(), *extra)}}


def _with_project(wish: Wish, project: Path, data: Sequence[Path], told: _Told) -> tuple[Wish, dict[str, Path]]:
    """With the project's files as they are now."""
    own, named = project_files(project), data_files(project, data)
    found: tuple[Piece, ...] = pieces(project, [*own, *named])
    size = amount(sum(each.size_bytes for each in found))
    told(f"project {project.name}: {len(found):,} files, {size}{', data included' if named else ''}")
    return replace(wish, project=found), {each.path: project / each.path for each in found}


class _Job:
    """One host."""

    def __init__(self, host: Host, root: str, kinds: Sequence[str], told: _Told) -> None:
        self.host, self._root, self._kinds = host, root, kinds
        self._tell: Callable[[str], None] = lambda text: told(f"{host.name}: {text}")

    def look(self, wish: Wish, stop: Interrupts) -> Found:
        """What the host has; refuses at once what cannot be set up."""
        with Supervisor(stop) as processes:
            found = There(processes, stop, self.host, self._root, self._tell).look(wish.python)
        actions(wish, found, self._kinds)
        return found

    def bring(
        self, wish: Wish, here: Mapping[str, Mapping[str, Path]], print_lines: bool, stop: Interrupts
    ) -> tuple[Action, ...]:
        """Do all that is to be done there, or print it; all that."""
        with Supervisor(stop) as processes:
            there = There(processes, stop, self.host, self._root, self._tell)
            found = there.compared(there.look(wish.python), wish)
            todo = actions(wish, found, self._kinds)
            if print_lines:
                lines = [line for action in todo for line in shell_lines(action, by_hand(self.host))]
                print(
                    "\n".join([f"# on host {self.host.name}: {'nothing to do' if not lines else found.root}", *lines])
                )
                return todo
            if not todo:
                self._tell("has all of it")
                return ()
            there.own(found)
            for action in todo:
                if not isinstance(action, Own):
                    self._tell(action.title)
                there.do(action, found, here)
            left = actions(wish, there.look(wish.python), self._kinds)
            if left:
                raise InputError(f"after all that, {left[0].title} was still to be done; see what its index gave")
            self._tell(f"ready: {found.python}")
            return todo


def _all(jobs: Mapping[str, _Job], do: Callable[[_Job, Interrupts], T], interrupts: Interrupts) -> dict[str, T]:
    """Do it for all hosts at a time; what came of it.

    Raises:
        Interrupted: this process was asked to end. Nothing of it runs any more.
        InputError: some failed. The others are done.
    """
    stop = _Stop()
    results: dict[str, Future[T]] = {}
    with ThreadPoolExecutor(min(MOST_HOSTS, len(jobs) or 1), thread_name_prefix="convoy-setup") as threads:
        try:
            for name, job in jobs.items():
                results[name] = threads.submit(do, job, stop)
            while wait(results.values(), POLL_S).not_done:
                interrupts.check()
        except BaseException:
            stop.asked = True
            raise
    troubles = []
    for name, result in results.items():
        error = result.exception()
        if error is not None and not isinstance(error, ConvoyError | OSError):
            raise error
        if error is not None:
            troubles.append(f"host {name} ({jobs[name].host.address}): {error}")
    if troubles:
        raise InputError("\n".join(troubles))
    return {name: result.result() for name, result in results.items()}


def _name_places(path: Path, found: Mapping[str, Found], told: _Told) -> None:
    """Write each host's python and folder into the fleet file, where they do not stand there."""
    document = tomlkit.parse(read_text(path, "fleet file", "give a fleet file"))
    changed = []
    for table in document.get("host", []):
        there = found.get(str(table.get("name")))
        if there is not None and (table.get("python"), table.get("folder")) != (there.python, there.project):
            table["python"], table["folder"] = there.python, there.project
            changed.append(str(table["name"]))
    if changed:
        write_whole(path, tomlkit.dumps(document))
        told(f"wrote python and folder of {', '.join(changed)} into {path}")
