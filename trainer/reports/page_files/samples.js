// The browser of what the policy wrote: all, best, worst, changed, failed; searched, filtered and sorted.

const FIELDS = `run kind step uid sample source prompt output truth score length finish version late parts`.split(" ");
const AT_ONCE = 40;
const MOST_CHANGED = 200;
const WAYS = ["all", "best", "worst", "changed", "failed"];
const FILTERS = ["kind", "source", "step", "finish"];

let sampleRows = null;

// The samples as objects, made when they are first looked at.
function allSamples() {
  sampleRows ??= data.samples.map((row) => {
    const sample = Object.fromEntries(FIELDS.map((name, place) => [name, row[place]]));
    const messages = data.prompts[sample.prompt];
    sample.messages = messages;
    sample.question = messages.at(-1)?.[1] ?? "";
    const texts = [...messages.map(([, text]) => text), sample.output, sample.truth, sample.uid];
    sample.words = texts.join("\n").toLowerCase();
    return sample;
  });
  return sampleRows;
}

// Text with the searched words marked.
function marked(text, word) {
  const parts = [];
  const lower = text.toLowerCase();
  const isSame = word && lower.length === text.length; // else places of the one are not those of the other
  let from = 0;
  for (let at = isSame ? lower.indexOf(word) : -1; at >= 0; at = lower.indexOf(word, from)) {
    parts.push(text.slice(from, at), el("mark", text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}

function box(title, text, word = "") {
  return el("div.box", { tabindex: 0 }, el("h3", title), el("pre", marked(text, word)));
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

function answerOf(sample, word) {
  const part = ([name, value]) => `${name}: ${typeof value === "number" ? format(value) : value}`;
  const parts = Object.entries(sample.parts).map(part).join("\n");
  return el(
    "div.answer",
    el("div.soft.small.wrap", tellOf(sample)),
    sample.messages.map(([role, text]) => box(role, text, word)),
    box("response", sample.output, word),
    sample.truth ? box("ground truth", sample.truth, word) : null,
    parts ? box("reward, its parts", parts) : null,
    siblings(sample),
  );
}

// The other answers to the same prompt, by step.
function siblings(sample) {
  const isSibling = (other) => other !== sample && other.uid === sample.uid && other.source === sample.source;
  const others = allSamples().filter(isSibling);
  if (!others.length) return null;
  const shown = others.slice(0, 60).map((other) => {
    const run = single ? "" : `${runs[other.run].title} `;
    const told = `${other.kind}, step ${other.step}, score ${scoreText(other)}: ${other.output.slice(0, 90)}`;
    return el("details", el("summary", run + told), box("response", other.output));
  });
  return el("details", el("summary", `${others.length} more answers to this prompt`), shown);
}

// Pairs [first, last, change of the mean score] of prompts that were answered at several steps.
function changedPairs(found) {
  const byPrompt = new Map();
  for (const sample of found.filter(({ score }) => score !== null)) {
    const key = JSON.stringify([sample.run, sample.kind, sample.source, sample.uid]);
    byPrompt.set(key, [...(byPrompt.get(key) ?? []), sample]);
  }
  const pairs = [...byPrompt.values()].map((own) => {
    const scored = own.sort((a, b) => a.step - b.step);
    const mean = (step) => {
      const scores = scored.filter((sample) => sample.step === step).map(({ score }) => score);
      return total(scores) / scores.length;
    };
    return [scored[0], scored.at(-1), mean(scored.at(-1).step) - mean(scored[0].step)];
  });
  const changed = pairs.filter(([, , change]) => change !== 0);
  return changed.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]) || b[1].step - a[1].step);
}

function pairOf([first, last, change], word) {
  const place = [single ? "" : runs[first.run].title, first.kind, first.source, first.uid].filter(Boolean).join(" · ");
  const told = ({ step, length, finish, score }) =>
    `step ${step}, score ${format(score)}, ${length} tokens, ${finish}`;
  const by = change > 0 ? el("b.ok", `+${format(change)}`) : el("b.bad", format(change));
  return el(
    "div.card.pair",
    el("div.wrap", by, el("span.soft.small", ` ${place}`)),
    el("div.answer", box("prompt", first.question, word), first.truth ? box("ground truth", first.truth, word) : null),
    el("div.answer.two", [first, last].map((sample) => box(told(sample), sample.output, word))),
  );
}

// ------------------------------------------------------------------------------------------------------ the list

// Field, heading, class of the cells. On a narrow screen those with a name beside them stand in a card.
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

function cellOf(sample, [name, heading, style], word) {
  const text = name === "score" ? scoreText(sample) : String(sample[name]);
  const isBad = name === "score" && sample.score === null;
  if (style !== "peek") return el(`td.${style}${isBad ? ".bad" : ""}`, { "data-name": heading }, text);
  const at = word ? text.toLowerCase().indexOf(word) : -1;
  const from = at > 60 ? at - 30 : 0;
  return el("td.peek", from ? "... " : "", marked(text.slice(from, from + 160), word));
}

function rowOf(sample, columns, word) {
  const unfold = () => {
    const isOpen = row.getAttribute("aria-expanded") === "true";
    row.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) row.nextSibling.remove();
    else row.after(el("tr.open", el("td", { colspan: columns.length }, answerOf(sample, word))));
  };
  const keydown = (event) => event.key === "Enter" && unfold();
  const cells = columns.map((column) => cellOf(sample, column, word));
  const row = el("tr.pick", { tabindex: 0, "aria-expanded": "false", click: unfold, keydown }, cells);
  return row;
}

function samplesTab() {
  if (!data.samples.length) {
    const why = "this kind of run writes none as text, or trainer.samples_max_mb is 0";
    return el("p.soft", `No samples were kept: ${why}.`);
  }
  const all = allSamples();
  const distinct = (name) => [...new Set(all.map((sample) => sample[name]))].sort((a, b) => (a > b ? 1 : -1));
  const columns = COLUMNS.filter(([name]) => name !== "source" || distinct("source").length > 1);
  const column = (name) => columns.findIndex(([own]) => own === name);
  const state = { way: "all", sort: "step", descending: true, shown: AT_ONCE };

  const update = () => {
    state.shown = AT_ONCE;
    show();
  };
  const search = searchField("samples", "prompts, responses, ground truths, uids", update);
  const labelOf = { run: (at) => runs[at].title, step: (step) => `step ${step}` };
  const filters = [...(single ? [] : ["run"]), ...FILTERS].map((name) => {
    const option = (value) => el("option", { value }, (labelOf[name] ?? String)(value));
    const options = [el("option", { value: "" }, `${name}: all`), ...distinct(name).map(option)];
    return [name, el("select", { "aria-label": name, change: update }, options)];
  });
  const ways = WAYS.map((way) => el("button", { type: "button", click: () => choose(way) }, way));
  const headings = columns.map(([, heading, style]) => el(`th.${style}`, heading));
  const sort = sortable(headings, (at, descending) => {
    Object.assign(state, { sort: columns[at][0], descending });
    update();
  });
  // where the screen is too narrow for the headings of columns
  const options = columns.map(([, heading], at) => el("option", { value: at }, `sort: ${heading}`));
  const order = el("select.phone", { "aria-label": "sort by", change: () => sort(order.value, true) }, options);
  const count = el("span.soft.small");
  const body = el("tbody");
  const table = tableOf("cards", el("tr", headings), body);
  const more = el("p", el("button", { type: "button", click: () => show((state.shown += 5 * AT_ONCE)) }, "show more"));
  const content = el("div");

  function choose(way) {
    state.way = way;
    ways.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === way)));
    if (way === "best" || way === "worst") sort(column("score"), way === "best");
    else update();
  }

  function show() {
    const word = search.value.toLowerCase();
    const passes = (sample) => filters.every(([name, { value }]) => value === "" || String(sample[name]) === value);
    const found = all.filter((sample) => passes(sample) && sample.words.includes(word));
    if (state.way === "changed") return showChanged(changedPairs(found), word);
    const isKept = ({ score }) => state.way === "all" || (state.way === "failed") === (score === null);
    const latest = sorted(found.filter(isKept), ({ step }) => step, true);
    const kept = sorted(latest, (sample) => sample[state.sort], state.descending);
    count.textContent = `${kept.length.toLocaleString("en-US")} of ${all.length.toLocaleString("en-US")} samples`;
    body.replaceChildren(...kept.slice(0, state.shown).map((sample) => rowOf(sample, columns, word)));
    more.hidden = kept.length <= state.shown;
    content.replaceChildren(table, more);
  }

  function showChanged(pairs, word) {
    count.textContent = `${pairs.length} prompts whose score changed between their first and last step`;
    const none = el("p.soft", "No prompt here was answered at several steps with another score.");
    const drawn = pairs.slice(0, Math.min(state.shown, MOST_CHANGED)).map((pair) => pairOf(pair, word));
    content.replaceChildren(...(drawn.length ? drawn : [none]));
  }

  sort(column("step"), true);
  choose("all");
  const notes = runs.flatMap((run) => run.notes).filter((note) => note.includes("samples are on this page"));
  return el(
    "section",
    el("div.tools", search, filters.map(([, node]) => node)),
    el("div.tools", ways, order, count),
    notes.map((note) => el("p.soft.small", note)),
    content,
  );
}
