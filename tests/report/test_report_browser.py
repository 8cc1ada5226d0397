"""The run page in a real browser: requests, widths, readability, content."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.report.page import write_report
from tests.support.browser import Page, browsing, needs_browser
from tests.support.run_logs import PREDICTION, RESHARE, epoch, whole_run, write

pytestmark = needs_browser

WIDTHS = (320, 390, 1200)
SCHEMES = ("light", "dark")

OVERFLOW = "[document.documentElement.scrollWidth, innerWidth]"
CUT_OFF = "[...document.querySelectorAll('.value')].filter(v => v.scrollWidth > v.clientWidth).map(v => v.innerText)"
UNFOLD = "document.querySelectorAll('details').forEach(each => each.open = true)"

CONTRASTS = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgba = text => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
                         return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                                        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgba(getComputedStyle(e).backgroundColor);
      if (found[3] == 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const rows = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest('svg') || element.getClientRects().length == 0) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    rows.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim().slice(0, 40), element.className]);
  }
  return rows.sort((a, b) => a[0] - b[0]);
})()"""
"""Of every text that can be seen: how its colour stands out from what lies behind it (WCAG), the worst first."""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path / "profile") as shown:
        shown.resize(1200)
        shown.prefer("light")
        yield shown


@pytest.fixture
def page(browser: Page, tmp_path: Path) -> Page:
    """Open the page of the invented run in light colours, at desktop width."""
    rows = whole_run()
    rows.insert(rows.index(RESHARE) + 1, PREDICTION | {"shares_only": True})
    browser.open(write_report(write(tmp_path / "run.jsonl", rows)))
    return browser


def text_of(page: Page, section: str) -> str:
    """Return the visible text of a section, in one line."""
    text = page.evaluate(f"document.getElementById({json.dumps(section)}).innerText")
    return " ".join(text.split())


def test_page_fetches_nothing_fits_every_width_and_is_readable_in_light_and_dark(page: Page, tmp_path: Path) -> None:
    asked = [event["request"]["url"] for event in page.told("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [(tmp_path / "run.html").as_uri()]
    complaints = [page.told(kind) for kind in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    assert complaints == [[], [], []]
    # The page's own policy would stop what somebody wrote into it.
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.org/a.png\">')")
    page.evaluate("new Promise(done => setTimeout(done, 200))")
    assert "Content Security Policy" in json.dumps(page.told("Log.entryAdded"))
    backgrounds = []
    page.evaluate(UNFOLD)
    for scheme in SCHEMES:
        page.prefer(scheme)
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert contrasts[0][0] >= 4.5, contrasts[:5]
        for width in WIDTHS:
            page.resize(width)
            needs, has = page.evaluate(OVERFLOW)
            assert has == width
            assert needs <= has, f"{scheme}, {width} pixels"
            assert page.evaluate(CUT_OFF) == [], f"{width} pixels"
    assert backgrounds[0] == "rgb(255, 255, 255)"
    assert sum(map(int, backgrounds[1].removeprefix("rgb(").removesuffix(")").split(","))) < 120, "dark is dark"


def test_log_values_appear_in_their_sections(page: Page) -> None:
    """Each is calculated by hand from the lines of `run_logs.py`."""
    page.evaluate(UNFOLD)
    header = page.evaluate("document.querySelector('header').innerText")
    assert "two-conv:32:128 on digits" in header
    assert "Plan auto on 3 devices, started 2026-11-21 19:47:17+00:00. Finished: 40 of 40 steps." in header
    expected = {
        "numbers": [
            "Best test accuracy 87.5% after step 40; the last is 87.5%",
            "Training loss 0.5 mean of the last epoch",
            "Samples/s 3,200 20 ms a step, median",
            "Predicted samples/s 4,000 16 ms a step, -20.0% off",
            "Efficiency 45.7% of 7,000 samples/s, the sum of solo throughputs",
            "Training time 800 ms 2 epochs, 40 steps",
        ],
        "curves": ["Smoothing 0.60", "training loss", "1 1.5 62.5% 3,200 0.4 0.01", "2 0.5 87.5% 3,200 0.4 0.01"],
        "rate": ["predicted", "limit", "limited by computing on lab1-cpu0"],
        "plan": [
            "Plan auto: 64 samples per micro-batch, sums by ring.",
            "The picture shows the shares from step 10 on.",
            "5.12 kB sent",
            "then elementwise",
            "the first of its kind",
        ],
        "step": ["takes 16 ms", "lab1-cpu0 busy 75.0%, waits for messages 25.0%", "time (ms)"],
        "devices": ["4,000 samples/s solo", "cpu (2 threads) on lab2, slowed down 4x"],
        "shares": ["changed once", "after step 9: conv2 64/48/16 -> 96/24/8 filters"],
        "settings": [
            "net two-conv:32:128 command line",
            "plan auto run.toml line 3",
            "timeout 60.0",
            "slowdown [1.0, 2.0, 4.0]",
        ],
        "versions": ["torch 2.13.0+cpu", "device 2 cpu (2 threads) on lab2, slowed down 4x"],
    }
    for section, texts in expected.items():
        shown = text_of(page, section)
        for text in texts:
            assert text in shown, section


def widths(page: Page, selector: str) -> list[float]:
    """Return the widths of these elements, in order, as fractions of their sum."""
    found = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.getBoundingClientRect().width)"
    )
    return [width / sum(found) for width in found]


# --------------------------------------------------------------------------------------------- what the script does


VALUES = "[...document.querySelectorAll('.tip > *')].map(each => each.innerText.trim())"


def test_pointer_and_keys_show_values(page: Page) -> None:
    """At the 21st step of 40, the start of the second epoch: 1.2 as it is, 4,000 predicted; the keyboard moves on."""
    page.point_at("#loss-desc", 0.5)
    page.point_at('svg[aria-label="Training loss"]', 20 / 40)
    head, raw, smooth = page.evaluate(VALUES)
    assert (head, raw) == ("step 20", "each step 1.2")
    assert float(smooth.removeprefix("training loss ")) == pytest.approx(1.2 + 0.06, abs=0.005), "it lags behind"
    page.point_at('svg[aria-label="Samples/s"]', 0.9)
    assert page.evaluate(VALUES)[:2] == ["step 36", "each step 3,200"]
    page.point_at('svg[aria-label="Test accuracy"]', 1.0)
    assert page.evaluate(VALUES) == ["step 40", "accuracy 87.5%"]
    page.evaluate("document.querySelector('svg[aria-label=\"Training loss\"]').focus()")
    for _ in range(3):
        page.ask("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
    assert page.evaluate(VALUES)[0] == "step 17", "from where the pointer was"
    page.ask("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert page.evaluate(VALUES) == []


SLIDE = """(weight => { const slider = document.querySelector('.smoothing input');
  slider.value = weight; slider.dispatchEvent(new Event('input', {bubbles: true})); })"""


def test_live_page_reloads_and_keeps_open_sections(browser: Page, tmp_path: Path) -> None:
    """Only the file is requested. The final page does not reload."""
    log = write(tmp_path / "log.jsonl", [*whole_run()[:4], *epoch(0)])
    browser.resize(1200)
    browser.open(write_report(log, reload_s=1))
    browser.wait_for("document.body?.innerText.includes('Not finished: 20 of 40 steps')")
    browser.evaluate(f"{SLIDE}(0.3)")
    browser.evaluate("document.querySelector('#curves details').open = true")
    browser.evaluate("scrollTo(0, 700)")
    write_report(write(log, whole_run()))
    browser.wait_for("document.body?.innerText.includes('Finished: 40 of 40 steps')")
    browser.wait_for("document.readyState == 'complete'")
    assert browser.evaluate("document.querySelector('.smoothing input').value") == "0.3"
    assert browser.evaluate("document.querySelector('#curves details').open")
    assert browser.evaluate("scrollY") > 300, "it does not jump to its start"
    asked = {event["request"]["url"] for event in browser.told("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:")} == {(tmp_path / "log.html").as_uri()}
    complaints = [browser.told(kind) for kind in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert complaints == [[], []]
