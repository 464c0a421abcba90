// The parts of the report: overview, metrics, configuration, and the tabs that open them.

// ------------------------------------------------------------------------------------------------------ overview

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function countsOf(run) {
  const counts = [
    ["bad", "bad"],
    ["look", "to look at"],
  ].map(([grade, words]) => [run.findings.filter((one) => one.grade === grade).length, words]);
  return (
    counts
      .filter(([count]) => count)
      .map(([count, words]) => `${count} ${words}`)
      .join(", ") || "all ok"
  );
}

function facts(run) {
  const of = run.total_steps === null ? "" : ` of ${run.total_steps}`;
  const found = [
    ["State", run.state],
    ["Steps", `${run.last_step}${of}`],
  ];
  if (run.seconds) found.push(["Time in steps", duration(run.seconds)]);
  found.push(["Last written", run.written]);
  found.push(["Findings", countsOf(run)]);
  return el(
    "dl",
    { class: "facts" },
    found.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

function finding(one) {
  const steps = one.steps.length > 3 && one.steps.length < 12 ? `Steps: ${one.steps.join(", ")}` : "";
  return el(
    "div",
    { class: `finding ${one.grade}` },
    el("div", { class: "wrap" }, el("span", { class: "grade" }, one.grade), one.text + (one.grade === "ok" ? "" : ".")),
    one.cause ? el("div", { class: "wrap" }, `Likely: ${one.cause}.`) : null,
    one.advice ? el("div", { class: "wrap" }, `To do: ${one.advice}`) : null,
    steps ? el("div", { class: "soft small" }, steps) : null,
    one.grade !== "ok" && docOf(one.metric)
      ? el("button", { class: "quiet", type: "button", click: () => showMetric(one.metric) }, "show the curve")
      : null,
  );
}

function findings(run) {
  const ok = run.findings.filter((one) => one.grade === "ok");
  const rest = run.findings.filter((one) => one.grade !== "ok");
  const told = [
    rest.map(finding),
    rest.length ? null : el("p", { class: "soft" }, "Nothing to complain about."),
    el("details", {}, el("summary", {}, `${ok.length} checks are fine`), ok.map(finding)),
  ];
  if (single) return [el("h2", {}, "Findings"), told];
  return el("details", {}, el("summary", {}, `Findings on ${run.title}: ${countsOf(run)}`), told);
}

function metricTable() {
  const chosen = [
    ...data.validation.map((line) => line.name),
    ...PANELS.flatMap(([, , names]) => names.map(([name]) => name)).filter((name) =>
      runs.some((run) => run.series[name]),
    ),
    ...(runs.some((run) => run.series["timing_s/step"]) ? ["timing_s/step"] : []),
  ];
  const cell = (name, at) => {
    const own = points(at, name);
    if (!own.length) return "-";
    const [, last] = own[own.length - 1];
    return own.length > 1 ? `${format(own[0][1])} → ${format(last)}` : format(last);
  };
  const head = el(
    "tr",
    {},
    el("th", {}, "metric, first → last value"),
    runs.map((run, at) =>
      el("th", { class: "right" }, el("span", { class: "swatch", style: { borderTopColor: runColor(at) } }), run.title),
    ),
  );
  const rows = chosen.map((name) =>
    el(
      "tr",
      {},
      el("td", { class: "mono wrap" }, name),
      runs.map((_, at) => el("td", { class: "right" }, cell(name, at))),
    ),
  );
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

// The slider and the range of steps, which act on all charts. Each copy follows the others.
function chartTools() {
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: view.smooth,
    input: () => {
      view.smooth = Number(slider.value);
      redraw();
    },
  });
  const from = el("input", { type: "number", placeholder: "first", "aria-label": "first step" });
  const to = el("input", { type: "number", placeholder: "last", "aria-label": "last step" });
  const zoom = () => {
    const limit = (input, other) => (input.value === "" ? other : Number(input.value));
    if (from.value === "" && to.value === "") zoomTo(null, null);
    else zoomTo(limit(from, 0), limit(to, Math.max(...runs.map((run) => run.last_step))));
  };
  from.addEventListener("change", zoom);
  to.addEventListener("change", zoom);
  document.addEventListener("zoom", () => {
    from.value = view.from ?? "";
    to.value = view.to ?? "";
  });
  return el(
    "div",
    { class: "tools" },
    el("label", {}, "smoothing", slider),
    el("span", {}, "steps ", from, " to ", to),
    el("button", { type: "button", click: () => zoomTo(null, null) }, "all steps"),
    el("span", { class: "soft small desk" }, "drag in a chart to zoom, double click for all"),
  );
}

function overview() {
  const panels = [...PANELS.map(panel)];
  panels.splice(1, 0, ...(data.validation.length ? validationPanels() : []));
  const parts = Object.keys(Object.assign({}, ...runs.map((run) => run.series))).filter(
    (name) => /^reward\/[^/]+\/mean$/.test(name) && !PANELS.some(([, , names]) => names.some(([own]) => own === name)),
  );
  if (parts.length)
    panels.push(panel(["What the reward returned, means", "", parts.map((name) => [name, name.split("/")[1]])]));
  panels.push(...runs.map((_, at) => timePanel(at)));
  const notes = runs.flatMap((run) => run.notes.map((note) => el("li", {}, single ? note : `${run.title}: ${note}`)));
  return el(
    "section",
    {},
    single ? facts(runs[0]) : null,
    single
      ? null
      : [
          el("h2", {}, "Runs"),
          ...runs.map((run) => [el("h3", { class: "wrap" }, run.title), facts(run)]),
          metricTable(),
        ],
    runs.map(findings),
    el("h2", {}, "Curves"),
    chartTools(),
    el(
      "div",
      { class: "charts" },
      panels.filter(Boolean).map((chart) => chart.node),
    ),
    runs.flatMap((run) =>
      run.pictures.map((picture) => [
        el("h2", {}, single ? picture.name : `${run.title}: ${picture.name}`),
        el("img", { class: "shown", alt: picture.name, src: picture.data }),
      ]),
    ),
    notes.length ? [el("h2", {}, "Notes"), el("ul", { class: "soft wrap" }, notes)] : null,
    el("p", { class: "soft small wrap" }, `Made ${data.made} from ${runs.map((run) => run.folder).join(", ")}`),
  );
}

// ------------------------------------------------------------------------------------------------------- metrics

function docOf(name) {
  return runs.some((run) => run.series[name])
    ? (data.docs[name] ?? { formula: "", unit: "", healthy: "", file: "" })
    : null;
}

const metricSearch = el("input", {
  type: "search",
  placeholder: "search names and formulas",
  "aria-label": "search metrics",
});

function showMetric(name) {
  metricSearch.value = name;
  location.hash = "metrics";
  metricSearch.dispatchEvent(new Event("input"));
}

function metricRow(name) {
  const doc = docOf(name);
  const lines = linesOf(name, "", 0);
  const unfold = () => {
    if (row.nextSibling?.classList?.contains("unfolded")) return row.nextSibling.remove();
    const chart = new LineChart(name, doc.unit, lines, true);
    row.after(el("tr", { class: "unfolded" }, el("td", { colspan: 4 }, chart.node)));
    chart.draw();
  };
  const summary = lines.map((line) => {
    const values = line.points.map(([, value]) => value);
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    return el(
      "div",
      { class: "line" },
      spark(line.points, line.color),
      el(
        "span",
        { class: "right" },
        el("b", {}, format(values[values.length - 1])),
        el("br"),
        el("span", { class: "soft small" }, `${format(low)} to ${format(high)}`),
      ),
    );
  });
  const row = el(
    "tr",
    { class: "pick", click: unfold },
    el(
      "td",
      { class: "mono wrap" },
      el("button", { class: "mono wrap", type: "button", style: { textAlign: "left" } }, name),
    ),
    el("td", {}, summary),
    el("td", { class: "wrap" }, doc.formula, doc.file ? el("div", { class: "soft small" }, doc.file) : null),
    el(
      "td",
      { class: "small" },
      doc.unit,
      doc.healthy ? el("div", { class: "soft" }, `healthy: ${doc.healthy}`) : null,
    ),
  );
  row.words = `${name} ${doc.formula}`.toLowerCase();
  row.name = name;
  row.unfold = unfold;
  return row;
}

function metrics() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].sort();
  const rows = names.map(metricRow);
  const body = el("tbody");
  const count = el("span", { class: "soft small" });
  const update = () => {
    const words = metricSearch.value.toLowerCase().split(/\s+/);
    const found = rows.filter((row) => words.every((word) => row.words.includes(word)));
    body.replaceChildren(...found);
    count.textContent = `${found.length} of ${rows.length} metrics`;
    const exact = found.length === 1 ? found[0] : found.find((row) => row.name === metricSearch.value);
    if (exact) exact.unfold();
  };
  metricSearch.addEventListener("input", update);
  update();
  const head = ["metric", "course, last value, range", "formula and file", "unit"].map((name) => el("th", {}, name));
  return el(
    "section",
    {},
    el("div", { class: "tools" }, metricSearch, count),
    chartTools(),
    el("div", { class: "scroll" }, el("table", { class: "metrics" }, el("thead", {}, el("tr", {}, head)), body)),
  );
}

// ------------------------------------------------------------------------------------------------- configuration

function configuration() {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return el("p", { class: "soft" }, "There is no config.yaml in the run folder.");
  const value = (run, key) => (run.config[key] ? run.config[key][0] : null);
  const differs = (key) => runs.some((run) => value(run, key) !== value(runs[0], key));
  const isOwn = (key) => runs.some((run) => run.config[key] && !run.config[key][1].startsWith("default"));
  const search = el("input", { type: "search", placeholder: "search keys and values", "aria-label": "search options" });
  const choices = [
    ["all", "all options"],
    ["own", "not the default"],
    ...(single ? [] : [["differs", "differs between runs"]]),
  ];
  const choice = el(
    "select",
    { "aria-label": "which options" },
    choices.map(([name, label]) => el("option", { value: name }, label)),
  );
  choice.value = single ? "own" : "differs";
  const count = el("span", { class: "soft small" });
  const body = el("tbody");
  const update = () => {
    const words = search.value.toLowerCase();
    const found = keys.filter(
      (key) =>
        (choice.value === "all" || (choice.value === "own" ? isOwn(key) : differs(key))) &&
        `${key} ${runs.map((run) => run.config[key]).join(" ")}`.toLowerCase().includes(words),
    );
    count.textContent = `${found.length} of ${keys.length} options`;
    body.replaceChildren(
      ...found.map((key) =>
        el(
          "tr",
          { class: !single && differs(key) ? "differs" : "" },
          el("td", { class: "mono wrap" }, key),
          runs.map((run) =>
            el(
              "td",
              {},
              el("code", { class: "wrap" }, value(run, key) ?? "-"),
              el("div", { class: "soft small wrap" }, run.config[key]?.[1] ?? "not there"),
            ),
          ),
        ),
      ),
    );
  };
  search.addEventListener("input", update);
  choice.addEventListener("change", update);
  update();
  const head = el(
    "tr",
    {},
    el("th", {}, "option"),
    runs.map((run) => el("th", {}, single ? "value and where it comes from" : run.title)),
  );
  return el(
    "section",
    {},
    el("div", { class: "tools" }, search, choice, count),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)),
  );
}

// ---------------------------------------------------------------------------------------------------------- tabs

const TABS = {
  overview: ["Overview", overview],
  metrics: ["All metrics", metrics],
  samples: ["Samples", samplesTab],
  config: ["Configuration", configuration],
};
const built = {};

function openTab() {
  const wanted = location.hash.slice(1).split("?")[0];
  const name = TABS[wanted] ? wanted : "overview";
  built[name] ??= TABS[name][1]();
  document.getElementById("main").replaceChildren(built[name]);
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-selected", String(button.dataset.tab === name));
    button.tabIndex = button.dataset.tab === name ? 0 : -1;
  }
  redraw();
}

function start() {
  const names = Object.keys(TABS);
  const buttons = names.map((name) =>
    el("button", { type: "button", role: "tab", "data-tab": name, click: () => (location.hash = name) }, TABS[name][0]),
  );
  const tabs = document.getElementById("tabs");
  tabs.append(...buttons);
  tabs.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = buttons[(buttons.indexOf(document.activeElement) + move + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  document.getElementById("title").textContent = runs.map((run) => run.title).join(" · ");
  const root = document.documentElement;
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
  addEventListener("hashchange", openTab);
  addEventListener("resize", redraw);
  openTab();
}

start();
