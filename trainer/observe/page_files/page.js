"use strict";
// The page of trainer.report: tabs with charts, tables and samples. Text is always inserted as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const { runs } = data;
const single = runs.length === 1;
const COLORS = data.colors;

// Creates an element: el("td.mono", { title: "x", click: act }, "text", [nodes]). The object is optional.
function el(kind, ...inside) {
  const [name, ...classes] = kind.split(".");
  const node = document.createElement(name);
  node.className = classes.filter(Boolean).join(" ");
  for (const [key, value] of Object.entries(inside[0]?.constructor === Object ? inside.shift() : {})) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...inside.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== ""));
  return node;
}

// Formats a number for reading: 0.0131, 12.5, 1,250, 3.2e-7. Text is returned unchanged.
function format(value) {
  if (typeof value !== "number") return value ?? "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
}

// -------------------------------------------------------------------------------------------------------- charts

// View of all charts over steps: smooth is the smoothing factor, 0 to 0.99; range is the shown steps, null for all.
const view = { smooth: 0, range: null };
const charts = new Set();
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) target.draw();
});

// Loads plotly, which the page contains compressed, and then draws the charts.
async function unpackPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (x) => x.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(el("script", await new Response(unpacked).text()));
  redraw();
}

function redraw() {
  for (const card of charts) if (card.isConnected && card.getBoundingClientRect().top < 2 * innerHeight) card.draw();
}

// Returns [steps, values] of a metric in a run, or null if the run did not log it.
function series(run, metric) {
  const found = runs[run].series[metric];
  if (!found) return null;
  const [steps, values] = found.length === 2 ? found : [runs[run].steps, found[0]];
  const places = steps.map((_, place) => place).filter((place) => values[place] !== null);
  return [places.map((place) => steps[place]), places.map((place) => values[place])];
}

// Returns the exponential moving average, corrected for its start.
function smoothed(values) {
  let [sum, whole] = [0, 0];
  const add = (old, value) => view.smooth * old + (1 - view.smooth) * value;
  return values.map((value) => (sum = add(sum, value)) / (whole = add(whole, 1)));
}

// Returns plotly's traces. A trace with `run` and `metric` gets its numbers from there; with smoothing, a pale trace
// shows the raw values.
function tracesOf({ run, metric, ...trace }) {
  if (metric === undefined) return [trace];
  const [x, y] = series(run, metric);
  const mode = x.length <= 40 ? "lines+markers" : "lines";
  const line = { x, y, mode, marker: { size: 4 }, hovertemplate: "%{y:.4~g}", ...trace };
  if (view.smooth === 0) return [line];
  return [{ ...line, opacity: 0.25, showlegend: false, hoverinfo: "skip", hovertemplate: null }, { ...line, y: smoothed(y) }];
}

// Creates a card with a chart of page_charts.py, {title, unit, wide, traces, layout}, which is drawn when visible.
function chartCard({ title, unit, wide, traces, layout = {} }) {
  const isOverSteps = layout.xaxis === undefined; // charts over other quantities define their axis
  const plot = el("div.plot");
  const head = el("div.line", el("h3.wrap", title), el("span.soft.small", unit));
  const card = el(`figure.card.chart.${wide ? "wide" : ""}`, { "aria-label": title }, head, plot);
  card.draw = () => {
    if (!window.Plotly || !plot.clientWidth) return;
    const { color, backgroundColor, borderTopColor } = getComputedStyle(card);
    const drawn = traces.flatMap(tracesOf);
    const range = isOverSteps && view.range ? { range: [...view.range], autorange: false } : { autorange: true };
    const base = {
      width: plot.clientWidth, height: wide ? 270 : 220, margin: { l: 48, r: 10, t: 8, b: 24 }, colorway: COLORS,
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { family: "system-ui, sans-serif", size: 11, color },
      hovermode: "x unified", hoverlabel: { bgcolor: backgroundColor, namelength: -1 },
      showlegend: traces.length > 1, legend: { orientation: "h", y: -0.12, yanchor: "top" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", ...layout,
      xaxis: { showgrid: false, zeroline: false, ...(isOverSteps ? wholeSteps(drawn) : {}), ...range, ...layout.xaxis },
      yaxis: { nticks: 6, gridcolor: borderTopColor, zeroline: false, exponentformat: "e", ...layout.yaxis, ...fromZero(drawn) },
    };
    const isFirst = !plot.data;
    Plotly.react(plot, drawn, base, { displayModeBar: false });
    if (isFirst && isOverSteps) plot.on("plotly_relayout", zoom);
  };
  seen.observe(card);
  charts.add(card);
  return card;
}

// Returns axis options with ticks only at whole steps; for few steps, plotly would add ticks between them.
function wholeSteps(traces) {
  const [low, high] = view.range ?? extent(traces.flatMap(({ x }) => x));
  return high - low < 8 ? { dtick: 1, tick0: 0 } : {};
}

// Returns axis options that start at 0 if all values are equal. Plotly would show one unit around the value, in which a
// small constant such as a learning rate looks like 0.
function fromZero(traces) {
  const [low, high] = extent(traces.flatMap(({ y, error_y }) => (error_y ? [] : y)));
  return low === high && low !== 0 ? { rangemode: "tozero" } : {};
}

function extent(values) {
  const wider = ([low, high], value) => (value === null ? [low, high] : [Math.min(low, value), Math.max(high, value)]);
  return values.reduce(wider, [Infinity, -Infinity]);
}

function zoom(change) {
  const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (from === undefined && !change["xaxis.autorange"]) return;
  view.range = from === undefined ? null : [from, to];
  redraw();
}

function chartTools() {
  const input = () => redraw((view.smooth = Number(slider.value)));
  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, input });
  const all = el("button", { type: "button", click: () => redraw((view.range = null)) }, "all steps");
  return el("div.tools", el("label", "smoothing", slider), all, el("span.soft.small", "drag in a chart to zoom all"));
}

// Creates a small line chart without axes.
function spark([steps, values], stroke) {
  const [low, high, first] = [Math.min(...values), Math.max(...values), steps[0]];
  const place = (step, at) =>
    `${2 + (116 * (step - first)) / (steps.at(-1) - first || 1)},${25 - (22 * (values[at] - low)) / (high - low || 1)}`;
  const [svg, line] = ["svg", "polyline"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 120 28");
  line.setAttribute("points", steps.map(place).join(" "));
  line.setAttribute("style", `fill: none; stroke: ${stroke}; stroke-width: 1.3`);
  svg.append(line);
  return svg;
}

// -------------------------------------------------------------------------------------------------------- tables

const AT_ONCE = 100;
const collator = new Intl.Collator(undefined, { numeric: true });

// Compares two values for sorting: numbers before words, and empty values always last.
function inOrder(a, b, down) {
  const empty = (value) => value === null || value === undefined || value === "";
  if (empty(a) || empty(b)) return empty(a) - empty(b);
  const isWord = (value) => Number(typeof value !== "number");
  const order = isWord(a) || isWord(b) ? isWord(a) - isWord(b) || collator.compare(a, b) : a - b;
  return down ? -order : order;
}

// Creates a table that is sorted by a click on a heading. columns: {name, style, value: sort key, cell: shown content}.
// words: function that returns the searched text of an item. filters: {name: function that returns an item's value}.
// ways: {button: {keep, by, down}}; the first is active initially. open: function that returns the details of an item,
// which a click on its row shows.
function listing({ items, columns, kind = "cards", words = null, filters = {}, ways = { "": {} }, open = null }) {
  const state = { way: Object.keys(ways)[0], by: 0, down: false, shown: AT_ONCE };
  const update = (change) => show(Object.assign(state, { shown: AT_ONCE }, change));
  const input = () => update({});
  const search = el("input", { type: "search", placeholder: "search", "aria-label": "search", hidden: !words, input });
  const selects = Object.entries(filters).map(([name, valueOf]) => {
    const values = [...new Set(items.map(valueOf))].sort((a, b) => inOrder(a, b));
    const options = values.map((value) => el("option", { value }, `${name}: ${value}`));
    const node = el("select", { "aria-label": name, change: input }, el("option", { value: "" }, `${name}: all`), options);
    return { node, fits: (item) => node.value === "" || String(valueOf(item)) === node.value };
  });
  const choose = (way) => update({ way, by: columns.findIndex(({ name }) => name === ways[way].by), down: ways[way].down });
  const buttons = Object.keys(ways).map((way) => el("button", { type: "button", click: () => choose(way) }, way));
  const sort = (by) => update({ by, down: state.by !== by || !state.down });
  const heads = columns.map(({ name, style = "" }, at) =>
    el(`th.${style}`, el("button", { type: "button", click: () => sort(at) }, name)));
  const count = el("span.soft.small");
  const body = el("tbody");
  const more = el("button", { type: "button", click: () => show((state.shown += 5 * AT_ONCE)) }, "show more");

  function show() {
    const word = search.value.toLowerCase();
    const { keep = () => true } = ways[state.way];
    const fits = (item) => keep(item) && selects.every((one) => one.fits(item)) && (!word || words(item).includes(word));
    const kept = items.filter(fits);
    if (columns[state.by]) kept.sort((a, b) => inOrder(...[a, b].map(columns[state.by].value), state.down));
    count.textContent = `${kept.length.toLocaleString("en-US")} of ${items.length.toLocaleString("en-US")}`;
    body.replaceChildren(...kept.slice(0, state.shown).map((item) => rowOf(item, columns, open, word)));
    more.hidden = kept.length <= state.shown;
    heads.forEach((head, at) => head.removeAttribute("aria-sort", at));
    heads[state.by]?.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === state.way));
  }

  choose(state.way);
  const tools = [search, selects.map(({ node }) => node), buttons.length > 1 ? buttons : [], count];
  const table = el(`table.${kind}`, el("thead", el("tr", heads)), body);
  return [words ? el("div.tools", tools) : null, el("div.scroll", table), el("p", more)];
}

function rowOf(item, columns, open, word) {
  const cells = columns.map(({ name, style = "", value, cell = value }) =>
    el(`td.${style}`, { "data-name": name }, cell(item, word)));
  if (!open) return el("tr", cells);
  const unfold = () => {
    if (row.nextSibling?.classList.contains("open")) row.nextSibling.remove();
    else row.after(el("tr.open", el("td", { colspan: columns.length }, open(item, word))));
  };
  const row = el("tr.pick", { tabindex: 0, click: unfold, keydown: ({ key }) => key === "Enter" && unfold() }, cells);
  return row;
}

// ------------------------------------------------------------------------------------------------------ overview

const factsOf = (facts) =>
  el("dl.facts", Object.entries(facts).map(([name, value]) => el("div", el("dt", name), el("dd", value))));

function findingCard(one) {
  const why = [one.cause && `Likely: ${one.cause}.`, one.advice && `To do: ${one.advice}`].filter(Boolean);
  const log = one.log ? el("pre", one.log) : null;
  const head = el("div", el(`span.grade.${one.grade}`, one.grade), one.text);
  return el(`div.finding.${one.grade}`, head, log, why.map((text) => el("div", text)));
}

function findings(run) {
  const [fine, rest] = [true, false].map((isFine) => run.findings.filter(({ grade }) => (grade === "ok") === isFine));
  const more = el("details", el("summary", `${fine.length} checks are fine`), fine.map(findingCard));
  const shown = [rest.length ? rest.map(findingCard) : el("p.soft", "No problems found."), more];
  return single ? [el("h2", "Findings"), shown] : el("details", el("summary", `Findings on ${run.title}`), shown);
}

function compared() {
  const value = (run, name, place = -1) => series(run, name)?.[1].at(place);
  const cell = (run, name) => [0, -1].map((place) => format(value(run, name, place))).join(" → ");
  const of = ({ title }, run) =>
    ({ name: title, style: "right", value: (name) => value(run, name), cell: (name) => cell(run, name) });
  const columns = [{ name: "metric, first → last value", style: "mono.wrap", value: (name) => name }, ...runs.map(of)];
  return listing({ items: data.compared, columns });
}

function overview() {
  const notes = runs.flatMap((run) => run.notes.map((note) => el("li", single ? note : `${run.title}: ${note}`)));
  return [
    runs.map((run) => [single ? null : el("h3.wrap", run.title), factsOf(run.facts)]),
    single ? null : compared(),
    runs.map(findings),
    el("h2", "Curves"),
    chartTools(),
    el("div.charts", data.charts.map(chartCard)),
    runs.map(({ pictures }) => pictures.map(({ name, src }) => [el("h2", name), el("img", { alt: name, src })])),
    notes.length ? [el("h2", "Notes"), el("ul.soft.wrap", notes)] : null,
    el("p.soft.small", `Made ${data.made} from ${runs.map((run) => run.folder).join(", ")}`),
  ];
}

// ----------------------------------------------------------------------------------- metrics, configuration, sweep

function metricsTab() {
  const doc = (name) => data.docs[name] ?? {};
  const at = (name) => runs.findIndex((run) => run.series[name]);
  const curve = (name) => {
    const found = series(at(name), name);
    const [low, high] = [Math.min(...found[1]), Math.max(...found[1])].map(format);
    const numbers = [el("b", format(found[1].at(-1))), el("br"), el("span.soft.small", `${low} to ${high}`)];
    return el("div.line", spark(found, COLORS[0]), el("span.right", numbers));
  };
  const open = (name) => {
    const of = (_, run) => (runs[run].series[name] ? [{ run, metric: name, name: runs[run].title }] : []);
    return chartCard({ title: name, unit: doc(name).unit, wide: true, traces: runs.flatMap(of) });
  };
  const columns = [
    { name: "metric", style: "mono.wrap", value: (name) => name },
    { name: "curve", value: (name) => series(at(name), name)[1].at(-1), cell: curve },
    { name: "formula", style: "wrap", value: (name) => doc(name).formula },
    { name: "unit", style: "small", value: (name) => doc(name).unit },
    { name: "healthy", style: "small", value: (name) => doc(name).healthy },
  ];
  const words = (name) => `${name} ${doc(name).formula}`.toLowerCase();
  return listing({ items: data.metrics, columns, words, open });
}

function configuration() {
  const value = (run, key) => run.config[key]?.[0] ?? "";
  const differs = (key) => runs.some((run) => value(run, key) !== value(runs[0], key));
  const isOwn = (key) => runs.some((run) => run.config[key] && !run.config[key][1].startsWith("default"));
  const own = { "not the default": { keep: isOwn, by: "option" } };
  const ways = { ...(single ? {} : { "differs between runs": { keep: differs, by: "option" } }), ...own, all: {} };
  const cell = (run, key) => [el("code", value(run, key)), el("div.soft.small.wrap", run.config[key]?.[1])];
  const of = (run) => ({ name: run.title, value: (key) => value(run, key), cell: (key) => cell(run, key) });
  const columns = [{ name: "option", style: "mono.wrap", value: (key) => key }, ...runs.map(of)];
  const words = (key) => `${key} ${runs.map((run) => run.config[key]).join(" ")}`.toLowerCase();
  return listing({ items: [...new Set(runs.flatMap((run) => Object.keys(run.config)))], columns, ways, words });
}

function studyTab() {
  const { best, columns, facts, trials } = data.study;
  const shown = best.map(([title, commands], place) =>
    el("details", { open: place === 0 }, el("summary", title), commands.map((text) => el("pre.command", text))));
  const luck = "The best of many trials is partly lucky: repeat it with new seeds before you trust its value.";
  const cell = (value) => el(`span.${value === "failed" ? "bad" : ""}`, format(value));
  const column = (name, at) => ({ name, style: "wrap", value: (row) => row[at], cell: (row) => cell(row[at]) });
  return [
    factsOf(facts),
    [el("h2", "Best trials"), el("p.soft", luck), shown, el("h2", "Curves, and values by parameter")],
    el("div.charts", data.study.charts.map(chartCard)),
    [el("h2", "All trials"), listing({ items: trials, columns: columns.map(column) })],
  ];
}

// ------------------------------------------------------------------------------------------------------- samples

// Returns the parts of a text, with occurrences of the searched word marked.
function marked(text, word) {
  const lower = text.toLowerCase();
  const isSame = word && lower.length === text.length; // otherwise positions in `lower` and `text` differ
  const parts = [];
  let from = 0;
  for (let at = isSame ? lower.indexOf(word) : -1; at >= 0; at = lower.indexOf(word, from)) {
    parts.push(text.slice(from, at), el("mark", text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}

function box(title, text, word = "") {
  return text ? el("div.box", { tabindex: 0 }, el("h3", title), el("pre", marked(text, word))) : null;
}

// Returns the beginning of a text, or the part around the searched word.
function peek(text, word) {
  const from = Math.max(0, word ? text.toLowerCase().indexOf(word) - 30 : 0);
  return marked(text.slice(from, from + 160), word);
}

const scoreOf = ({ score, timed_out }) => (score === null ? el("span.bad", timed_out ? "timed out" : "failed") : format(score));

// Returns the samples as objects. If the mean score of a prompt changed over the steps, the prompt's last sample also
// has `first`, its first sample, and `change`, the difference of the means.
function allSamples() {
  const samples = data.samples.map((row) => Object.fromEntries(data.fields.map((name, at) => [name, row[at]])));
  const byPrompt = new Map();
  for (const sample of samples) {
    sample.messages = data.prompts[sample.prompt];
    sample.question = sample.messages.at(-1)?.[1] ?? "";
    const messages = [...sample.messages, ...sample.requests.flatMap(({ messages }) => messages)];
    const texts = [...messages.map(([, text]) => text), sample.output, sample.gts, sample.uid];
    sample.words = texts.join("\n").toLowerCase();
    const key = JSON.stringify([sample.run, sample.kind, sample.data_source, sample.uid]);
    sample.alike = byPrompt.get(key) ?? byPrompt.set(key, []).get(key);
    sample.alike.push(sample);
  }
  for (const alike of byPrompt.values()) {
    const scored = alike.filter(({ score }) => score !== null).sort((a, b) => a.step - b.step);
    const [first, last] = [scored[0], scored.at(-1)];
    const mean = (step) => {
      const alike = scored.filter((one) => one.step === step);
      return alike.reduce((sum, { score }) => sum + score, 0) / alike.length;
    };
    if (scored.length && mean(last.step) !== mean(first.step)) Object.assign(last, { first, change: mean(last.step) - mean(first.step) });
  }
  return samples.sort((a, b) => b.step - a.step);
}

// Creates the tree of an episode's requests. A block holds a conversation or branch, and the branches from its requests.
function requestTree({ requests, total_requests, score, timed_out }, word) {
  if (!total_requests) return null;
  const blocks = [el("div")];
  for (const { number, depth, start, facts, discarded, messages } of requests) {
    blocks.length = Math.min(blocks.length, depth + (start ? 1 : 2));
    if (start) blocks.at(-1).append((blocks[depth + 1] = el("div.branch")));
    const reason = discarded ? el("span.look", `, discarded: ${discarded}`) : "";
    const beginning = el("div.first", peek(messages.at(-1)[1], word));
    const title = el("summary.small", el("b", `#${number} ${start}`.trim()), ` ${facts}`, reason, beginning);
    const isFound = word !== "" && messages.some(([, text]) => text.toLowerCase().includes(word));
    const boxes = el("div.answer", messages.map(([role, text]) => box(role, text, word)));
    blocks.at(-1).append(el("details", { open: isFound }, title, boxes));
  }
  const left = total_requests - requests.length;
  const title = el("summary", `${format(total_requests)} requests, reward `, scoreOf({ score, timed_out }));
  const more = left ? el("p.soft.small", `${format(left)} more requests are in the files of the run`) : null;
  return el("details.box.tree", { open: true }, title, blocks[0], more);
}

// Creates the images of a sample's prompt. Images that are not in the page are represented by their paths.
function promptImages({ run, images }) {
  const show = (name) => (runs[run].images[name] ? el("img", { alt: name, src: runs[run].images[name] }) : el("span.soft", name));
  return images.length ? el("div.images.small", images.map(show)) : null;
}

const thumbnails = ({ run, images }) =>
  images.filter((name) => runs[run].images[name]).map((name) => el("img.thumbnail", { alt: "", src: runs[run].images[name] }));

function answerOf(sample, word) {
  const { alike, first, kind, step, uid, policy_version, response_length, finish_reason } = sample;
  const facts = [kind, `step ${step}`, uid, `weights of step ${policy_version}`, `${response_length} tokens`, finish_reason];
  const parts = Object.entries(sample.parts).map(([name, value]) => `${name}: ${format(value)}`);
  const heading = (one) => `step ${one.step}, score ${one.score === null ? "failed" : format(one.score)}`;
  const others = alike.filter((other) => other !== sample).slice(0, 60);
  const shown = others.map((other) => el("details", el("summary", heading(other)), box("response", other.output)));
  return el(
    "div.answer",
    el("div.soft.small.wrap", [single ? "" : runs[sample.run].title, ...facts].filter(Boolean).join(" · ")),
    sample.messages.map(([role, text]) => box(role, text, word)),
    promptImages(sample),
    box("ground truth", sample.gts, word),
    el(`div.answer.${first ? "two" : ""}`, (first ? [first, sample] : [sample]).map((one) => box(heading(one), one.output, word))),
    requestTree(sample, word),
    box("entries of the reward's result", parts.join("\n")),
    others.length ? el("details", el("summary", `${others.length} more answers to this prompt`), shown) : null,
  );
}

function samplesTab() {
  const why = "this kind of run writes no text samples, or trainer.samples_max_mb is 0";
  if (!data.samples.length) return el("p.soft", `There are no samples: ${why}.`);
  const columns = [
    { name: "step", style: "right", value: ({ step }) => step },
    { name: "kind", value: ({ kind }) => kind },
    { name: "prompt", style: "peek", value: ({ question }) => question, cell: (sample, word) => [...thumbnails(sample), peek(sample.question, word)] },
    { name: "response", style: "peek", value: ({ output }) => output, cell: ({ output }, word) => peek(output, word) },
    { name: "score", style: "right", value: ({ score }) => score, cell: scoreOf },
    { name: "change", style: "right", value: ({ change }) => change, cell: ({ change }) => (change ? format(change) : "") },
    { name: "tokens", style: "right", value: ({ response_length }) => response_length },
    { name: "finish reason", value: ({ finish_reason }) => finish_reason },
  ];
  const ways = {
    all: { by: "step", down: true },
    best: { keep: ({ score }) => score !== null, by: "score", down: true },
    worst: { keep: ({ score }) => score !== null, by: "score" },
    changed: { keep: ({ change }) => change !== undefined, by: "change", down: true },
    failed: { keep: ({ score }) => score === null, by: "step", down: true },
  };
  const of = single ? {} : { run: ({ run }) => runs[run].title };
  const filters = { ...of, kind: (one) => one.kind, source: (one) => one.data_source, step: (one) => one.step };
  return listing({ items: allSamples(), columns, ways, filters, words: ({ words }) => words, open: answerOf });
}

// ---------------------------------------------------------------------------------------------------------- tabs

const ofRuns = {
  overview: [data.study ? "Best runs" : "Overview", overview], metrics: ["All metrics", metricsTab],
  samples: ["Samples", samplesTab], config: ["Configuration", configuration],
};
const TABS = { ...(data.study ? { study: ["Sweep", studyTab] } : {}), ...(runs.length ? ofRuns : {}) };
const built = {};
const tabs = Object.entries(TABS).map(([name, [title]]) =>
  el("button", { type: "button", role: "tab", "data-tab": name, click: () => (location.hash = name) }, title));

function openTab() {
  const name = TABS[location.hash.slice(1)] ? location.hash.slice(1) : Object.keys(TABS)[0];
  built[name] ??= el("section", TABS[name][1]());
  document.querySelector("main").replaceChildren(built[name]);
  for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
  redraw();
}

document.getElementById("theme").addEventListener("click", () => {
  const { style } = document.documentElement;
  const isDark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = isDark ? "light" : "dark";
  redraw();
});
document.querySelector("header").append(el("nav", { role: "tablist", "aria-label": "Parts of the report" }, tabs));
addEventListener("hashchange", openTab);
addEventListener("resize", redraw);
openTab();
unpackPlotly();
