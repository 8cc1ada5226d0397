"""What several parts of a page share: the names and colours of devices, sections, tables."""

from collections.abc import Sequence

from convoy.report.markup import Markup, tag
from convoy.runlog.reader import Record

COLOURS = 8
"""Devices beyond so many take the same colours again, hatched."""


def device_names(record: Record) -> list[str]:
    """Of each device, what it is and where: "cpu (1 thread) on lab1, slowed down 2x"."""
    if record.fleet is None:
        count = record.plan.plan.devices if record.plan is not None else 0
        return [f"device {device}" for device in range(count)]
    return [
        f"{row.name} on {row.host}" + (f", slowed down {row.slowdown:g}x" if row.slowdown != 1 else "")
        for row in record.fleet.devices
    ]


def colour(device: int) -> str:
    """The classes that give a device its colour."""
    return f"d{device % COLOURS}" + " again" * (device >= COLOURS)


def chip(device: int) -> Markup:
    """A device's number on its colour."""
    return tag("span", str(device), class_=f"chip {colour(device)}")


def device_key(names: Sequence[str]) -> Markup:
    """Which colour is which device."""
    rows = [tag("li", chip(device), " ", name) for device, name in enumerate(names)]
    return tag("ul", *rows, class_="devices")


def section(name: str, title: str, *contents: str | None) -> Markup:
    return tag("section", tag("h2", title, id=f"{name}-heading"), *contents, id=name, aria_labelledby=f"{name}-heading")


def missing(*contents: str) -> Markup:
    """Why there is nothing to see here, and how there would be."""
    return tag("p", *contents, class_="none")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> Markup:
    """A table that scrolls in a box of its own where it is too wide.

    Args:
        words: so many columns, from the left, are words; the others are numbers.
    """
    kind = ["words" if place < words else "number" for place in range(len(head))]
    top = tag("tr", *(tag("th", text, scope="col", class_=each) for text, each in zip(head, kind, strict=True)))
    body = [tag("tr", *(tag("td", text, class_=each) for text, each in zip(row, kind, strict=True))) for row in rows]
    # Who uses the keyboard scrolls it too.
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="scroll", tabindex="0", role="group",
               aria_label="table")  # fmt: skip


def details(summary: str, *contents: str) -> Markup:
    """Opened by a touch."""
    return tag("details", tag("summary", summary), *contents)
