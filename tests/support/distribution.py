"""Check that the published archives hold the right files: `python -m tests.support.distribution dist`."""

import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import convoy

ROOT = Path(__file__).resolve().parent.parent.parent


def package_files() -> set[str]:
    found = (path for path in (ROOT / "convoy").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(ROOT)) for path in found}


def check(folder: Path) -> None:
    """
    Raises:
        AssertionError: says what is missing, or too much.
    """
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        meta = next(name for name in names if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(meta).decode())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == package_files(), f"{wheel.name}: {sorted(inside ^ package_files())}"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert told["Name"] == "convoy-train"
    assert told["Version"] == convoy.__version__
    assert told["Requires-Python"] == ">=3.11"
    assert told["License-Expression"] == "MIT"
    assert {"digits", "images", "models", "plots", "tensorboard"} <= set(told.get_all("Provides-Extra"))
    with tarfile.open(sdist) as source:
        parts = {name.partition("/")[2] for name in source.getnames()}
    for needed in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "SECURITY.md",
        "LICENSE",
        "constraints.txt",
    ):
        assert needed in parts, f"{sdist.name} has no {needed}"
    assert package_files() <= parts
    print(f"{wheel.name} and {sdist.name} are whole: {len(inside)} files of the package, version {told['Version']}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
