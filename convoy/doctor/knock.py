"""One connection tried, and how it ended: the kinds of failure have different causes, and different cures."""

import errno
import socket
from contextlib import suppress

from convoy.doctor.facts import Reach

_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)
"""Linux gives the last four for routes of the kinds blackhole and prohibit, and for a missing address family."""


def knock(host: str, port: int, limit_s: float) -> tuple[Reach, socket.socket | None]:
    """Connect, or say why not. The socket is the caller's to close, and has the limit as its timeout.

    Args:
        host: a name or an address; a name that is unknown counts as no route.
    """
    try:
        visit = socket.create_connection((host, port), timeout=limit_s)
    except TimeoutError:
        return Reach.SILENT, None
    except ConnectionError:
        return Reach.REFUSED, None
    except OSError as error:
        # An unknown name has an errno of another kind (EAI_...), negative on Linux.
        known = error.errno is not None and error.errno > 0
        return (Reach.NO_ROUTE if not known or error.errno in _NO_WAY else Reach.SILENT), None
    with suppress(OSError):
        visit.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Reach.OPEN, visit
