// Drives the pages PAGES (name: address), each in a frame, as a reader would; what it saw goes as JSON into #seen.

const LATER = 60; // milliseconds until a page has answered

async function answered() {
  await new Promise((done) => setTimeout(done, LATER));
}

async function until(isSo) {
  for (let tries = 0; !isSo() && tries < 500; tries++) await answered();
}

async function opened(name, width) {
  const frame = document.createElement("iframe");
  Object.assign(frame, { width, height: 9000, src: PAGES[name] });
  frame.style.cssText = "position: absolute; top: 0; left: 0"; // charts are drawn where they are seen
  document.querySelector("iframe")?.remove();
  await new Promise((done) => {
    frame.onload = done;
    document.body.append(frame);
  });
  await until(() => frame.contentWindow.Plotly);
  const plots = () => [...frame.contentDocument.querySelectorAll(".plot")];
  await until(() => plots().length && plots().every((plot) => plot.data));
  const page = frame.contentDocument;
  const all = (selector) => [...page.querySelectorAll(selector)];
  const texts = (selector) => all(selector).map((one) => one.textContent);
  const press = async (selector, text) => {
    all(selector).find((one) => one.textContent === text).click();
    await answered();
  };
  const goTo = async (hash) => {
    frame.contentWindow.location.hash = hash;
    await answered();
  };
  const enter = async (selector, value, event = "input") => {
    const field = page.querySelector(selector);
    field.value = value;
    field.dispatchEvent(new Event(event));
    await answered();
  };
  return { page, all, texts, press, goTo, enter, window: frame.contentWindow };
}

function tooWide({ page }) {
  return page.documentElement.scrollWidth - page.documentElement.clientWidth;
}

// ------------------------------------------------------------------------------------------------------- colours

function luminance(rgb) {
  const linear = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

// [contrast by WCAG 2, text] of the text that is hardest to read.
function hardestToRead({ page, window }) {
  const colour = (node, name) => (window.getComputedStyle(node)[name].match(/[\d.]+/g) ?? []).map(Number);
  const ground = (node) => {
    const [red, green, blue, alpha = 1] = colour(node, "backgroundColor");
    return alpha === 1 ? [red, green, blue] : ground(node.parentElement);
  };
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  let hardest = [21, ""];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, style, option")) continue;
    const ink = colour(node, node.closest("svg") ? "fill" : "color");
    const [dark, light] = [luminance(ink), luminance(ground(node))].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < hardest[0]) hardest = [contrast, node.outerHTML.slice(0, 200)];
  }
  return hardest;
}

async function colours(frame) {
  const ground = () => frame.window.getComputedStyle(frame.page.body).backgroundColor;
  const first = [ground(), hardestToRead(frame)];
  await frame.press("#theme", "light / dark");
  return { first, second: [ground(), hardestToRead(frame)] };
}

// --------------------------------------------------------------------------------------------------------- pages

async function ofRuns() {
  const frame = await opened("run", 1280);
  const { page, all, texts, press, goTo, enter, window } = frame;
  const seen = { tabs: texts("nav button"), tooWide: {}, charts: {} };
  const drawn = "g.scatterlayer path.js-line, g.barlayer path";
  for (const chart of all(".chart")) seen.charts[chart.querySelector("h3").textContent] = chart.querySelectorAll(drawn).length;
  await enter('input[type="range"]', "0.5");
  seen.linesWhenSmooth = all(".chart path.js-line").length;
  const lastSteps = () => texts(".legend > span:first-child");
  const key = (name) => all(".chart")[0].dispatchEvent(new window.KeyboardEvent("keydown", { key: name }));
  ["ArrowLeft", "ArrowLeft"].forEach(key);
  seen.legends = lastSteps();
  seen.cursors = all(".cursor").filter((one) => one.checkVisibility()).length;
  await enter('input[aria-label="first step"]', "3", "change");
  seen.pointsFrom3 = all(".plot").map((plot) => Math.max(...plot.data.map(({ x }) => x.length)));
  key("Escape");
  await answered();
  seen.firstStepAfterEscape = page.querySelector('input[aria-label="first step"]').value;
  seen.colours = await colours(frame);
  for (const tab of ["overview", "metrics", "config", "samples"]) {
    await goTo(tab);
    seen.tooWide[tab] = tooWide(frame);
  }
  const column = (place) => texts(`tbody tr.pick td:nth-child(${place})`);
  seen.rows = all("tr.pick").length;
  seen.byStep = column(1);
  await press("th button", "score");
  seen.byScore = [all("th[aria-sort]").map((one) => `${one.textContent} ${one.ariaSort}`), column(5)];
  await press("th button", "score");
  seen.byScoreAgain = column(5);
  await press(".tools button", "worst");
  seen.worst = column(5);
  await press(".tools button", "failed");
  seen.failed = column(5);
  await press(".tools button", "changed");
  seen.changed = texts(".pair b");
  await press(".tools button", "all");
  await enter('input[type="search"]', "document.title");
  all("tr.pick")[0].click();
  seen.hostile = { rows: all("tr.pick").length, texts: texts("pre"), marks: texts("pre mark"), title: page.title };
  seen.foreign = all("main img, main script, iframe").length;
  await goTo("metrics");
  await enter('input[type="search"]', "critic/score/mean");
  await until(() => all(".unfolded path.js-line").length);
  seen.metric = [texts("tr.pick button"), all(".unfolded path.js-line").length];
  await goTo("config");
  seen.ownOptions = all("tbody tr").length;
  await enter("select", "all", "change");
  seen.allOptions = all("tbody tr").length;
  return seen;
}

async function ofSweep() {
  const frame = await opened("sweep", 1280);
  const { page, all, texts, press, goTo } = frame;
  const seen = { tabs: texts("nav button"), tooWide: tooWide(frame), failure: texts("td.wrap"), title: page.title };
  seen.charts = texts(".chart h3");
  const trials = () => all("tr[data-trial]").map((row) => row.dataset.trial);
  seen.trials = [trials()];
  for (let click = 0; click < 2; click++) {
    await press(".trials th button", "value");
    seen.trials.push(trials());
  }
  all("tr[data-trial]")[0].click();
  await answered();
  seen.marked = all("tr.marked").map((row) => row.dataset.trial);
  seen.faint = all(".plot").map((plot) => plot.data.map((trace) => trace.opacity ?? trace.marker.opacity));
  seen.colours = await colours(frame);
  seen.foreign = all("main img, main script, iframe").length;
  await goTo("overview");
  seen.runs = texts(".compared th");
  return seen;
}

async function ofPhone() {
  const seen = {};
  for (const name of Object.keys(PAGES)) {
    const frame = await opened(name, 390);
    for (const tab of [...(name === "sweep" ? ["study"] : []), "overview", "metrics", "config", "samples"]) {
      await frame.goTo(tab);
      frame.all("tr.pick, summary").slice(0, 3).forEach((one) => one.click());
      const lists = frame.all(".scroll").map((one) => one.scrollWidth - one.clientWidth);
      seen[`${name} ${tab}`] = Math.max(tooWide(frame), ...lists);
    }
  }
  return seen;
}

async function main() {
  const two = await opened("two", 1280);
  const charts = two.all(".chart path.js-line").length;
  const compared = { charts, heads: two.texts(".scroll th"), tooWide: tooWide(two) };
  const seen = { two: compared, run: await ofRuns(), sweep: await ofSweep(), phone: await ofPhone() };
  document.getElementById("seen").textContent = JSON.stringify(seen);
}

main();
