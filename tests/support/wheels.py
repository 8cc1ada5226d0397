"""Wheels that are made for a test: packages of that name and version, with next to nothing in them."""

import zipfile
from pathlib import Path


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
