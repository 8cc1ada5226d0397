"""Writing files so that no half of one is ever seen."""

import os
from pathlib import Path

from convoy.errors import InputError


def write_whole(path: Path, text: str) -> None:
    """All of a file or nothing of it; an older one of that name is replaced.

    Raises:
        InputError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name a file in a folder that you may write") from None
    finally:
        fresh.unlink(missing_ok=True)
