"""Keeps a full disk under redirected standard output from ending a training: output without room is dropped and counted."""

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)


class PatientFile(io.RawIOBase):
    """A file whose disk may be full for a while. A line in it then says how much is missing.

    Attributes:
        left_out_bytes: since the last successful write.
    """

    def __init__(self, handle: int) -> None:
        self.handle, self.left_out_bytes = handle, 0

    def fileno(self) -> int:
        return self.handle

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        row = bytes(data)
        try:
            if self.left_out_bytes:
                told = f"\n[{self.left_out_bytes:,} bytes are missing here: the disk was full]\n".encode()
                os.write(self.handle, told)
                self.left_out_bytes = 0
            return os.write(self.handle, row)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.left_out_bytes += len(row)
            return len(row)


@contextmanager
def patient_output() -> Iterator[list[PatientFile]]:
    """Replace standard output and errors by patient files if they are regular files; yield these."""
    before, files = (sys.stdout, sys.stderr), []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if _is_file(stream):
            stream.flush()
            files.append(PatientFile(stream.fileno()))
            made = io.TextIOWrapper(
                io.BufferedWriter(files[-1]),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=name == "stderr",
            )
            setattr(sys, name, made)
    try:
        yield files
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream not in before:
                stream.flush()
        sys.stdout, sys.stderr = before


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # a notebook's, or a test's
        return False
