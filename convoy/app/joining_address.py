"""Where a training lets others join: the texts of addresses, as people give them and as they are told."""

from collections.abc import Sequence

from convoy.config.settings import Settings
from convoy.errors import InputError, shown


def read_door(text: str) -> tuple[str, int]:
    """HOST:PORT, as a job prints it.

    Raises:
        InputError: it is no such text.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(
            f"{shown(text)} is no address of a job: give HOST:PORT, as the job prints it, e.g. 192.168.1.5:7000"
        )
    host = host.strip("[]")
    if host in ANY:
        raise InputError(
            f"{shown(text)} means all addresses of this machine, and others must be told one that they reach: give that, e.g. "
            "192.168.1.5:7000"
        )
    return host, int(port)


ANY = ("0.0.0.0", "::", "*")

MOST_TOLD = 4


def told_doors(doors: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that a person is told: of each host the first, then others; at most `MOST_TOLD`."""
    first = {host: (host, port) for host, port in reversed(doors)}
    return sorted(doors, key=lambda door: first[door[0]] != door)[:MOST_TOLD]


def doors_text(doors: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{port}" if ":" not in host else f"[{host}]:{port}" for host, port in doors)


def listening(settings: Settings) -> tuple[str, int]:
    """Address and port of `--listen`; port 0: a free one."""
    assert settings.listen is not None
    if ":" in settings.listen:
        return read_door(settings.listen)
    read_door(f"{settings.listen}:1")  # refuses what is no address
    return settings.listen, 0
