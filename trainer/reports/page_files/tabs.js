// The tabs of the page, and which of them is open.

const TABS = {
  ...(data.study ? { study: ["Sweep", studyTab] } : {}),
  ...(runs.length ? { overview: [data.study ? "Best runs" : "Overview", overview] } : {}),
  ...(runs.length ? { metrics: ["All metrics", metrics], samples: ["Samples", samplesTab] } : {}),
  ...(runs.length ? { config: ["Configuration", configuration] } : {}),
};
const built = {};
const tabs = Object.entries(TABS).map(([name, [title]]) =>
  el("button", { type: "button", role: "tab", "data-tab": name, click: () => (location.hash = name) }, title),
);

function openTab() {
  const wanted = location.hash.slice(1);
  const name = TABS[wanted] ? wanted : Object.keys(TABS)[0];
  built[name] ??= TABS[name][1]();
  document.querySelector("main").replaceChildren(built[name]);
  for (const tab of tabs) {
    const isOpen = tab.dataset.tab === name;
    setAll(tab, { "aria-selected": String(isOpen), tabindex: isOpen ? 0 : -1 });
  }
}

function moveAmongTabs(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + move + tabs.length) % tabs.length];
  next.focus();
  next.click();
}

const label = { role: "tablist", "aria-label": "Parts of the report", keydown: moveAmongTabs };
document.querySelector("header").append(el("nav", label, tabs));
addEventListener("hashchange", openTab);
addEventListener("resize", redraw);
openTab();
unpackPlotly();
