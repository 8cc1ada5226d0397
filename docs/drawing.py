"""Pictures as SVG text: a sheet of paper that is light or dark as the reader's screen is, and one colour per device."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

DEVICE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""Of Okabe and Ito's palette, which readers of all kinds can tell apart; they stand out on white and on dark paper."""

_STYLE = """
  .paper { fill: #ffffff; stroke: #d0d0d0; }
  text { fill: #222222; font: 12px system-ui, "DejaVu Sans", sans-serif; }
  .small { font-size: 10.5px; fill: #555555; }
  .strong { font-weight: 600; }
  .edge { fill: none; stroke: #666666; }
  .rule { stroke: #d0d0d0; }
  .arrow { stroke: #666666; fill: none; }
  .tip { fill: #666666; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #16181d; stroke: #3a3d44; }
    text { fill: #e6e6e6; }
    .small { fill: #a8adb5; }
    .edge { stroke: #9aa0a8; }
    .rule { stroke: #3a3d44; }
    .arrow { stroke: #9aa0a8; }
    .tip { fill: #9aa0a8; }
  }"""


class Drawing:
    """Marks on a sheet of `width` x `height`, in pixels from its upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.marks: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> None:
        """A filled rectangle."""
        shade = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
        self.marks.append(f'<rect {_frame(x, y, width, height)} fill="{colour}"{shade}/>')

    def edge(self, x: float, y: float, width: float, height: float) -> None:
        """The outline of a rectangle."""
        self.marks.append(f'<rect {_frame(x, y, width, height)} class="edge"/>')

    def striped(self, x: float, y: float, width: float, height: float, colours: Sequence[str]) -> None:
        """A rectangle that all of these colours share: upright stripes, from left to right."""
        for index, colour in enumerate(colours):
            self.box(x + width * index / len(colours), y, width / len(colours), height, colour)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Words on the line `y`; kinds are "small" and "strong"."""
        look = f' class="{kind}"' if kind else ""
        self.marks.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(words)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str, width: float) -> None:
        """A stroke of this width."""
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        self.marks.append(f'<line {ends} stroke="{colour}" stroke-width="{width:.1f}" stroke-opacity="0.85"/>')

    def rule(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A thin line that parts things, or marks a place on an axis."""
        self.marks.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="rule"/>')

    def arrow(self, x: float, y: float, to_x: float) -> None:
        """An arrow to the right."""
        self.marks.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x - 5:.1f}" y2="{y:.1f}" class="arrow"/>')
        self.marks.append(f'<path d="M{to_x:.1f},{y:.1f} l-7,-4 v8 z" class="tip"/>')

    def to_svg(self) -> str:
        """The picture. Its title is what a screen reader says."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        title = escape(self.title, {'"': "&quot;"})
        paper = f'<rect {_frame(0.5, 0.5, self.width - 1, self.height - 1)} rx="8" class="paper"/>'
        body = "\n".join([f"<title>{title}</title>", f"<style>{_STYLE}\n</style>", paper, *self.marks])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">\n{body}\n</svg>\n'


def write(folder: Path, drawings: dict[str, Drawing]) -> list[Path]:
    """Each drawing as a file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in drawings]
    for path, drawing in zip(paths, drawings.values(), strict=True):
        path.write_text(drawing.to_svg(), encoding="utf-8")
    return paths


def _frame(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
