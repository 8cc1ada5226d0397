"""The pages build without a warning: links, docstrings and names resolve.

The build is slow; what of it people break most is read in the sources: links, tables of contents, names and types it shows.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import convoy
from tests.support.processes import ROOT

DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(?:#[^)\s]*)?\)")
CONTENTS = re.compile(r"^```\{toctree\}\n(.*?)^```", re.M | re.S)


def test_links_resolve() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not dead


def test_every_page_is_named_in_a_table_of_contents() -> None:
    named = {DOCS / "index.md"}
    for page in PAGES:
        for contents in CONTENTS.findall(page.read_text(encoding="utf-8")):
            for line in contents.split():
                if not line.startswith(":"):
                    named |= set(page.parent.glob(f"{line}.md"))
    assert named >= set(PAGES), sorted(set(PAGES) - named)


def test_reference_names_are_exported() -> None:
    told = re.findall(
        r"^\.\. (?:auto)?(\w+):: ([\w.]+)$", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), re.M
    )
    names = {name.rpartition(".")[2] for _, name in told}
    for what, name in told:
        names |= vars(importlib.import_module(name)).keys() if what == "module" else set()
    assert not {name for name in convoy.__all__ if name != "__version__"} - names


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the extra 'docs' is not installed")
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_exported_name_is_in_the_reference(built: Path) -> None:
    page = (built / "reference" / "api.html").read_text(encoding="utf-8")
    told = set(re.findall(r'id="(?:convoy\.)([\w.]+)"', page))
    names = {name for name in convoy.__all__ if name != "__version__"}
    missing = {name for name in names if not any(each.split(".")[-1] == name for each in told)}
    assert not missing, f"docs/reference/api.md does not tell of {sorted(missing)}"
