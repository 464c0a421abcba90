"use strict";
// Tables that a click on a heading sorts. A cell counts by its data-order, else by its text; numbers before words,
// what is empty always last.
const collator = new Intl.Collator(undefined, { numeric: true });

function orderOf(row, column) {
  const cell = row.cells[column];
  const words = (cell.dataset.order ?? cell.textContent).trim();
  const number = words === "" ? NaN : Number(words);
  return { words, number, rank: words === "" ? 2 : Number.isNaN(number) ? 1 : 0 };
}

function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, order: orderOf(row, column) }));
  const sign = descending ? -1 : 1;
  rows.sort(({ order: a }, { order: b }) => {
    if (a.rank !== b.rank) return a.rank === 2 || b.rank === 2 ? a.rank - b.rank : sign * (a.rank - b.rank);
    return sign * (a.rank === 0 ? a.number - b.number : collator.compare(a.words, b.words));
  });
  body.append(...rows.map(({ row }) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const sort = () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, column, descending);
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}
