"""What `import convoy` costs and offers."""

import importlib
import re
import shutil
import subprocess
import sys

import pytest

import convoy
from tests.support.processes import ROOT

HEAVY = ("torch", "numpy", "rich", "typer", "pydantic", "tomlkit", "psutil", "sklearn", "scipy", "ray", "lightning")

LIGHT = f"""
import sys
import convoy
print(sorted(name for name in sys.modules if name.partition(".")[0] in {HEAVY!r}))
assert dir(convoy) == sorted(convoy.__all__)
convoy.InputError
print("torch" in sys.modules)
"""

COMMAND = f"""
import sys
import convoy.cli
print(sorted(name for name in sys.modules if name.partition(".")[0] in {("torch", "numpy", "sklearn", "scipy")!r}))
"""


def python(program: str) -> str:
    """What a program prints; any warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_importing_convoy_imports_nothing_heavy() -> None:
    """So it costs less than torch, which every user imports anyway; errors can be caught before torch is there."""
    assert python(LIGHT).splitlines() == ["[]", "False"]


def test_help_needs_no_torch() -> None:
    """`convoy --help` answers at once."""
    assert python(COMMAND).splitlines() == ["[]"]


def test_every_public_name_exists() -> None:
    """The rest is found in five modules, which `import convoy` alone makes known."""
    assert dir(convoy) == sorted(convoy.__all__)
    assert len(set(convoy.__all__)) == len(convoy.__all__) == 25
    for home, names in convoy._HOMES.items():
        for name in names:
            assert getattr(convoy, name) is getattr(importlib.import_module(home), name)
    for module in ("api", "checkpoint", "data", "errors", "train"):
        assert getattr(convoy, module) is importlib.import_module(f"convoy.{module}")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'convoy' has no attribute 'accelerate'"):
        _ = convoy.accelerate
    with pytest.raises(ImportError):
        from convoy import accelerate  # noqa: F401


def test_citation_version_matches() -> None:
    """It stands in two files, because one of them is read without Python."""
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {convoy.__version__}\n" in cited


def test_release_tag_matches_the_version() -> None:
    """What is released as v1.2.3 says so of itself, and the CHANGELOG has its section, with a date."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git repository: nothing is tagged")
    tagged = subprocess.run(
        ["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    changes = (ROOT / "CHANGELOG.md").read_text()
    for tag in tagged:
        assert tag == f"v{convoy.__version__}"
        assert re.search(rf"^## {re.escape(convoy.__version__)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE)
    assert re.search(rf"^## {re.escape(convoy.__version__)} ", changes, re.MULTILINE)
