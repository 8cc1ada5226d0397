"""What all pages have in common: the templates, the style, the one script, and what a browser lets them do."""

import base64
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from convoy._version import __version__
from convoy.report import intervals, numbers, plan_picture

_LOADER = PackageLoader("convoy.report")


def render(template: str, served: str = "", **values: Any) -> str:
    """A page as text.

    Args:
        served: which version of the page this is, where a server will have newer ones; empty: the page is a file.
    """
    environment = _environment()
    source, _, _ = _LOADER.get_source(environment, "page.js")
    return environment.get_template(template).render(
        version=__version__, served=served, policy=_policy(source, served), script=Markup(source), **values
    )  # fmt: skip


def _policy(script: str, served: str) -> str:
    """What a browser may do with the page: show it, and run that script. Where it is served, ask its server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:", f"script-src 'sha256-{digest}'"]
    return "; ".join([*rules, "connect-src 'self'"] if served else rules)


def _environment() -> Environment:
    environment = Environment(
        loader=_LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = {
        "plain": numbers.plain,
        "percent": numbers.percent,
        "seconds": numbers.seconds,
        "in_bytes": numbers.in_bytes,
    }
    environment.filters |= shown | {"number": "{:.7g}".format, "place": "{:.2%}".format, "colour": plan_picture.colour}
    environment.globals |= {"kinds": intervals.KINDS, "lanes": intervals.LANES}
    return environment
