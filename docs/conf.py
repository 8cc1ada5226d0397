"""How Sphinx builds these pages: `make docs`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the package `docs` is found

from convoy import __version__  # noqa: E402

project = "Convoy"
author = "Convoy's authors"
project_copyright = "2026, Convoy's authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docs.from_code",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
default_role = "code"
highlight_language = "console"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
# What is not Convoy's: no network, no inventories of other projects.
nitpick_ignore_regex = [
    # Values that are handed on, and that nobody has to look into.
    (
        r"py:class",
        r"convoy\.[\w.]+\.(Change|Measurement|Operation|Scale|SparePrice|Speeds|Step|TracedModel|Weights|FleetKnowledge|PlanRequest)",
    ),
    (r"py:.*", r"(torch|nn|collections|pathlib|typing|types|contextlib|optim|Optimizer|Dataset|Tensor)(\..*)?"),
]

html_theme = "furo"
html_title = f"Convoy {version}"
html_static_path: list[str] = []
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
