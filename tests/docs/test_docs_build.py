"""The pages build, without a warning: no dead link, no docstring that Sphinx cannot read, no name that is not there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import convoy
from tests.support.processes import ROOT

pytest.importorskip("sphinx", reason="the extra 'docs' is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_every_exported_name_is_in_the_reference(built: Path) -> None:
    page = (built / "reference" / "api.html").read_text(encoding="utf-8")
    told = set(re.findall(r'id="(?:convoy\.)([\w.]+)"', page))
    names = {name for name in convoy.__all__ if name != "__version__"}
    missing = {name for name in names if not any(each.split(".")[-1] == name for each in told)}
    assert not missing, f"docs/reference/api.md does not tell of {sorted(missing)}"


def test_every_page_is_in_a_table_of_contents(built: Path) -> None:
    """Sphinx warns of pages that are in none; here, that none is left out of the build."""
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert all((built / page).is_file() for page in pages if "_build" not in page.parts)
