// Drives the pages PAGES (name: address), each in a frame, as a reader would; what it saw goes as JSON into #seen.

const LINES = "g.scatterlayer path.js-line"; // not those of the legend

const answered = () => new Promise((done) => setTimeout(done, 60));

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
  const page = frame.contentDocument;
  const all = (selector) => [...page.querySelectorAll(selector)];
  await until(() => frame.contentWindow.Plotly && all(".plot").length && all(".plot").every((plot) => plot.data));
  const texts = (selector) => all(selector).map((one) => one.textContent);
  const press = async (selector, text) => {
    all(selector).find((one) => one.textContent === text).click();
    await answered();
  };
  const goTo = async (hash) => {
    frame.contentWindow.location.hash = hash;
    await answered();
  };
  const enter = async (selector, value) => {
    const field = page.querySelector(selector);
    field.value = value;
    field.dispatchEvent(new Event("input"));
    await answered();
  };
  return { page, all, texts, press, goTo, enter, window: frame.contentWindow };
}

function tooWide({ page }) {
  return page.documentElement.scrollWidth - page.documentElement.clientWidth;
}

// [contrast by WCAG 2, text] of the text that is hardest to read.
function hardestToRead({ page, window }) {
  const luminance = (rgb) => {
    const linear = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
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
  const first = hardestToRead(frame);
  await frame.press("#theme", "light / dark");
  return [first, hardestToRead(frame)];
}

async function ofRun() {
  const frame = await opened("run", 1280);
  const { page, all, texts, press, goTo, enter } = frame;
  const seen = { tabs: texts("nav button"), charts: {} };
  const drawn = "g.scatterlayer path.js-line, g.barlayer path";
  for (const chart of all(".chart")) seen.charts[chart.querySelector("h3").textContent] = chart.querySelectorAll(drawn).length;
  const chart = (title) => all(".chart").find((one) => one.querySelector("h3").textContent === title);
  const ticks = (title, axis) => [...chart(title).querySelectorAll(`.${axis}tick text`)].map((one) => one.textContent);
  seen.ticks = { steps: ticks("Learning rate", "x"), rate: ticks("Learning rate", "y") };
  await enter('input[type="range"]', "0.5");
  seen.linesWhenSmooth = all(LINES).length;
  seen.colours = await colours(frame);
  await goTo("samples");
  const column = (place) => texts(`tbody tr.pick td:nth-child(${place})`);
  seen.byStep = column(1);
  for (const way of ["best", "worst", "failed", "changed"]) {
    await press(".tools button", way);
    seen[way] = column(way === "changed" ? 6 : 5);
  }
  await press(".tools button", "all");
  await enter('input[type="search"]', "document.title");
  all("tr.pick")[1].click(); // the sample of step 1; the other one has the text in its tree
  seen.hostile = { rows: all("tr.pick").length, texts: texts("pre"), marks: texts("pre mark"), title: page.title };
  await enter('input[type="search"]', "SUNNY");
  all("tr.pick")[0].click();
  const nesting = (one) => { let depth = 0; for (; (one = one.parentElement.closest(".branch")); ) depth++; return depth; };
  seen.tree = {
    rows: all("tr.pick").length, root: texts(".tree > summary"), nesting: all(".branch > details").map(nesting),
    titles: texts(".branch > details > summary"), open: texts(".branch > details[open] b"), marks: texts(".tree mark"),
    reasons: texts(".tree .look"), texts: texts(".tree pre"),
  };
  seen.foreign = all("main img, main script, iframe").length;
  await goTo("metrics");
  await enter('input[type="search"]', "critic/score/mean");
  all("tr.pick")[0].click();
  await until(() => {
    frame.window.dispatchEvent(new Event("resize")); // draws it where the browser is late to say that it is seen
    return all(`.open ${LINES}`).length;
  });
  seen.metric = all(`.open ${LINES}`).length;
  await goTo("config");
  seen.ownOptions = all("tbody tr").length;
  await press(".tools button", "all");
  seen.allOptions = all("tbody tr").length;
  return seen;
}

async function ofSweep() {
  const frame = await opened("sweep", 1280);
  const seen = { tabs: frame.texts("nav button"), failure: frame.texts("td.wrap"), charts: frame.texts(".chart h3") };
  seen.legend = frame.texts(".legendtext");
  seen.steps = [...frame.all(".chart")[0].querySelectorAll(".xtick text")].map((one) => one.textContent);
  await frame.press("th button", "value");
  seen.trials = frame.texts("tbody td:first-child");
  seen.colours = await colours(frame);
  seen.foreign = frame.all("main img, main script, iframe").length;
  await frame.goTo("overview");
  seen.runs = frame.texts("th");
  return seen;
}

async function widths() {
  const seen = {};
  for (const name of Object.keys(PAGES)) {
    for (const width of [1280, 390]) {
      const frame = await opened(name, width);
      for (const tab of [...(name === "sweep" ? ["study"] : []), "overview", "metrics", "config", "samples"]) {
        await frame.goTo(tab);
        frame.all("tr.pick, summary").slice(0, 3).forEach((one) => one.click());
        seen[`${name} ${tab} ${width}`] = tooWide(frame);
      }
    }
  }
  return seen;
}

async function main() {
  const two = await opened("two", 1280);
  const compared = { charts: two.all(LINES).length, heads: two.texts("th") };
  const seen = { two: compared, run: await ofRun(), sweep: await ofSweep(), widths: await widths() };
  document.getElementById("seen").textContent = JSON.stringify(seen);
}

main();
