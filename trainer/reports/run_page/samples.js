// The browser of what the policy wrote: all, best, worst, changed, failed; searched, filtered and sorted.

const FIELDS = [
  "run",
  "kind",
  "step",
  "uid",
  "sample",
  "source",
  "prompt",
  "output",
  "truth",
  "score",
  "length",
  "finish",
  "version",
  "late",
  "parts",
];
const PAGE = 40;
const MOST_CHANGED = 200;

let sampleRows = null;

// The samples as objects, made when they are first looked at.
function allSamples() {
  sampleRows ??= data.samples.map((row) => {
    const sample = Object.fromEntries(FIELDS.map((name, place) => [name, row[place]]));
    const messages = data.prompts[sample.prompt];
    sample.messages = messages;
    sample.question = messages.length ? messages[messages.length - 1][1] : "";
    sample.words =
      `${messages.map(([, text]) => text).join("\n")}\n${sample.output}\n${sample.truth}\n${sample.uid}`.toLowerCase();
    return sample;
  });
  return sampleRows;
}

// Text with the searched words marked.
function marked(text, word) {
  const parts = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (
    let at = word ? lower.indexOf(word) : -1;
    at >= 0 && lower.length === text.length;
    at = lower.indexOf(word, from)
  ) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}

function box(title, text, word) {
  return el("div", { class: "box", tabindex: 0 }, el("h3", {}, title), el("pre", {}, marked(text, word)));
}

function scoreText(sample) {
  return sample.score === null ? (sample.late ? "late" : "failed") : format(sample.score);
}

function tellOf(sample) {
  const facts = [
    single ? null : runs[sample.run].title,
    sample.kind,
    `step ${sample.step}`,
    sample.uid,
    `answer ${sample.sample + 1}`,
    `weights of step ${sample.version}`,
    `${sample.length} tokens`,
    `ended by ${sample.finish}`,
    `score ${scoreText(sample)}`,
  ];
  return facts.filter(Boolean).join(" · ");
}

function partsTable(sample) {
  const parts = Object.entries(sample.parts);
  if (!parts.length) return null;
  const text = parts.map(([name, value]) => `${name}: ${typeof value === "number" ? format(value) : value}`).join("\n");
  return box("reward, its parts", text, "");
}

function answerOf(sample, word) {
  return el(
    "div",
    { class: "answer" },
    el("div", { class: "soft small wrap" }, tellOf(sample)),
    sample.messages.map(([role, text]) => box(role, text, word)),
    box("response", sample.output, word),
    sample.truth ? box("ground truth", sample.truth, word) : null,
    partsTable(sample),
    siblings(sample),
  );
}

// The other answers to the same prompt, by step.
function siblings(sample) {
  const others = allSamples().filter(
    (other) => other !== sample && other.uid === sample.uid && other.source === sample.source,
  );
  if (!others.length) return null;
  const list = el("div");
  const shown = others.slice(0, 60).map((other) => {
    const tell = el(
      "summary",
      { class: "wrap" },
      single ? "" : `${runs[other.run].title} `,
      `${other.kind}, step ${other.step}, score ${scoreText(other)}: ${other.output.slice(0, 90)}`,
    );
    return el("details", {}, tell, box("response", other.output, ""));
  });
  list.append(...shown);
  return el("details", {}, el("summary", {}, `${others.length} more answers to this prompt`), list);
}

// Pairs [first, last, change of the mean score] of prompts that were answered at several steps.
function changedPairs(found) {
  const byPrompt = new Map();
  for (const sample of found) {
    const key = JSON.stringify([sample.run, sample.kind, sample.source, sample.uid]);
    if (!byPrompt.has(key)) byPrompt.set(key, []);
    byPrompt.get(key).push(sample);
  }
  const mean = (own) => own.reduce((sum, sample) => sum + sample.score, 0) / own.length;
  const pairs = [];
  for (const own of byPrompt.values()) {
    const scored = own.filter((sample) => sample.score !== null).sort((a, b) => a.step - b.step);
    if (!scored.length || scored[0].step === scored[scored.length - 1].step) continue;
    const at = (step) => scored.filter((sample) => sample.step === step);
    const change = mean(at(scored[scored.length - 1].step)) - mean(at(scored[0].step));
    if (change !== 0) pairs.push([scored[0], scored[scored.length - 1], change]);
  }
  return pairs.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]) || b[1].step - a[1].step);
}

function pairOf([first, last, change], word) {
  const sign = change > 0 ? "up" : "down";
  return el(
    "div",
    { class: "card pair" },
    el(
      "div",
      { class: "wrap" },
      el("b", { class: sign }, `${change > 0 ? "+" : ""}${format(change)}`),
      el(
        "span",
        { class: "soft small" },
        ` ${single ? "" : `${runs[first.run].title} · `}${first.kind} · ${first.source} · ${first.uid}`,
      ),
    ),
    el(
      "div",
      { class: "answer" },
      box("prompt", first.question, word),
      first.truth ? box("ground truth", first.truth, word) : null,
    ),
    el(
      "div",
      { class: "answer two" },
      [first, last].map((sample) =>
        box(
          `step ${sample.step}, score ${scoreText(sample)}, ${sample.length} tokens, ${sample.finish}`,
          sample.output,
          word,
        ),
      ),
    ),
  );
}

// ------------------------------------------------------------------------------------------------------ the list

const COLUMNS = [
  ["step", "step", "right"],
  ["kind", "kind", ""],
  ["source", "source", ""],
  ["question", "prompt", "peek"],
  ["output", "response", "peek"],
  ["score", "score", "right"],
  ["length", "tokens", "right"],
  ["finish", "ended by", ""],
];

function cellOf(sample, name, style, word) {
  if (name === "score")
    return el(
      "td",
      { class: `${style} ${sample.score === null ? "down" : ""}`, "data-name": "score" },
      scoreText(sample),
    );
  const text = String(sample[name]);
  if (style !== "peek") return el("td", { class: style, "data-name": name === "length" ? "tokens" : name }, text);
  const at = word ? text.toLowerCase().indexOf(word) : -1;
  const from = at > 60 ? at - 30 : 0;
  return el("td", { class: "peek" }, from ? "... " : "", marked(text.slice(from, from + 160), word));
}

function rowOf(sample, columns, word) {
  const row = el(
    "tr",
    { class: "pick", tabindex: 0, "aria-expanded": "false" },
    columns.map(([name, , style]) => cellOf(sample, name, style, word)),
  );
  const unfold = () => {
    const isOpen = row.getAttribute("aria-expanded") === "true";
    row.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) row.nextSibling.remove();
    else row.after(el("tr", { class: "open" }, el("td", { colspan: columns.length }, answerOf(sample, word))));
  };
  row.addEventListener("click", unfold);
  row.addEventListener("keydown", (event) => {
    if (event.key === "Enter") unfold();
  });
  return row;
}

function select(label, values, update) {
  const options = [
    el("option", { value: "" }, `${label}: all`),
    ...values.map((value) => el("option", { value }, label === "step" ? `step ${value}` : String(value))),
  ];
  return el("select", { "aria-label": label, change: update }, options);
}

function samplesTab() {
  if (!data.samples.length) {
    return el(
      "p",
      { class: "soft" },
      "No samples were kept: this kind of run writes none as text, or trainer.samples_max_mb is 0.",
    );
  }
  const all = allSamples();
  const state = { way: "all", sort: "step", isDescending: true, shown: PAGE };
  const distinct = (name) => [...new Set(all.map((sample) => sample[name]))].sort((a, b) => (a > b ? 1 : -1));
  const update = () => {
    state.shown = PAGE;
    show();
  };
  const search = el("input", {
    type: "search",
    placeholder: "search prompts, responses, ground truths, uids",
    "aria-label": "search samples",
    input: update,
  });
  const filters = ["kind", "source", "step", "finish"].map((name) => [name, select(name, distinct(name), update)]);
  if (!single)
    filters.unshift([
      "run",
      el(
        "select",
        { "aria-label": "run", change: update },
        el("option", { value: "" }, "run: all"),
        runs.map((run, at) => el("option", { value: at }, run.title)),
      ),
    ]);
  const ways = ["all", "best", "worst", "changed", "failed"].map((way) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": String(way === "all"),
        click: () => {
          state.way = way;
          ways.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === way)));
          if (way === "best" || way === "worst") [state.sort, state.isDescending] = ["score", way === "best"];
          update();
        },
      },
      way,
    ),
  );
  const order = el(
    "select", // where the screen is too narrow for the heads of columns
    {
      "aria-label": "sort by",
      class: "phone",
      change: () => {
        [state.sort, state.isDescending] = [order.value, true];
        update();
      },
    },
    COLUMNS.map(([name, label]) => el("option", { value: name }, `sort: ${label}`)),
  );
  const count = el("span", { class: "soft small" });
  const content = el("div");

  function found() {
    const word = search.value.toLowerCase();
    return all.filter(
      (sample) =>
        filters.every(([name, { value }]) => value === "" || String(sample[name]) === value) &&
        sample.words.includes(word),
    );
  }

  function sorted(samples) {
    const sign = state.isDescending ? -1 : 1;
    const key = state.sort;
    return samples.sort((a, b) => {
      if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
      return (a[key] > b[key] ? sign : a[key] < b[key] ? -sign : 0) || b.step - a.step;
    });
  }

  function header(columns) {
    return el(
      "thead",
      {},
      el(
        "tr",
        {},
        columns.map(([name, label]) => {
          const arrow = state.sort === name ? (state.isDescending ? " ↓" : " ↑") : "";
          const order = state.sort === name ? (state.isDescending ? "descending" : "ascending") : "none";
          return el(
            "th",
            { "aria-sort": order },
            el(
              "button",
              {
                type: "button",
                "data-name": name,
                click: () => {
                  state.isDescending = state.sort === name ? !state.isDescending : true;
                  state.sort = name;
                  update();
                  content.querySelector(`th button[data-name="${name}"]`).focus();
                },
              },
              label + arrow,
            ),
          );
        }),
      ),
    );
  }

  function show() {
    const word = search.value.toLowerCase();
    const own = found();
    if (state.way === "changed") return showChanged(changedPairs(own), word);
    const kept = own.filter((sample) =>
      state.way === "failed" ? sample.score === null : state.way === "all" || sample.score !== null,
    );
    const columns = COLUMNS.filter(([name]) => name !== "source" || distinct("source").length > 1);
    count.textContent = `${kept.length.toLocaleString("en-US")} of ${all.length.toLocaleString("en-US")} samples`;
    const rows = sorted(kept)
      .slice(0, state.shown)
      .map((sample) => rowOf(sample, columns, word));
    const more =
      kept.length > state.shown
        ? el(
            "button",
            {
              type: "button",
              click: () => {
                state.shown += 5 * PAGE;
                show();
              },
            },
            "show more",
          )
        : null;
    content.replaceChildren(
      el("div", { class: "scroll" }, el("table", { class: "cards" }, header(columns), el("tbody", {}, rows))),
      el("p", {}, more ?? ""),
    );
  }

  function showChanged(pairs, word) {
    count.textContent = `${pairs.length} prompts whose score changed between their first and last step`;
    const none = el("p", { class: "soft" }, "No prompt here was answered at several steps with another score.");
    content.replaceChildren(
      ...(pairs.length
        ? pairs.slice(0, Math.min(state.shown, MOST_CHANGED)).map((pair) => pairOf(pair, word))
        : [none]),
    );
  }

  show();
  const notes = runs.flatMap((run) => run.notes).filter((note) => note.includes("samples are on this page"));
  return el(
    "section",
    {},
    el("div", { class: "tools" }, search, ...filters.map(([, node]) => node)),
    el("div", { class: "tools" }, ...ways, order, count),
    notes.map((note) => el("p", { class: "soft small wrap" }, note)),
    content,
  );
}
