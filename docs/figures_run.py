"""The picture in the README: parts of the page of a run, as a browser shows them. Needs Chromium and Pillow.

python -m docs.figures_run runs/...         # writes docs/figures/run.png
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from convoy.report.page import write_report

PICTURE = Path(__file__).parent / "figures" / "run.png"
SECTIONS = ("numbers", "rate", "plan")
OTHERS = f"section:not(#{'):not(#'.join(SECTIONS)})"
LEFT_OUT = (OTHERS, "section > h2 ~ p", ".note", "details:not([open])", "summary", "footer")
WIDTH, SCALE = 1060, 2
LIMIT_S = 60.0


def draw(run: Path, picture: Path = PICTURE) -> None:
    """Write the page of a run, show its figures, its speed and its plan, and cut off what is empty."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no browser on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        text = write_report(run, page).read_text(encoding="utf-8")
        style = f"<style>{', '.join(LEFT_OUT)} {{ display: none }}</style></head>"
        page.write_text(text.replace("</head>", style), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={shot}"]
        options += [f"--window-size={WIDTH},3000", f"--force-device-scale-factor={SCALE}", page.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=LIMIT_S)
        image = Image.open(shot).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, 0)))
    left, top, right, bottom = ImageChops.difference(image, empty).getbbox()
    margin = 12 * SCALE
    image = image.crop((left - margin, max(0, top - margin), right + margin, bottom + margin))
    image.quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
