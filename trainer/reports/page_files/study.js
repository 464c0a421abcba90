// The parts of a sweep's page: the best trials, their curves, what the value depends on, and every trial.

let markedTrial = null;

function mark(trial) {
  markedTrial = markedTrial === trial ? null : trial;
  for (const row of document.querySelectorAll("tr[data-trial]"))
    row.classList.toggle("marked", row.dataset.trial === String(markedTrial));
  redraw();
}

const trialColor = (trial) => COLORS[data.study.trials.indexOf(trial) % COLORS.length];
const isFaint = (trial) => markedTrial !== null && markedTrial !== trial.number;
const told = ({ number, state, value, parameters }) =>
  `trial ${number} (${state}): ${format(value)}, ${Object.entries(parameters).map((one) => one.join("=")).join(", ")}`;

function trialChart(title, unit, options, figure) {
  const chart = new Chart(title, unit, { ...options, figure });
  chart.listen = () => chart.plot.on("plotly_click", ({ points }) => mark(points[0].data.trials[points[0].pointIndex]));
  return chart.node;
}

function curvesOf({ trials, metric }) {
  const figure = () => ({
    traces: trials.flatMap((trial) =>
      trial.curves.map((points) => ({
        ...traceOf(points, { color: trialColor(trial), width: 1.5 }, { opacity: isFaint(trial) ? 0.12 : 0.9 }),
        mode: "lines+markers", marker: { size: 3 }, text: told(trial), hoverinfo: "text+x+y",
        trials: points.map(() => trial.number),
      })),
    ),
    layout: { hovermode: "closest" },
  });
  return trialChart(metric, "a line for each run", { wide: true, height: 280 }, figure);
}

// One chart for each parameter: the value of each trial against it.
function effectOf({ trials, metric }, name) {
  const own = trials.filter(({ value }) => value !== null);
  const values = own.map(({ parameters }) => parameters[name]);
  const isNumber = values.every((value) => typeof value === "number");
  const isLog = isNumber && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) >= 20;
  const figure = () => {
    const marker = { size: 8, color: own.map(trialColor), opacity: own.map((one) => (isFaint(one) ? 0.15 : 0.9)) };
    const error_y = { type: "data", array: own.map((one) => one.half_width ?? 0), thickness: 1, color: GREY };
    const [y, trials, text] = [own.map((one) => one.value), own.map(({ number }) => number), own.map(told)];
    const trace = { x: isNumber ? values : values.map(String), y, trials, text, marker, error_y, mode: "markers" };
    const xaxis = { type: isLog ? "log" : isNumber ? "linear" : "category", tickformat: "", nticks: 5 };
    return { traces: [{ ...trace, hoverinfo: "text" }], layout: { hovermode: "closest", xaxis } };
  };
  return trialChart(name, metric, {}, figure);
}

function bestTrials({ trials, mode, note }) {
  const sign = mode === "max" ? -1 : 1;
  const finished = trials.filter(({ value, state }) => value !== null && state === "complete");
  const best = finished.sort((a, b) => sign * (a.value - b.value)).slice(0, 5);
  const command = (text) => el("pre.command", text);
  const shown = best.map((trial, place) => {
    const title = `${place + 1}. ${told(trial)}${trial.half_width ? ` ±${format(trial.half_width)}` : ""}`;
    return el("details", { open: place === 0 }, el("summary", title), trial.commands.map(command));
  });
  return [el("h2", "Best trials"), el("p", note), shown];
}

function trialTable({ trials, parameters }) {
  const columns = ["trial", "state", "value", ...parameters, "steps", "time", "error", "run folders"];
  const headings = columns.map((name) => el("th", name));
  const cells = (one) => {
    const interval = one.half_width ? ` ±${format(one.half_width)}` : "";
    const values = [one.number, one.state, one.value, ...parameters.map((name) => one.parameters[name])];
    return [...values, one.steps, one.seconds, one.error, one.runs.join(", ")].map((value, at) => {
      const isShort = typeof value === "number" && columns[at] !== "trial";
      const text = columns[at] === "time" ? duration(value ?? 0) : isShort ? format(value) : (value ?? "");
      const style = { complete: "ok", failed: "bad" }[value] ?? "";
      return el(`td.${at === 1 ? style : "wrap"}`, { "data-name": columns[at] }, String(text) + (at === 2 ? interval : ""));
    });
  };
  const body = el("tbody");
  const show = (column, descending) => {
    const key = (one) => [one.number, one.state, one.value, ...parameters.map((name) => one.parameters[name]), one.steps,
      one.seconds, one.error, one.runs.join()][column];
    const rows = sorted(trials, key, descending).map((one) =>
      el("tr.pick", { "data-trial": one.number, click: () => mark(one.number) }, cells(one)));
    body.replaceChildren(...rows);
  };
  sortable(headings, show);
  show(0, false);
  const hint = el("p.soft", "A heading sorts; a row, or a point of a chart, marks the trial everywhere.");
  return [el("h2", "All trials"), hint, tableOf("cards trials", el("tr", headings), body)];
}

function studyTab() {
  const study = data.study;
  const states = [...new Set(study.trials.map(({ state }) => state))];
  const count = (state) => study.trials.filter((one) => one.state === state).length;
  const facts = [["trials", study.trials.length], ...states.map((state) => [state, count(state)])];
  const seconds = total(study.trials.map((one) => one.seconds ?? 0));
  const shown = [...facts, ["time of runs, together", duration(seconds)]];
  const varied = study.parameters.filter((name) => new Set(study.trials.map((one) => one.parameters[name])).size > 1);
  return el(
    "section",
    el("p", el("code", study.command), `: compared by ${study.metric}, the ${study.mode}imum wins.`),
    el("dl.facts", shown.map(([name, value]) => el("div", el("dt", name), el("dd", value)))),
    bestTrials(study),
    el("h2", "Curves"),
    el("div.charts", curvesOf(study)),
    varied.length ? [el("h2", "What it depends on"), el("div.charts", varied.map((name) => effectOf(study, name)))] : null,
    trialTable(study),
    el("p.soft.small", `Made ${data.made} from ${study.folder}`),
  );
}
