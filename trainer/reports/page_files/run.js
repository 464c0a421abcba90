// The parts of the report: overview, metrics, configuration, and the tabs that open them.

// ------------------------------------------------------------------------------------------------------ overview

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function countsOf(run) {
  const count = (grade) => run.findings.filter((one) => one.grade === grade).length;
  const [bad, look] = [count("bad"), count("look")];
  return [bad ? `${bad} bad` : "", look ? `${look} to look at` : ""].filter(Boolean).join(", ") || "all ok";
}

function facts(run) {
  const found = {
    State: run.state,
    Steps: run.last_step + (run.total_steps === null ? "" : ` of ${run.total_steps}`),
    "Time in steps": run.seconds ? duration(run.seconds) : null,
    "Last written": run.written,
    Findings: countsOf(run),
  };
  const known = Object.entries(found).filter(([, value]) => value !== null);
  return el("dl.facts", known.map(([name, value]) => el("div", el("dt", name), el("dd", value))));
}

function finding(one) {
  const isFine = one.grade === "ok";
  const click = () => showMetric(one.metric);
  return el(
    `div.finding.${one.grade}`,
    el("div", el(`span.grade.${one.grade}`, one.grade), one.text + (isFine ? "" : ".")),
    one.log ? el("pre", one.log) : null,
    one.cause ? el("div", `Likely: ${one.cause}.`) : null,
    one.advice ? el("div", `To do: ${one.advice}`) : null,
    one.steps.length > 3 && one.steps.length < 12 ? el("div.soft.small", `Steps: ${one.steps.join(", ")}`) : null,
    !isFine && isLogged(one.metric) ? el("button.quiet", { type: "button", click }, "show the curve") : null,
  );
}

function findings(run) {
  const ok = run.findings.filter((one) => one.grade === "ok");
  const rest = run.findings.filter((one) => one.grade !== "ok");
  const told = [
    rest.length ? rest.map(finding) : el("p.soft", "Nothing to complain about."),
    el("details", el("summary", `${ok.length} checks are fine`), ok.map(finding)),
  ];
  if (single) return [el("h2", "Findings"), told];
  return el("details", el("summary", `Findings on ${run.title}: ${countsOf(run)}`), told);
}

function metricTable() {
  const chosen = [
    ...data.validation.flatMap((line) => [...new Set(Object.values(line.names))]),
    ...[...PANELS.flatMap(([, , names]) => Object.keys(names)), "timing_s/step"].filter(isLogged),
  ];
  const cell = (name, at) => {
    const own = points(at, name).map(([, value]) => format(value));
    return own.length > 1 ? `${own[0]} → ${own.at(-1)}` : (own[0] ?? "-");
  };
  const title = (run, at) => el("th.right", el("span.swatch", { style: { borderTopColor: runColor(at) } }), run.title);
  const head = [el("th", "metric, first → last value"), runs.map(title)];
  const cells = (name) => runs.map((run, at) => el("td.right", { "data-run": run.title }, cell(name, at)));
  const rows = chosen.map((name) => el("tr", el("td.mono.wrap", name), cells(name)));
  return tableOf("compared", el("tr", head), el("tbody", rows));
}

function tableOf(kind, headings, body) {
  return el("div.scroll", el(`table.${kind}`, el("thead", headings), body));
}

// The slider and the range of steps, which act on all charts. Each copy follows the others.
function chartTools() {
  const smooth = () => {
    view.smooth = Number(slider.value);
    document.dispatchEvent(new CustomEvent("view"));
    redraw();
  };
  const limit = ({ value }, otherwise) => (value === "" ? otherwise : Number(value));
  const zoom = () => {
    if (from.value === "" && to.value === "") zoomTo(null, null);
    else zoomTo(limit(from, 0), limit(to, Math.max(...runs.map((run) => run.last_step))));
  };
  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, input: smooth });
  const from = el("input", { type: "number", placeholder: "first", "aria-label": "first step", change: zoom });
  const to = el("input", { type: "number", placeholder: "last", "aria-label": "last step", change: zoom });
  document.addEventListener("view", () => {
    [slider.value, from.value, to.value] = [view.smooth, view.from ?? "", view.to ?? ""];
  });
  return el(
    "div.tools",
    el("label", "smoothing", slider),
    el("span", "steps ", from, " to ", to),
    el("button", { type: "button", click: () => zoomTo(null, null) }, "all steps"),
    el("span.soft.small.desk", "drag in a chart to zoom, double click for all"),
  );
}

function overview() {
  const panels = PANELS.map(panel);
  panels.splice(1, 0, ...validationPanels());
  const shown = new Set(PANELS.flatMap(([, , names]) => Object.keys(names)));
  const parts = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter(
    (name) => /^reward\/[^/]+\/mean$/.test(name) && !shown.has(name),
  );
  const labels = Object.fromEntries(parts.map((name) => [name, name.split("/")[1]]));
  panels.push(panel(["What the reward returned, means", "", labels]), ...runs.map((_, at) => timePanel(at)));
  const notes = runs.flatMap((run) => run.notes.map((note) => el("li", single ? note : `${run.title}: ${note}`)));
  const picture = (run, { name, data: src }) => [
    el("h2", single ? name : `${run.title}: ${name}`),
    el("img", { alt: name, src }),
  ];
  const several = () => [el("h2", "Runs"), runs.map((run) => [el("h3.wrap", run.title), facts(run)]), metricTable()];
  return el(
    "section",
    single ? facts(runs[0]) : several(),
    runs.map(findings),
    el("h2", "Curves"),
    chartTools(),
    el("div.charts", panels.filter(Boolean).map((chart) => chart.node)),
    runs.map((run) => run.pictures.map((one) => picture(run, one))),
    notes.length ? [el("h2", "Notes"), el("ul.soft.wrap", notes)] : null,
    el("p.soft.small", `Made ${data.made} from ${runs.map((run) => run.folder).join(", ")}`),
  );
}

// ------------------------------------------------------------------------------------------------------- metrics

const metricSearch = searchField("metrics", "names and formulas");

function searchField(what, where, input) {
  return el("input", { type: "search", placeholder: `search ${where}`, "aria-label": `search ${what}`, input });
}

function showMetric(name) {
  metricSearch.value = name;
  location.hash = "metrics";
  metricSearch.dispatchEvent(new Event("input"));
}

function course(line) {
  const values = line.points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const last = [el("b", format(values.at(-1))), el("br"), el("span.soft.small", `${format(low)} to ${format(high)}`)];
  return el("div.line", spark(line.points, line.color), el("span.right", last));
}

function metricRow(name) {
  const doc = data.docs[name] ?? { formula: "", unit: "", healthy: "" };
  const lines = linesOf(name, "", 0);
  const unfold = () => {
    if (row.nextSibling?.classList.contains("unfolded")) return row.nextSibling.remove();
    const chart = new LineChart(name, doc.unit, lines, true);
    row.after(el("tr.unfolded", el("td", { colspan: 4 }, chart.node)));
  };
  const row = el(
    "tr.pick",
    { click: unfold },
    el("td.mono.wrap", el("button.mono.wrap", { type: "button" }, name)),
    el("td", lines.map(course)),
    el("td.wrap", doc.formula),
    el("td.small", doc.unit, doc.healthy ? el("div.soft", `healthy: ${doc.healthy}`) : null),
  );
  return { row, name, unfold, words: `${name} ${doc.formula}`.toLowerCase() };
}

function metrics() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].sort();
  const rows = names.map(metricRow);
  const body = el("tbody");
  const count = el("span.soft.small");
  const update = () => {
    const words = metricSearch.value.toLowerCase().split(/\s+/);
    const found = rows.filter((one) => words.every((word) => one.words.includes(word)));
    body.replaceChildren(...found.map(({ row }) => row));
    count.textContent = `${found.length} of ${rows.length} metrics`;
    const exact = found.length === 1 ? found[0] : found.find(({ name }) => name === metricSearch.value);
    exact?.unfold();
  };
  metricSearch.addEventListener("input", update);
  update();
  const head = ["metric", "course, last value, range", "formula", "unit"].map((name) => el("th", name));
  return el("section", el("div.tools", metricSearch, count), chartTools(), tableOf("metrics", el("tr", head), body));
}

// ------------------------------------------------------------------------------------------------- configuration

function configuration() {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return el("p.soft", "There is no config.yaml in the run folder.");
  const value = (run, key) => run.config[key]?.[0] ?? null;
  const differs = (key) => runs.some((run) => value(run, key) !== value(runs[0], key));
  const isOwn = (key) => runs.some((run) => run.config[key] && !run.config[key][1].startsWith("default"));
  const fits = { all: () => true, own: isOwn, differs };
  const labels = { all: "all options", own: "not the default", ...(single ? {} : { differs: "differs between runs" }) };
  const cell = (run, key) =>
    el(
      "td",
      { "data-run": single ? null : run.title },
      el("code", value(run, key) ?? "-"),
      el("div.soft.small.wrap", run.config[key]?.[1] ?? "not there"),
    );
  const rowOf = (key) =>
    el(!single && differs(key) ? "tr.differs" : "tr", el("td.mono.wrap", key), runs.map((run) => cell(run, key)));
  const update = () => {
    const words = search.value.toLowerCase();
    const textOf = (key) => `${key} ${runs.map((run) => run.config[key]).join(" ")}`.toLowerCase();
    const found = keys.filter((key) => fits[choice.value](key) && textOf(key).includes(words));
    count.textContent = `${found.length} of ${keys.length} options`;
    body.replaceChildren(...found.map(rowOf));
  };
  const search = searchField("options", "keys and values", update);
  const choices = Object.entries(labels).map(([name, label]) => el("option", { value: name }, label));
  const choice = el("select", { "aria-label": "which options", change: update }, choices);
  choice.value = single ? "own" : "differs";
  const count = el("span.soft.small");
  const body = el("tbody");
  update();
  const head = [el("th", "option"), runs.map((run) => el("th", single ? "value and where it comes from" : run.title))];
  return el("section", el("div.tools", search, choice, count), tableOf("compared", el("tr", head), body));
}
