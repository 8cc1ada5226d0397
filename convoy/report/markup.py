"""HTML and SVG as text: elements whose contents are escaped unless they are markup themselves."""

import html


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(element: str, *contents: str | None, **attributes: str | float | None) -> Markup:
    """An element.

    Args:
        contents: texts, which are escaped, and markup; None is left out.
        attributes: `class_` is class, `stroke_width` is stroke-width; None is left out.
    """
    inner = "".join(text for text in map(escaped, contents))
    words = [element]
    for name, value in attributes.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            words.append(f'{_ATTRIBUTES.get(name) or name.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    opening = " ".join(words)
    return Markup(f"<{opening}>" if element in _EMPTY else f"<{opening}>{inner}</{element}>")


def escaped(text: str | None) -> str:
    """Text as HTML shows it; markup stays as it is."""
    if text is None or isinstance(text, Markup):
        return text or ""
    return html.escape(text)


def joined(*parts: str | None) -> Markup:
    """Texts and markup, one after the other."""
    return Markup("".join(map(escaped, parts)))


_EMPTY = {"meta", "br", "link"}
_ATTRIBUTES = {"viewbox": "viewBox", "preserve": "preserveAspectRatio"}
