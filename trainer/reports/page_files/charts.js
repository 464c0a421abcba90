// Charts by plotly. All over steps share the step axis, the smoothing and the step under the pointer.

const COLORS = ["#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844"];
const GREY = "#9aa0a8";
// What all charts show: smooth is 0 to 0.99; from and to are null for the whole run; hover is a step or null.
const view = { smooth: 0, from: null, to: null, hover: null };
const charts = new Set();
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) Object.assign(target.chart, { isSeen: isIntersecting }).update();
});

// The library is packed inside the page; charts are drawn when it is there.
async function unpackPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (x) => x.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(el("script", await new Response(unpacked).text()));
  for (const chart of charts) chart.update();
}

// A number for people: 0.0131, 12.5, 1,250, 3.2e-7.
function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);

function redraw() {
  for (const chart of charts) chart.change();
}

function hoverAt(step) {
  if (view.hover === step) return;
  view.hover = step;
  for (const chart of charts) if (chart.isSeen) chart.showHover();
}

function zoomTo(from, to) {
  [view.from, view.to] = from === null || from === to ? [null, null] : [Math.min(from, to), Math.max(from, to)];
  document.dispatchEvent(new CustomEvent("view"));
  redraw();
}

// Exponential moving average without the pull of its first value; weight is 0 for none.
function smoothed(points, weight) {
  let [sum, whole] = [0, 0];
  return points.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    whole = weight * whole + (1 - weight);
    return [step, sum / whole];
  });
}

function inView(points) {
  return points.filter(([step]) => (view.from === null || step >= view.from) && (view.to === null || step <= view.to));
}

// A card with a chart, drawn when it is seen. figure() gives plotly's {traces, layout}.
class Chart {
  constructor(title, unit, { wide = false, height = 200, figure = null } = {}) {
    Object.assign(this, { isSeen: false, isStale: true, height });
    if (figure) this.figure = figure;
    this.plot = el("div.plot", { style: { height: `${height}px` } });
    this.cursor = el("div.cursor", { hidden: true });
    this.legend = el("div.legend");
    const head = el("div.line", el("h3.wrap", title), el("span.soft.small", unit));
    const inside = [head, el("div.plotbox", this.plot, this.cursor), this.legend];
    this.node = el(wide ? "figure.card.chart.wide" : "figure.card.chart", { "aria-label": title }, inside);
    this.node.chart = this;
    seen.observe(this.node);
    charts.add(this);
  }

  change() {
    this.isStale = true;
    this.update();
  }

  update() {
    if (!this.isSeen || !this.isStale || !window.Plotly || !this.node.isConnected) return;
    const { traces, layout = {} } = this.figure();
    const axis = { zeroline: false, exponentformat: "e", ...layout.yaxis };
    const base = {
      width: this.plot.clientWidth, height: this.height, margin: { l: 48, r: 10, t: 8, b: 24 }, paper_bgcolor: "transparent", showlegend: false,
      plot_bgcolor: "transparent", font: { family: "system-ui, DejaVu Sans, sans-serif", size: 11 }, hoverdistance: -1,
      hovermode: "x", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    };
    const xaxis = { showgrid: false, zeroline: false, tickformat: "d", autorange: true, ...layout.xaxis };
    const yaxis = { nticks: 6, fixedrange: true, autorange: true, ...axis };
    const shown = { ...base, ...layout, xaxis, yaxis };
    const isFirst = !this.plot.data;
    Plotly.react(this.plot, traces, shown, { displayModeBar: false, doubleClick: false });
    this.isStale = false;
    if (isFirst) this.listen();
    this.showHover();
  }

  listen() {}

  showHover() {}
}

// A chart over steps: the pointer and the arrows move the step of all of them, dragging zooms all of them.
class StepChart extends Chart {
  constructor(title, unit, options) {
    super(title, unit, options);
    const label = `${title}; left and right move the step`;
    setAll(this.node, { tabindex: 0, "aria-label": label, keydown: (event) => this.key(event) });
    this.steps = [];
  }

  listen() {
    this.plot.on("plotly_hover", ({ points }) => hoverAt(this.nearest(points[0].x)));
    this.plot.on("plotly_unhover", () => hoverAt(null));
    this.plot.on("plotly_doubleclick", () => zoomTo(null, null));
    this.plot.on("plotly_relayout", (change) => {
      const ends = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (ends[0] !== undefined) zoomTo(...ends.map((end) => this.nearest(end)));
    });
  }

  nearest(wanted) {
    return this.steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
  }

  key(event) {
    if (!this.steps.length || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return zoomTo(null, null);
    const now = this.steps.indexOf(view.hover);
    const next = now < 0 ? this.steps.length - 1 : now + (event.key === "ArrowLeft" ? -1 : 1);
    hoverAt(this.steps[Math.max(0, Math.min(this.steps.length - 1, next))]);
  }

  moveCursor() {
    const axis = this.plot._fullLayout?.xaxis;
    const isIn = view.hover !== null && view.hover >= this.steps[0] && view.hover <= this.steps.at(-1);
    this.cursor.hidden = !axis || !isIn;
    if (!this.cursor.hidden) this.cursor.style.left = `${axis._offset + axis.l2p(view.hover)}px`;
  }
}

// lines: {label, color, dash, points: [[step, value]], band: Map of step to half width, or null}.
class LineChart extends StepChart {
  constructor(title, unit, lines, wide = false) {
    super(title, unit, { wide });
    this.lines = lines.filter((line) => line.points.length);
  }

  figure() {
    const soft = (line) => inView(smoothed(line.points, view.smooth));
    this.shown = this.lines.map((line) => ({ ...line, raw: inView(line.points), soft: soft(line) }));
    this.steps = [...new Set(this.shown.flatMap(({ raw }) => raw.map(([step]) => step)))].sort((a, b) => a - b);
    const values = this.shown.flatMap(({ raw }) => raw.map(([, value]) => value));
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const isFromZero = low >= 0 && low < 0.3 * high;
    const room = (this.steps.at(-1) - this.steps[0]) * 0.01 || 0.5;
    const xaxis = { range: [this.steps[0] - room, this.steps.at(-1) + room], autorange: false };
    const yaxis = { rangemode: isFromZero ? "tozero" : "normal" };
    return { traces: this.shown.flatMap(tracesOf), layout: { xaxis, yaxis } };
  }

  showHover() {
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

function traceOf(points, line, more = {}) {
  const [x, y] = [points.map(([step]) => step), points.map(([, value]) => value)];
  return { x, y, mode: "lines", line, hoverinfo: "none", ...more };
}

function tracesOf({ raw, soft, color, dash, band }) {
  const traces = [];
  if (band && raw.length > 1) {
    const edge = (sign) => raw.map(([step, value]) => [step, value + sign * (band.get(step) ?? 0)]);
    const quiet = { hoverinfo: "skip", fillcolor: `${color}1f` };
    traces.push(traceOf(edge(1), { width: 0 }, quiet), traceOf(edge(-1), { width: 0 }, { ...quiet, fill: "tonexty" }));
  }
  if (view.smooth > 0) traces.push(traceOf(raw, { color, width: 1 }, { opacity: 0.25 }));
  const mode = raw.length <= 40 ? "lines+markers" : "lines";
  traces.push(traceOf(soft, { color, width: 1.8, dash: dash ?? "solid" }, { mode, marker: { size: 4, color } }));
  return traces;
}

// Stacked bars: layers {label, color, values}, one value for each step; near steps are joined where there are many.
class StackChart extends StepChart {
  constructor(title, unit, steps, layers) {
    super(title, unit, { wide: true, height: 250 });
    Object.assign(this, { all: steps, layers });
  }

  figure() {
    const places = this.all.map((_, place) => place).filter((place) => inView([[this.all[place], 0]]).length);
    const size = Math.ceil(places.length / Math.max(20, Math.floor((this.plot.clientWidth || 360) / 5)));
    this.bars = [];
    for (let start = 0; start < places.length; start += size) {
      const own = places.slice(start, start + size);
      const values = this.layers.map((layer) => total(own.map((place) => layer.values[place] ?? 0)) / own.length);
      this.bars.push({ step: this.all[own[0]], until: this.all[own.at(-1)], values });
    }
    this.steps = this.bars.map((bar) => bar.step);
    const totals = this.bars.map((bar) => total(bar.values)).sort((a, b) => a - b);
    const usual = totals[Math.floor(0.95 * (totals.length - 1))];
    const top = Math.min(totals.at(-1), 2 * usual || 1) * 1.05 || 1; // one slow step does not flatten all others
    const traces = this.layers.map(({ color }, layer) => {
      const y = this.bars.map((bar) => bar.values[layer]);
      return { type: "bar", x: this.steps, y, marker: { color, line: { width: 0 } }, hoverinfo: "none" };
    });
    return { traces, layout: { barmode: "stack", bargap: 0.1, yaxis: { range: [0, top], autorange: false } } };
  }

  showHover() {
    this.moveCursor();
    const at = view.hover;
    const bar = at === null ? null : this.bars.find(({ step, until }) => step <= at && at <= until);
    const mean = (_, layer) => total(this.bars.map((own) => own.values[layer])) / this.bars.length;
    const values = bar ? bar.values : this.layers.map(mean);
    const entries = this.layers.map(({ label, color }, place) => {
      const share = Math.round((100 * values[place]) / (total(values) || 1));
      const swatch = el("span.swatch.block", { style: { background: color } });
      return el("span", swatch, `${label} `, el("b", `${format(values[place])} s`), ` ${share}%`);
    });
    this.legend.replaceChildren(el("span", bar ? `step ${bar.step}` : "mean"), ...entries);
  }
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
  const [svg, line] = ["svg", "polyline"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  setAll(svg, { class: "spark", viewBox: "0 0 120 28", "aria-hidden": "true" });
  const drawn = points.filter((_, at) => at % every === 0).map(place);
  setAll(line, { points: drawn.join(" "), fill: "none", stroke, "stroke-width": 1.3 });
  svg.append(line);
  return svg;
}
