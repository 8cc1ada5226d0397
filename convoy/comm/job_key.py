"""Create, store and pass on the key of a job. Processes without the key are rejected.

A key is a private key with a self-signed certificate, in PEM format. All devices of a job have the same key, and accept only
its certificate. `key_of_process` reads it from one of:

    a pipe           from Convoy's launchers, which put its file descriptor into the environment
    a key file       from `convoy fleet key FILE`, readable only by its owner; named by --job-key or CONVOY_JOB_KEY
    the user's file  on this machine, created at first use; only for jobs on one machine
"""

import os
import ssl
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from convoy.comm.environment import ProcessEnv, is_own_machine
from convoy.errors import InputError
from convoy.files import cache_folder

KEY_FILE = "CONVOY_JOB_KEY"  # environment variable: file with the job's key
KEY_PIPE = (
    "CONVOY_JOB_KEY_PIPE"  # environment variable: file descriptor of the pipe with the key, which can be read once
)
TRUST = "CONVOY_TRUST_NETWORK"  # environment variable: if 1, connections are neither authenticated nor encrypted
MAX_BYTES = 16_384  # largest key file. Pipes can buffer this much on every system

_received: "JobKey | None" = None  # the key from the pipe, which can be read only once

_used: "JobKey | None" = None  # the key of the previous rendezvous


@dataclass(frozen=True, repr=False)
class JobKey:
    """A job's private key and certificate. Its repr does not contain them."""

    pem: bytes

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the TLS contexts (server, client): TLS 1.3, mutual authentication, no session resumption."""
        try:
            return self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        except (ValueError, OSError):  # ssl's errors could quote the file, so they are not shown
            raise InputError(
                "the job key is not a key with a certificate: make one with `convoy fleet key FILE`"
            ) from None

    @property
    def certificate(self) -> bytes:
        """The certificate as DER, to compare with that of the peer."""
        return ssl.PEM_cert_to_DER_cert(self.pem[self.pem.index(b"-----BEGIN CERTIFICATE") :].decode("ascii"))

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is compared
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session resumption: recorded traffic cannot be replayed
        # OpenSSL reads keys only from files: use pipes, which never write to the disk. It reads each argument once.
        first, second = hand_over(self.pem), hand_over(self.pem)
        try:
            context.load_cert_chain(f"/dev/fd/{first}", f"/dev/fd/{second}")
        finally:
            os.close(first)
            os.close(second)
        context.load_verify_locations(cadata=self.certificate)
        return context


def make_key() -> JobKey:
    """Create a key. It does not expire, because the clocks of a job's machines may differ."""
    from cryptography import x509  # 60 ms, and only launchers need it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "convoy job")])
    certificate = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return JobKey(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem))


def write_key_file(path: Path, key: JobKey | None = None) -> None:
    """Write a key, by default a new one, into a new file that only its owner can read."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{path} exists already: a job may use it. Give another name, or remove it first") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give a file in your own folder") from None
    with os.fdopen(file, "wb") as opened:
        opened.write((key or make_key()).pem)


def read_key_file(path: Path) -> JobKey:
    """Read a key file. InputError: there is none, others may read it, or it is not a key."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(
            f"the job key {path} cannot be read: {error.strerror}; make one with `convoy fleet key {path}` and copy it to "
            "every machine of the job, with scp -p or its --to and --from"
        ) from None
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise InputError(
                f"the job key {path} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}: you must be its "
                f"owner, and only you may read it; chmod 600 {path}"
            )
        key = JobKey(opened.read(MAX_BYTES))
    key.contexts()
    return key


def machine_key() -> JobKey:
    """Return this user's key for jobs on this machine. Create it at first use."""
    path = cache_folder() / "this-machine.key"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                write_key_file(Path(folder) / "key")
                with suppress(FileExistsError):  # another process was first: use its key
                    os.link(Path(folder) / "key", path)
        except OSError as error:
            raise InputError(
                f"cannot write this machine's key to {path}: {error.strerror}; set XDG_CACHE_HOME to a writable folder, or "
                f"give a key: --job-key FILE, or {KEY_FILE}=FILE"
            ) from None
    return read_key_file(path)


def key_to_start(environment: Mapping[str, str]) -> JobKey | None:
    """Return the key for the processes that a launcher starts: the key file's, else a new one. None: a trusted network."""
    choose(environment.get(KEY_FILE), environment.get(TRUST) == "1", {})
    if environment.get(TRUST) == "1":
        return None
    return read_key_file(Path(environment[KEY_FILE])) if environment.get(KEY_FILE) else make_key()


def choose(file: str | Path | None, trust: bool, environment: MutableMapping[str, str]) -> None:
    """Copy the options --job-key and --trust-network into the environment, for this process and its children."""
    if file and trust:
        raise InputError(
            f"both a job key ({file}) and a trusted network: the first encrypts everything, the second nothing; remove "
            f"--job-key ({KEY_FILE}) or --trust-network ({TRUST})"
        )
    if file:
        read_key_file(Path(file))
        environment[KEY_FILE] = str(Path(file).absolute())
    if trust:
        environment[TRUST] = "1"


def need_key_file(option: str, environment: Mapping[str, str]) -> None:
    """Raise InputError if an option needs a key file and none was chosen."""
    if not environment.get(KEY_FILE):
        rule = "joining devices prove themselves by it; make one with `convoy fleet key FILE`, for both machines"
        raise InputError(f"{option} without --job-key: {rule}")


def hand_over(content: bytes) -> int:
    """Write a key's PEM into a new pipe. Return its read end, for one process that gets the number in `KEY_PIPE`."""
    reading, writing = os.pipe()
    try:
        os.write(writing, content)
    finally:
        os.close(writing)
    return reading


def take_over(environment: MutableMapping[str, str]) -> JobKey | None:
    """Return the key from the launcher's pipe, if any. The first call reads it."""
    global _received
    # Remove the variable: in a child process the number would mean another file.
    number = environment.pop(KEY_PIPE, "")
    if number.isdecimal():
        with suppress(OSError):
            pipe = int(number)
            if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                with os.fdopen(pipe, "rb") as opened:
                    _received = JobKey(opened.read(MAX_BYTES))
    return _received


def key_of_process(env: ProcessEnv, environment: Mapping[str, str]) -> JobKey | None:
    """Return this process's key. None: the user trusts the network."""
    global _used
    taken = take_over(os.environ)
    if taken is None and environment.get(TRUST) == "1":
        return None
    if taken is not None:
        _used = taken
    elif path := environment.get(KEY_FILE):
        _used = read_key_file(Path(path))
    elif _used is None and is_own_machine(env):
        _used = machine_key()
    if _used is not None:
        return _used
    raise InputError(
        f"this job has no key, and its {env.devices} devices, which meet at {env.host}, seem to be on several machines. On "
        f"one set LOCAL_WORLD_SIZE={env.devices}; on several make a key with `convoy fleet key FILE`, copy it to all, and give "
        f"--job-key FILE, {KEY_FILE}=FILE or convoy.join(key=...). If you trust the network: --trust-network, or {TRUST}=1"
    )
