// A trial under the pointer, in a picture or in the table, is marked everywhere; a click keeps it marked.
const note = document.getElementById("note");
let kept = null;

function keyOf(element) {
  const group = element.closest('[id*="-trial-"]');
  return group ? group.id.match(/trial-\d+$/)?.[0] : element.closest("[data-key]")?.dataset.key;
}

function mark(key) {
  for (const row of document.querySelectorAll("tr[data-key]")) row.classList.toggle("marked", row.dataset.key === key);
  for (const group of document.querySelectorAll('svg [id*="-trial-"]')) {
    const own = group.id.endsWith(`-${key}`);
    group.classList.toggle("other", Boolean(key) && !own);
    group.classList.toggle("own", own);
  }
  note.textContent = key ? data.trials[key] : "";
  note.hidden = !key;
}

for (const path of document.querySelectorAll('svg [id*="-trial-"] > path')) {
  const wide = path.cloneNode(); // thin lines are hard to hit
  wide.setAttribute("style", "fill: none; stroke: transparent; stroke-width: 9; pointer-events: stroke");
  path.after(wide);
}

document.addEventListener("pointerover", (event) => kept ?? mark(keyOf(event.target)));
document.addEventListener("click", (event) => {
  if (event.target.closest("th, summary, pre, a")) return;
  const key = keyOf(event.target);
  kept = key && key !== kept ? key : null;
  mark(kept);
});
