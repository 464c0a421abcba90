"use strict";
// What all pages share: their data, elements, the sorting of tables, light and dark.

const data = JSON.parse(document.getElementById("data").textContent);

// el("td.mono.wrap", { title: "x", click: act }, "text", node, [nodes]): an element with classes, then attributes and
// listeners, which may be left out, and what is inside. Text is always set as text, never read as HTML.
function el(kind, ...inside) {
  const [name, ...classes] = kind.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.filter(Boolean).join(" ");
  if (inside[0]?.constructor === Object) setAll(node, inside.shift());
  node.append(...inside.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== ""));
  return node;
}

function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
}

const collator = new Intl.Collator(undefined, { numeric: true });

// The items by a value of theirs: numbers before words, what is empty always last; equal ones stay as they are.
function sorted(items, valueOf, descending) {
  const sign = descending ? -1 : 1;
  const keyed = items.map((item) => {
    const words = String(valueOf(item) ?? "").trim();
    const number = Number(words);
    return { item, words, number, rank: words === "" ? 2 : Number.isNaN(number) ? 1 : 0 };
  });
  keyed.sort((a, b) => {
    if (a.rank !== b.rank) return a.rank === 2 || b.rank === 2 ? a.rank - b.rank : sign * (a.rank - b.rank);
    return sign * (a.rank === 0 ? a.number - b.number : collator.compare(a.words, b.words));
  });
  return keyed.map(({ item }) => item);
}

// A button in each heading: the first click sorts with the greatest first, the next the other way round. Gives the
// function that sorts(column, descending) and marks the heading.
function sortable(headings, sort) {
  const by = (column, descending) => {
    for (const heading of headings) heading.removeAttribute("aria-sort");
    headings[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    sort(column, descending);
  };
  headings.forEach((heading, column) => {
    const click = () => by(column, heading.getAttribute("aria-sort") !== "descending");
    heading.replaceChildren(el("button", { type: "button", click }, heading.textContent));
  });
  return by;
}


document.getElementById("theme").addEventListener("click", () => {
  const { style } = document.documentElement;
  const isDark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = isDark ? "light" : "dark";
});
