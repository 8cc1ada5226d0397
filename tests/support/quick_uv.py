"""A fast offline stand-in for uv: lists packages, builds wheels and environments, unpacks wheels.

It runs as a program of its own, with the standard library only, and knows no more than what `convoy fleet setup` asks of uv.
QUICK_UV_FREEZE is what it lists. QUICK_UV_SLOW: seconds that an installation takes.
"""

import os
import re
import sys
import time
import venv
import zipfile
from pathlib import Path


def build(folder: Path, into: Path) -> None:
    """Build a wheel of a folder's Python files, under its name and version 1."""
    with zipfile.ZipFile(into / f"{folder.name.replace('-', '_')}-1-py3-none-any.whl", "w") as archive:
        for path in sorted(folder.rglob("*.py")):
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(folder))), path.read_bytes())


def install(python: Path) -> None:
    """Unpack the wheels in requirements.txt, given by path or as name==version in this folder, unless unchanged."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    count = 0
    for line in Path("requirements.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        stem = f"{re.sub('[-.]+', '_', name)}-{version or '*'}-*.whl"
        wheels = [Path(line)] if line.startswith("./") else [] if line.startswith("-") else sorted(Path().glob(stem))
        if not wheels and line and not line.startswith("-"):
            sys.exit(f"error: No solution found: {line} is in no index")
        for wheel in wheels:
            mark = site / f"{wheel.name}.{wheel.stat().st_mtime_ns}"
            if not mark.exists():
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(site)
                mark.touch()
                print(f" + {wheel.name}")
                count += 1
    print(f"Installed {count} packages in 1ms" if count else "Audited packages in 1ms")


def main(*words: str) -> None:
    match words:
        case "pip", "freeze", *_:
            print(os.environ["QUICK_UV_FREEZE"])
        case "build", *_:
            build(Path(words[-1]), Path(words[words.index("--out-dir") + 1]))
        case "venv", *_:
            assert words[1:4] == ("--quiet", "--clear", "--python")
            venv.create(words[-1], clear=True, symlinks=True)
        case "pip", "install", "--python", python, *_:
            assert words[-4:] == ("-r", "requirements.txt", "-c", "constraints.txt")
            time.sleep(float(os.environ.get("QUICK_UV_SLOW", "0")))
            install(Path(python))
        case _:
            sys.exit(f"error: {words} is nothing that setup asks")


def wheel(folder: Path, name: str, version: str, **files: str) -> Path:
    """A wheel without dependencies. `files` are modules: name and text."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    contents = {f"{module}.py": text for module, text in files.items()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in contents.items():
            archive.writestr(inside, text)
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
