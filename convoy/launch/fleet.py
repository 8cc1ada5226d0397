"""Starts a job on every host of a fleet and waits for its end."""

import math
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from convoy._version import __version__
from convoy.comm.deadlines import TIMEOUT_S
from convoy.comm.environment import is_own
from convoy.comm.job_key import key_to_start
from convoy.config.checks import check
from convoy.config.run_file import RunSettings
from convoy.config.train_options import key_of
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.fleet import Fleet, read_fleet
from convoy.launch.agent import BEAT_S, Message, digest, from_line, to_line
from convoy.launch.exit_status import Ending, conclude
from convoy.launch.host_job import DEFAULTS, HostJob, JobOptions, host_jobs
from convoy.launch.ssh import remedy, ssh_call, ssh_program
from convoy.launch.supervisor import TERMINATE_S, Interrupts, Signalled, Start, Supervisor, by_line
from convoy.launch.survey import wake
from convoy.plan.presets import AUTO, PLANS

ANSWER_S = 60.0  # limit for a host's answer; ssh usually gives up earlier
_TRANSFER_S = 5.0  # seconds for the last messages of a host, after its devices have ended


def startable(path: Path | None) -> Fleet | None:
    """Return the fleet of a file if all its hosts have addresses; None if none of them has."""
    if path is None:
        return None
    fleet = read_fleet(path)
    without = [host.name for host in fleet.hosts if host.address is None]
    if without and len(without) < len(fleet.hosts):
        raise InputError(
            f"{path}: hosts {', '.join(without)} have no address, the others have: give every host the `address` by which ssh "
            "reaches it, to start all of them from here, or none"
        )
    return None if without else fleet


def train_on_fleet(run: RunSettings, fleet: Fleet) -> int:
    """Run `convoy train` on every device of a fleet. The hosts get the settings as options, not the run file."""
    settings = run.settings
    names = ",".join(name for job in host_jobs(fleet) for name in job.names)
    planned = settings.plan == AUTO
    check(settings.model_copy(update={"devices": names, "fleet": settings.fleet if planned else None}))
    argv, files = ["train"], [] if settings.plan in (*PLANS, AUTO) else [Path(settings.plan)]
    for name, source in run.sources.items():
        value, key = getattr(settings, name), key_of(name)
        # The fleet file started the hosts; only the planner reads it again.
        if source == "default" or value is None or (name == "fleet" and not planned):
            continue
        if isinstance(value, bool):
            argv.append(f"--{key}" if value else f"--no-{key}")
        else:
            argv += [f"--{key}", ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)]
    if planned and settings.fleet is not None:
        files.append(settings.fleet)
    options = JobOptions(port=settings.port, goes_on=settings.recovers)
    return start_on_fleet(fleet, argv, options, files, run.sources["devices"] != "default")


def start_on_fleet(
    fleet: Fleet, argv: Sequence[str], options: JobOptions, files: Sequence[Path], devices_given: bool = False
) -> int:
    """Run a command of convoy on every device of a fleet, as `run_on_fleet` does. Wake its hosts first."""
    if devices_given:
        count = len(fleet.devices)
        raise InputError(f"--devices with a fleet file, which names its {count} devices: leave --devices out")
    wake(fleet.hosts)
    first = host_jobs(fleet)[0].host
    if not is_own(str(first.address)):
        print(f"Device 0 is on host {first.name}: the job writes its files there.", flush=True)
    return run_on_fleet(fleet, argv, options, files=files)


def script_on_fleet(
    fleet: Fleet, script: Sequence[str], options: JobOptions, *, files: Sequence[Path] = (), listen: str | None = None
) -> int:
    """Run `convoy run` on every device of a fleet.

    Args:
        script: arguments of `python`: a script, or -m and a module, with options.
        files: more files that must be the same on every host.
        listen: HOST:PORT on device 0's host for join requests.
    """
    if os.path.isabs(script[0]) and Path.cwd() in Path(script[0]).parents:
        script = [os.path.relpath(script[0]), *script[1:]]  # hosts may have another path to the folder
    own = [] if script[0] == "-m" else [Path(script[0])]
    argv = ["run", *([] if listen is None else ["--listen", listen]), *(["--"] if own else []), *script]
    return start_on_fleet(fleet, argv, options, [*own, *(path for path in files if path not in own)])


# ------------------------------------------------------------------------------------------- the job on its hosts


def run_on_fleet(fleet: Fleet, argv: Sequence[str], options: JobOptions = DEFAULTS, files: Sequence[Path] = ()) -> int:
    """Run ``python -m convoy argv`` once per device, each on its host, as one job, and wait for all of them.

    Hosts are reached by ssh, except this machine. Every device finds its rank in torchrun's variables and its hardware in
    CONVOY_DEVICE. Device 0's output is printed here; other devices' output is printed only if it explains a failure.

    Args:
        fleet: all hosts must have an address.
        files: files in `argv` that must be on every host, at the same path and with the same content.

    Returns:
        0 after success, 2 if devices ended with a printed error, 128 + n after signal n: 130 after Ctrl-C.

    Raises:
        InputError, MismatchError: hosts cannot be used, or the port is taken. No device was started.
        DeviceLostError: a device crashed or was killed, or its host was lost; the message names it.
    """
    key = key_to_start(os.environ)
    with Interrupts() as interrupts, _Hosts(host_jobs(fleet), options, interrupts) as hosts:
        try:
            address, port = hosts.prepare(files, options.port)
            hosts.start(
                argv=list(argv), total=len(fleet.devices), address=address, port=port, grace_s=options.grace_s,
                logs=None if options.logs is None else str(options.logs), key=None if key is None else key.pem.decode(),
                goes_on=options.goes_on,
            )  # fmt: skip
            hosts.follow()
        except Signalled as interrupted:
            with suppress(Signalled):  # a second one: no more waiting
                after_step = options.goes_on and interrupted.after_step
                if after_step:
                    print(interrupted.text(len(hosts.running)), file=sys.stderr, flush=True)
                hosts.end(interrupt=not after_step, after_step=after_step)
                hosts.follow()
            return interrupted.status
    return conclude(hosts.endings, hosts.lost, goes_on=options.goes_on)


class _Session:
    """The session with one host: a process (ssh or local) that runs the agent. Its number is the host's first rank.

    A local agent gives the file descriptors in `terminal` to device 0; None: its output comes in messages.
    """

    def __init__(self, processes: Supervisor, job: HostJob, take: Callable[["_Session", Message | None], None]) -> None:
        """Start the process. `take` receives every message. Raise InputError if there is no such program."""
        self.job, host = job, job.host
        self.title = f"host {host.name} ({host.address})"
        self.local = is_own(str(host.address))
        self.terminal = (os.dup(1), os.dup(2)) if self.local and 0 in job.ranks else None
        folder = str(Path.home() / host.folder) if self.local and host.folder else None
        command = [host.python or sys.executable, "-m", "convoy.launch.agent"]
        if not self.local:  # for a host's login shell: only quotes, && and exec, which all common shells support
            change = f"cd {shlex.quote(host.folder or os.getcwd())} && exec {shlex.join(command)}"
            command = ssh_call(ssh_program(os.environ), host, change)

        def take_line(line: bytes) -> None:
            if (message := from_line(line)) is not None:
                take(self, message)
            else:
                self._process.keep(line + b"\n")

        try:
            self._process = processes.start(
                Start(
                    device=job.ranks[0], name=self.title, command=command, folder=folder, stdin=subprocess.PIPE,
                    stdout=by_line(take_line), pass_fds=self.terminal or (), own_session=True,
                )
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                f"host {host.name}: cannot start {command[0]!r}{f' in {folder}' if folder else ''}: {error.strerror}; "
                f"{'correct python and folder of the host' if self.local else 'install an ssh client, or correct CONVOY_SSH'}"
            ) from None
        finally:
            for file in self.terminal or ():
                os.close(file)

    @property
    def problem(self) -> str:
        """Why the process ended, and the remedy."""
        lines = [line for line in self._process.lines() if line]
        last = f": {' | '.join(lines[-3:])}" if lines else ""
        status = self._process.popen.returncode
        if self.local:
            return f"it ended with status {status}{last}; correct its python and folder"
        fix = remedy(self.job.host, "\n".join(lines[-20:]), sys.executable, os.getcwd())
        return f"ssh ended with status {status}{last}; {fix}"

    def send(self, kind: str, **fields: object) -> None:
        assert self._process.popen.stdin is not None
        with suppress(OSError):  # the agent has ended; the end of its messages is handled elsewhere
            os.write(self._process.popen.stdin.fileno(), to_line(kind, **fields))

    def hang_up(self) -> None:
        """Close the agent's input, so that it ends its devices and itself."""
        assert self._process.popen.stdin is not None
        self._process.popen.stdin.close()


class _Hosts:
    """The sessions with all hosts of a fleet, starting with device 0's. Leaving the context ends all processes.

    `running` are the devices whose end was not reported yet.
    """

    def __init__(self, jobs: Sequence[HostJob], options: JobOptions, interrupts: Interrupts) -> None:
        self.endings: list[Ending] = []
        self.lost: DeviceLostError | None = None
        self.running = {rank for job in jobs for rank in job.ranks}
        self._sessions: dict[int, _Session] = {}  # by first rank
        self._inbox: deque[tuple[_Session, Message | None]] = deque()  # None: end of messages
        self._processes = Supervisor(
            interrupts, lambda ending: self._inbox.append((self._sessions[ending.device], None))
        )
        self._jobs, self._goes_on = jobs, options.goes_on
        self._end_s = options.grace_s + 2 * TERMINATE_S + _TRANSFER_S
        self._deadline_s = math.inf
        self._beat_s = time.monotonic()

    def __enter__(self) -> "_Hosts":
        try:
            for job in self._jobs:
                self._sessions[job.ranks[0]] = _Session(self._processes, job, lambda *got: self._inbox.append(got))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._processes, suppress(Signalled):
            for session in self._sessions.values():
                session.hang_up()
            # After an error or a second Ctrl-C, do not wait until the agents have ended their devices.
            self._processes.listen(lambda: not self._processes.running, 0.5 if self.running else _TRANSFER_S)

    def prepare(self, files: Sequence[Path], port: int | None) -> tuple[str, int]:
        """Compare versions and files on all hosts before any device starts.

        Return the rendezvous: the address of device 0's host on its route to the others, and a free port.
        """
        sessions = list(self._sessions.values())
        answers = self._ask(sessions, "check", "here", files=[str(path) for path in files])
        versions = {session.title: answer["version"] for session, answer in answers.items()}
        if found := ", ".join(f"{each} on {title}" for title, each in versions.items() if each != __version__):
            raise MismatchError(
                f"the hosts do not have the same Convoy: {__version__} here, but {found}. Install the same version "
                "everywhere, as `convoy fleet setup` does"
            )
        problems = []
        for path in files:
            for session, answer in answers.items():
                if (other := answer["digests"][str(path)]) != digest(path):
                    what = "is not there" if other is None else "is another file there"
                    problems.append(
                        f"{session.title}: {path} {what}, in {answer['folder']}: all hosts need it at the same path; "
                        "`convoy fleet setup` brings it, or copy it"
                    )
        if problems:
            raise InputError("\n".join(problems))
        first, *others = sessions
        # A host's address is that of its ssh server; this machine's is the client address of the connection.
        known = [answers[first]["client"] if session.local else answers[session]["server"] for session in others]
        peers = [address or str(session.job.host.address) for address, session in zip(known, others, strict=True)]
        met = self._ask([first], "meet", "met", peers=peers, port=port)[first]
        return str(met["address"]), int(met["port"])

    def _ask(
        self, sessions: Sequence[_Session], question: str, answer: str, **fields: object
    ) -> dict[_Session, Message]:
        """Return the answers of some hosts. Raise InputError with all hosts that did not answer, and why."""
        for session in sessions:
            session.send(question, **fields)
        answers: dict[_Session, Message] = {}
        problems = dict.fromkeys(sessions, f"did not answer within {ANSWER_S:g} s")
        deadline_s = time.monotonic() + ANSWER_S
        waiting = set(sessions)
        while waiting and (got := self._next(deadline_s)) is not None:
            session, message = got
            if message is None or message["convoy"] == "refused":
                problems[session] = session.problem if message is None else str(message["text"])
                waiting.discard(session)
            elif message["convoy"] == answer:
                answers[session] = message
                problems.pop(session)
                waiting.discard(session)
        if problems:
            raise InputError("\n".join(f"{session.title}: {problem}" for session, problem in problems.items()))
        return {session: answers[session] for session in sessions}

    def start(self, **order: object) -> None:
        for session in self._sessions.values():
            job = session.job
            own = {"ranks": job.ranks, "names": job.names, "own": job.own, "titles": [*map(job.title, job.ranks)]}
            session.send("start", **order, **own, terminal=session.terminal)

    def follow(self) -> None:
        """Print the output of the first device until all devices have ended, or until the deadline."""
        while self.running and (got := self._next(self._deadline_s)) is not None:
            self._take(*got)

    def end(self, *, interrupt: bool = False, after_step: bool = False) -> None:
        """Let all hosts end their devices before a deadline: interrupted first, or after the step."""
        self._deadline_s = time.monotonic() + self._end_s + after_step * TIMEOUT_S
        for session in self._sessions.values():
            session.send("end", interrupt=interrupt, after_step=after_step, started=len(self.running))

    def _take(self, session: _Session, message: Message | None) -> None:
        failed = False
        if message is None or message["convoy"] == "refused":
            why = session.problem if message is None else str(message["text"])
            # All devices of the host are lost with it.
            left = self.running.intersection(session.job.ranks)
            self.running -= left
            if left and self.lost is None and self._deadline_s == math.inf:
                rank = min(left)
                title = f"device {rank} ({session.job.title(rank)})"
                self.lost = DeviceLostError(rank, f"{title} was lost with its host: {why}")
            failed = bool(left) and not self._goes_on
        elif message["convoy"] == "text":
            stream = sys.stdout if message["stream"] == "stdout" else sys.stderr
            stream.write(message["text"])
            stream.flush()
        elif message["convoy"] == "ended":
            ending = Ending(**{field.name: message[field.name] for field in fields(Ending)})
            self.endings.append(ending)
            self.running.discard(ending.device)
            failed = ending.in_startup or (ending.status != 0 and not self._goes_on)
        if failed and self._deadline_s == math.inf:
            self.end()

    def _next(self, deadline_s: float) -> tuple[_Session, Message | None] | None:
        """Return the next message of any host, or None at the deadline. Send heartbeats while waiting."""
        while True:
            now_s = time.monotonic()
            if now_s >= self._beat_s:
                for session in self._sessions.values():
                    session.send("beat")
                self._beat_s = now_s + BEAT_S
            if self._processes.listen(lambda: self._inbox, min(self._beat_s, deadline_s) - now_s):
                return self._inbox.popleft()
            if time.monotonic() >= deadline_s:
                return None
