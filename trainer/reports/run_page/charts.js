// Line charts and stacked bars as SVG. All of them share the step axis, the smoothing and the step under the pointer.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844"];
const GREY = "#9aa0a8";
const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };

// What all charts show: smooth is 0 to 0.99; from and to are null for the whole run; hover is a step or null.
const view = { smooth: 0, from: null, to: null, hover: null };
const charts = new Set();

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  setAll(node, attributes);
  node.append(...children);
  return node;
}

// A number for people: 0.0131, 12.5, 1,250, 3.2e-7.
function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

function redraw() {
  for (const chart of charts) {
    if (chart.node.isConnected) chart.draw();
  }
}

function hoverAt(step) {
  if (view.hover === step) return;
  view.hover = step;
  for (const chart of charts) {
    if (chart.node.isConnected) chart.showHover();
  }
}

function zoomTo(from, to) {
  [view.from, view.to] = from === null || from === to ? [null, null] : [Math.min(from, to), Math.max(from, to)];
  document.dispatchEvent(new CustomEvent("view"));
  redraw();
}

// Exponential moving average without the pull of its first value; weight is 0 for none.
function smoothed(points, weight) {
  let sum = 0;
  let total = 0;
  return points.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [step, sum / total];
  });
}

function inView(points) {
  return points.filter(([step]) => (view.from === null || step >= view.from) && (view.to === null || step <= view.to));
}

// Round numbers that cover low to high.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= raw * 0.999);
  const found = [];
  for (let x = Math.ceil(low / size - 1e-9) * size; x <= high + size * 1e-6; x += size)
    found.push(Math.abs(x) < size / 1e6 ? 0 : x);
  return found;
}

// What line charts and stacked bars have in common: axes, the pointer, the keyboard, dragging to zoom.
class Chart {
  constructor(title, unit, wide = false, height = 190) {
    this.height = height;
    this.wide = wide;
    this.plot = svg("svg", { role: "img", "aria-label": title, height });
    this.legend = el("div.legend");
    const told = `${title}; left and right move the step`;
    this.node = el(
      wide ? "figure.card.chart.wide" : "figure.card.chart",
      { tabindex: 0, "aria-label": told, keydown: (event) => this.key(event) },
      el("div.line", el("h3.wrap", title), el("span.soft.small", unit)),
      this.plot,
      this.legend,
    );
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.dragFrom === null && hoverAt(null));
    this.plot.addEventListener("pointerdown", (event) => this.startDrag(event));
    this.plot.addEventListener("pointerup", (event) => this.endDrag(event));
    this.plot.addEventListener("dblclick", () => zoomTo(null, null));
    this.dragFrom = null;
    charts.add(this);
  }

  // Draws the axes, and sets the functions from steps and values to places. padding: steps beside the first and last.
  frame(steps, low, high, padding = 0) {
    this.width = this.plot.clientWidth || 360;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.plot.replaceChildren();
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    this.steps = steps;
    const first = steps[0] - padding;
    const last = Math.max(steps.at(-1) + padding, steps[0] + 1);
    const right = this.width - MARGIN.right;
    const bottom = this.height - MARGIN.bottom;
    this.x = (step) => MARGIN.left + ((step - first) / (last - first)) * (right - MARGIN.left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    this.stepAt = (x) => first + ((x - MARGIN.left) / (right - MARGIN.left)) * (last - first);
    for (const value of ticks(low, high, 4)) {
      const y = this.y(value);
      this.plot.append(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }));
      this.plot.append(svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, format(value)));
    }
    for (const step of ticks(first, last, Math.max(2, this.width / 90))) {
      if (Number.isInteger(step))
        this.plot.append(svg("text", { x: this.x(step), y: this.height - 6, "text-anchor": "middle" }, String(step)));
    }
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    this.brush = svg("rect", { class: "brush", y: MARGIN.top, height: bottom - MARGIN.top, visibility: "hidden" });
    this.plot.append(this.cursor, this.brush);
  }

  nearest(event) {
    const box = this.plot.getBoundingClientRect();
    const wanted = this.stepAt(((event.clientX - box.left) / box.width) * this.width);
    return this.steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
  }

  point(event) {
    if (!this.steps) return;
    const step = this.nearest(event);
    hoverAt(step);
    if (this.dragFrom === null) return;
    const [a, b] = [this.x(this.dragFrom), this.x(step)];
    setAll(this.brush, { visibility: "visible", x: Math.min(a, b), width: Math.abs(a - b) });
  }

  startDrag(event) {
    if (!this.steps || event.pointerType === "touch" || event.button !== 0) return;
    this.dragFrom = this.nearest(event);
    this.plot.setPointerCapture(event.pointerId);
  }

  endDrag(event) {
    if (this.dragFrom === null) return;
    const [from, to] = [this.dragFrom, this.nearest(event)];
    this.dragFrom = null;
    this.brush.setAttribute("visibility", "hidden");
    if (from !== to) zoomTo(from, to);
  }

  key(event) {
    if (!this.steps || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return zoomTo(null, null);
    const now = this.steps.indexOf(view.hover);
    const next = now < 0 ? this.steps.length - 1 : now + (event.key === "ArrowLeft" ? -1 : 1);
    hoverAt(this.steps[Math.max(0, Math.min(this.steps.length - 1, next))]);
  }

  moveCursor() {
    const isIn = view.hover !== null && view.hover >= this.steps[0] && view.hover <= this.steps.at(-1);
    const x = this.x(view.hover);
    setAll(this.cursor, { visibility: isIn ? "visible" : "hidden", x1: x, x2: x });
  }
}

// lines: {label, color, dash, points: [[step, value]], band: Map of step to half width, or null}.
class LineChart extends Chart {
  constructor(title, unit, lines, wide = false) {
    super(title, unit, wide);
    this.lines = lines.filter((line) => line.points.length);
  }

  draw() {
    const soft = (line) => inView(smoothed(line.points, view.smooth));
    const shown = this.lines.map((line) => ({ ...line, raw: inView(line.points), soft: soft(line) }));
    const steps = [...new Set(shown.flatMap((line) => line.raw.map(([step]) => step)))].sort((a, b) => a - b);
    if (!steps.length) {
      this.steps = null;
      this.plot.replaceChildren(svg("text", { x: 20, y: 40 }, "nothing in these steps"));
      this.legend.replaceChildren();
      return;
    }
    const ends = (value, width) => [value - width, value + width];
    const values = shown.flatMap(({ raw, band }) =>
      raw.flatMap(([step, value]) => ends(value, band?.get(step) ?? 0)),
    );
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low) * 0.05;
    if (low >= 0 && low < 0.3 * high) low = 0;
    else low -= room;
    this.frame(steps, low, high + room);
    for (const line of shown) this.drawLine(line);
    this.shown = shown;
    this.showHover();
  }

  drawLine({ raw, soft, color, dash, band }) {
    const place = ([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`;
    if (band?.size && raw.length > 1) {
      const upper = raw.map(([step, value]) => place([step, value + (band.get(step) ?? 0)]));
      const lower = raw.map(([step, value]) => place([step, value - (band.get(step) ?? 0)])).reverse();
      this.plot.append(svg("polygon", { points: [...upper, ...lower].join(" "), fill: color, opacity: 0.12 }));
    }
    const look = { fill: "none", stroke: color, "stroke-dasharray": dash, "stroke-linejoin": "round" };
    const line = (points, width, opacity) =>
      svg("polyline", { points: points.map(place).join(" "), ...look, "stroke-width": width, opacity });
    if (view.smooth > 0) this.plot.append(line(raw, 1, 0.25));
    this.plot.append(line(soft, 1.8, 1));
    if (raw.length <= 40)
      for (const [step, value] of soft)
        this.plot.append(svg("circle", { cx: this.x(step), cy: this.y(value), r: 2.2, fill: color }));
  }

  showHover() {
    if (!this.steps) return;
    this.moveCursor();
    const at = view.hover;
    const entries = this.shown.map(({ label, color, dash, raw, soft, band }) => {
      const place = at === null ? raw.length - 1 : raw.findIndex(([step]) => step === at);
      const [step, value] = raw[place] ?? [];
      const around = band?.get(step) ? ` ±${format(band.get(step))}` : "";
      const mean = place >= 0 && view.smooth > 0 ? ` (${format(soft[place][1])})` : "";
      const style = { borderTopColor: color, borderTopStyle: dash ? "dashed" : "solid" };
      return el("span", el("span.swatch", { style }), label ? `${label} ` : "", el("b", format(value) + around + mean));
    });
    this.legend.replaceChildren(el("span", at === null ? "last" : `step ${at}`), ...entries);
  }
}

// Stacked bars: layers {label, color, values}, one value for each step; near steps are joined where there are many.
class StackChart extends Chart {
  constructor(title, unit, steps, layers, wide = true) {
    super(title, unit, wide, 230);
    this.all = steps;
    this.layers = layers;
  }

  draw() {
    const places = this.all.map((step, place) => place).filter((place) => inView([[this.all[place], 0]]).length);
    if (!places.length) return;
    const most = Math.max(20, Math.floor((this.plot.clientWidth || 360) / 5));
    const size = Math.ceil(places.length / most);
    const mean = (values, own) => own.reduce((sum, place) => sum + (values[place] ?? 0), 0) / own.length;
    this.bars = [];
    for (let start = 0; start < places.length; start += size) {
      const own = places.slice(start, start + size);
      const values = this.layers.map((layer) => mean(layer.values, own));
      this.bars.push({ step: this.all[own[0]], until: this.all[own.at(-1)], values });
    }
    const totals = this.bars.map((bar) => total(bar.values)).sort((a, b) => a - b);
    const usual = totals[Math.floor(0.95 * (totals.length - 1))];
    const top = Math.min(totals.at(-1), 2 * usual || 1) * 1.05 || 1; // one slow step does not flatten all others
    const starts = this.bars.map((bar) => bar.step);
    const apart = starts.length > 1 ? (starts.at(-1) - starts[0]) / (starts.length - 1) : 1;
    this.frame(starts, 0, top, apart / 2);
    const width = Math.max(1, 0.9 * (this.x(starts[0] + apart) - this.x(starts[0])));
    for (const bar of this.bars) {
      let below = 0;
      bar.values.forEach((value, layer) => {
        const above = Math.min(below + value, top);
        const [y, x] = [this.y(above), this.x(bar.step) - width / 2];
        if (above > below)
          this.plot.append(svg("rect", { x, y, width, height: this.y(below) - y, fill: this.layers[layer].color }));
        below = above;
      });
    }
    this.plot.append(this.cursor);
    this.showHover();
  }

  showHover() {
    if (!this.bars) return;
    this.moveCursor();
    const at = view.hover;
    const bar = at === null ? null : this.bars.find(({ step, until }) => step <= at && at <= until);
    const mean = (_, layer) => total(this.bars.map((own) => own.values[layer])) / this.bars.length;
    const values = bar ? bar.values : this.layers.map(mean);
    const whole = total(values);
    const entries = this.layers.map(({ label, color }, place) => {
      const share = whole ? Math.round((100 * values[place]) / whole) : 0;
      const swatch = el("span.swatch.block", { style: { background: color } });
      return el("span", swatch, `${label} `, el("b", `${format(values[place])} s`), ` ${share}%`);
    });
    this.legend.replaceChildren(el("span", bar ? `step ${bar.step}` : "mean"), ...entries);
  }
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

// A small line without axes.
function spark(points, stroke) {
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const every = Math.ceil(points.length / 120);
  const place = ([step, value]) =>
    [2 + (116 * (step - first)) / (last - first || 1), 25 - (22 * (value - low)) / (high - low || 1)]
      .map((x) => x.toFixed(1))
      .join(",");
  const drawn = points.filter((_, at) => at % every === 0).map(place);
  const line = svg("polyline", { points: drawn.join(" "), fill: "none", stroke, "stroke-width": 1.3 });
  return svg("svg", { class: "spark", viewBox: "0 0 120 28", "aria-hidden": "true" }, line);
}
