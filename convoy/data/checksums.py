"""Checksum files beside data: `SHA256SUMS` or `MD5SUMS`, as `sha256sum` and `md5sum` write them."""

import re
from collections.abc import Sequence
from pathlib import Path

from convoy.data.fetch import digest
from convoy.errors import DataError

_SUMS = {"SHA256SUMS": "sha256", "MD5SUMS": "md5"}


def check_sums(folder: Path, names: Sequence[str]) -> None:
    """Compare files of a folder with each checksum file that stands beside them; none is no error.

    Raises:
        DataError: a checksum differs or is not listed, or a line cannot be read.
    """
    for sums_name, algorithm in _SUMS.items():
        sums_path = folder / sums_name
        if not sums_path.is_file():
            continue
        listed = _listed_sums(sums_path)
        unlisted = [name for name in names if name not in listed]
        if unlisted:
            raise DataError(
                f"{sums_path} has no checksum of {', '.join(unlisted)}: write it anew in that folder "
                f"({algorithm}sum *.bin > {sums_name}), or remove it"
            )
        for name in names:
            met = digest(folder / name, algorithm)
            if met != listed[name]:
                raise DataError(
                    f"{folder / name} has the {algorithm} {met}, and {sums_name} says {listed[name]}: fetch the file "
                    f"again, or correct {sums_name} if the file is meant to be another one"
                )


def _listed_sums(path: Path) -> dict[str, str]:
    """Checksums by file name."""
    listed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-fA-F]+) [ *](?:\./)?(.+)", line)
        if match is None:
            raise DataError(f"{path}, line {number}: {line!r} is not '<checksum>  <file name>'; write the file anew")
        listed[match[2]] = match[1].lower()
    return listed
