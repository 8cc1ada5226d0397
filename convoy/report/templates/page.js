"use strict";
// Shows values under the pointer, smooths curves, and keeps sections unfolded after a reload.
(() => {
  const WIDTH = 1000, HEIGHT = 400, NEAR = 20;
  const originals = new WeakMap();
  let weight = 0.6;
  document.documentElement.classList.add("scripted");

  // Number formats of convoy/report/numbers.py.
  const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
  const digits = (value, count) => String(Number(value.toPrecision(count)));
  const plain = (value) => {
    const size = Math.abs(value);
    if (value && !(size >= 1e-4 && size < 1e15)) return value.toExponential(3);
    return size >= 1000 ? whole.format(value) : digits(value, 4);
  };
  const bytes = (value) => {
    if (Math.round(value) === 0) return "0";
    const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, size]) => value >= size) ?? ["B", 1];
    return `${digits(value / size, 3)} ${unit}`;
  };
  const shown = {plain, bytes, percent: (value) => `${digits(100 * value, 4)}%`};

  const pointsOf = (line) => line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));

  // Debiased exponential moving average, as in TensorBoard.
  function smooth() {
    for (const line of document.querySelectorAll("polyline.smooth")) {
      if (!originals.has(line)) originals.set(line, pointsOf(line));
      let sum = 0, weights = 0;
      const points = originals.get(line).map(([x, y]) => {
        sum = weight * sum + (1 - weight) * y;
        weights = weight * weights + (1 - weight);
        return `${x},${sum / weights}`;
      });
      line.setAttribute("points", points.join(" "));
    }
    for (const slider of document.querySelectorAll(".smoothing input")) {
      slider.value = weight;
      slider.parentElement.querySelector("output").textContent = weight.toFixed(2);
    }
  }
  document.addEventListener("input", (event) => {
    if (event.target.matches(".smoothing input")) {
      weight = Number(event.target.value);
      smooth();
    }
  });

  // Show the nearest point of each curve.
  let tip = null;
  function hide() {
    if (tip) tip.forEach((each) => each.remove());
    tip = null;
  }
  function point(svg, part) {
    hide();
    const [left, right, low, high] = svg.dataset.frame.split(" ").map(Number);
    const at = Math.min(1, Math.max(0, part)) * WIDTH;
    const rows = [];
    for (const line of svg.querySelectorAll("polyline")) {
      const points = pointsOf(line);
      const near = points.reduce((best, each) => (Math.abs(each[0] - at) < Math.abs(best[0] - at) ? each : best));
      if (at > points[0][0] - NEAR && at < points.at(-1)[0] + NEAR) rows.push([line, ...near]);
    }
    if (!rows.length) return;
    const x = rows.reduce((best, row) => (Math.abs(row[1] - at) < Math.abs(best - at) ? row[1] : best), rows[0][1]);
    const box = document.createElement("div");
    box.className = "tip";
    box.setAttribute("role", "status");
    const head = document.createElement("b");
    const place = (at) => `step ${whole.format(left + (at / WIDTH) * (right - left))}`;
    head.textContent = place(x);
    box.append(head);
    for (const [line, own, y] of rows) {
      const row = document.createElement("span");
      const key = document.createElement("i");
      key.className = `key ${line.getAttribute("class")}`;
      const value = low + ((HEIGHT - y) / HEIGHT) * (high - low);
      const aside = place(own) === place(x) ? "" : ` at ${place(own)}`;
      row.append(key, `${line.dataset.label} ${shown[svg.dataset.shown](value)}${aside}`);
      box.append(row);
    }
    box.style[x > WIDTH / 2 ? "right" : "left"] = `${(x > WIDTH / 2 ? 1 - x / WIDTH : x / WIDTH) * 100}%`;
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({x1: x, x2: x, y1: 0, y2: HEIGHT, class: "cursor"})) cursor.setAttribute(name, value);
    svg.append(cursor);
    svg.parentElement.append(box);
    tip = [box, cursor];
    svg.dataset.part = x / WIDTH;
  }
  const drawingOf = (event) => event.target.closest?.("svg[data-frame]");
  document.addEventListener("pointermove", (event) => {
    const svg = drawingOf(event);
    if (!svg) return hide();
    const box = svg.getBoundingClientRect();
    point(svg, (event.clientX - box.left) / box.width);
  });
  document.addEventListener("keydown", (event) => {
    const svg = drawingOf(event), step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") hide();
    if (!svg || !step) return;
    event.preventDefault();
    const xs = [...new Set([...svg.querySelectorAll("polyline")].flatMap((line) => pointsOf(line).map(([x]) => x)))];
    xs.sort((a, b) => a - b);
    const at = Number(svg.dataset.part ?? 0.5) * WIDTH;
    const now = xs.reduce((best, x, place) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? place : best), 0);
    point(svg, xs[Math.min(xs.length - 1, Math.max(0, now + step * (event.shiftKey ? 10 : 1)))] / WIDTH);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("pointerleave", hide);
  // A live page reloads: restore unfolded sections and the smoothing.
  const details = () => [...document.querySelectorAll("details")].map((each) => [each.querySelector("summary").textContent, each]);
  try {
    const kept = JSON.parse(sessionStorage.getItem(location.pathname)) ?? {open: {}, weight};
    for (const [name, each] of details()) each.open = kept.open[name] ?? each.open;
    weight = kept.weight;
    addEventListener("pagehide", () => {
      const open = Object.fromEntries(details().map(([name, each]) => [name, each.open]));
      sessionStorage.setItem(location.pathname, JSON.stringify({open, weight}));
    });
  } catch { /* a browser may forbid storage */ }
  smooth();
})();
