"use strict";
// What a page does beside showing: values under the pointer, smoothing, and, where it is served, following the run.
(() => {
  const WIDTH = 1000, HEIGHT = 400, NEAR = 20;
  const originals = new WeakMap();
  let weight = 0.6;
  document.documentElement.classList.add("scripted");

  // Numbers as convoy/report/numbers.py writes them.
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

  // The exponential mean of each point and those before it, as TensorBoard makes it: the first counts for itself.
  function smooth(root) {
    for (const line of root.querySelectorAll("polyline.smooth")) {
      if (!originals.has(line)) originals.set(line, pointsOf(line));
      let sum = 0, weights = 0;
      const points = originals.get(line).map(([x, y]) => {
        sum = weight * sum + (1 - weight) * y;
        weights = weight * weights + (1 - weight);
        return `${x},${sum / weights}`;
      });
      line.setAttribute("points", points.join(" "));
    }
    for (const slider of root.querySelectorAll(".smoothing input")) {
      slider.value = weight;
      slider.parentElement.querySelector("output").textContent = weight.toFixed(2);
    }
  }
  document.addEventListener("input", (event) => {
    if (event.target.matches(".smoothing input")) {
      weight = Number(event.target.value);
      smooth(document);
    }
  });

  // Values: of each curve the point that is nearest.
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
    const place = (at) => {
      const value = left + (at / WIDTH) * (right - left);
      return `${svg.dataset.x} ${svg.dataset.x === "step" ? whole.format(value) : plain(value)}`;
    };
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
  smooth(document);

  // A page that is served says which version it is, and asks for the next. Only what has changed is replaced.
  if (!document.body.dataset.version) return;
  const status = document.querySelector(".live"), seen = new Map();
  const sections = () => [...document.querySelectorAll("header > div, main > section, footer")];
  const remember = (list, source) => list.forEach((each, place) => seen.set(place, source[place]));
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
  remember(sections(), sections().map((each) => each.outerHTML));

  function replace(old, fresh) {
    const open = new Map([...old.querySelectorAll("details")].map((each) => [each.querySelector("summary").textContent, each.open]));
    for (const each of fresh.querySelectorAll("details")) each.open = open.get(each.querySelector("summary").textContent) ?? each.open;
    if (old.contains(tip?.[0])) hide();
    old.replaceWith(fresh);
    smooth(fresh);
  }
  function update(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    const fresh = [...page.querySelectorAll("header > div, main > section, footer")], now = sections();
    const sources = fresh.map((each) => each.outerHTML);
    document.title = page.title;
    document.body.dataset.version = page.body.dataset.version;
    if (fresh.map((each) => each.id).join() === now.map((each) => each.id).join()) {
      fresh.forEach((each, place) => { if (seen.get(place) !== sources[place]) replace(now[place], each); });
    } else {
      hide();
      document.querySelector("header > div").replaceWith(fresh[0]);
      document.querySelector("main").replaceWith(page.querySelector("main"));
      document.querySelector("footer").replaceWith(fresh.at(-1));
      smooth(document);
    }
    seen.clear();
    remember(fresh, sources);
  }
  async function follow() {
    for (;;) {
      if (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, {once: true}));
      try {
        const answer = await fetch(`update?after=${encodeURIComponent(document.body.dataset.version)}`);
        if (answer.status === 200) update(await answer.text());
        else if (answer.status !== 204) throw new Error(answer.status);
        status.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
        status.classList.remove("lost");
      } catch {
        status.textContent = "convoy report --serve does not answer: this is what was there last";
        status.classList.add("lost");
        await sleep(2000);
      }
    }
  }
  follow();
})();
