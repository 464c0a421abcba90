// The charts that the data of the page makes.

const runs = data.runs;
const single = runs.length === 1;
const runColor = (run) => COLORS[run % COLORS.length];
const STAGES = `gen reward old_log_prob ref values adv update_critic update_actor update_weights data train videos
  testing save_checkpoint`.split(/\s+/);

// Panels of the overview: title, unit, the label of each metric's line. Only what a run logged is drawn.
const PANELS = [
  ["Reward in training, mean over the samples of a step", "score", { "critic/score/mean": "", "actor/face_score": "" }],
  ["Loss", "", { "train/loss": "" }],
  ["Success of episodes", "share", { "env/success": "" }],
  [
    "Response length",
    "tokens",
    { "response_length/mean": "mean", "response_length/max": "max", "response_length/min": "min" },
  ],
  ["Answers cut off", "share", { "response_length/clip_ratio": "" }],
  [
    "Prompts that teach nothing: all answers equally good",
    "share",
    { frac_reward_zero_std: "all equal", "groups/all_right": "all right", "groups/all_wrong": "all wrong" },
  ],
  ["Entropy", "nats", { "actor/entropy": "" }],
  ["Distance to the reference (KL)", "nats", { "actor/kl_loss": "in the loss", "critic/kl": "in the reward" }],
  ["Step of the policy (KL to the sampler)", "nats", { "actor/ppo_kl": "" }],
  ["Tokens clipped", "share", { "actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "values" }],
  ["Gradient norm", "", { "actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": "" }],
  ["Learning rate", "", { "actor/lr": "actor", "critic/lr": "critic", "train/lr": "" }],
  ["Sampler against trainer, difference of probabilities", "", { "training/rollout_probs_diff_mean": "mean" }],
  [
    "Rewards that failed",
    "share",
    { "reward/error_rate": "all", "reward/timeout_rate": "late", "env/error_rate": "episodes" },
  ],
  [
    "Throughput",
    "per second and device",
    { "perf/throughput": "tokens", "system/tps": "tokens", "perf/samples_per_second": "samples" },
  ],
  [
    "Memory of the fullest worker",
    "GiB",
    {
      "actor/perf/host_rss_gb": "host",
      "actor/perf/max_memory_allocated_gb": "device, allocated",
      "actor/perf/max_memory_reserved_gb": "device, reserved",
    },
  ],
  ["Devices that wait in generation", "share", { "rollout/idle_frac": "" }],
];

// The points [step, value] of a metric in a run; none if it did not log it.
function points(run, name) {
  const series = runs[run].series[name];
  if (!series) return [];
  const [steps, values] = series.length === 2 ? series : [runs[run].steps, series[0]];
  return steps.map((step, place) => [step, values[place]]).filter(([, value]) => value !== null);
}

// A line for each run that logged the metric. In color differ the lines of one run; of several, the runs.
function linesOf(name, label, number, band) {
  return runs.flatMap((_, at) => lineOf(at, name, label, number, band));
}

function lineOf(at, name, label, number, band) {
  const own = points(at, name);
  const bands = new Map(band ? points(at, band) : []);
  const line = {
    label: [single ? "" : runs[at].title, label].filter(Boolean).join(" "),
    color: single ? COLORS[number % COLORS.length] : runColor(at),
    dash: single || !number ? null : number === 1 ? "dash" : "dot",
    points: own,
    band: bands.size ? bands : null,
  };
  return own.length ? [line] : [];
}

function isLogged(name) {
  return runs.some((run) => run.series[name]);
}

function panel([title, unit, names]) {
  const logged = Object.entries(names).filter(([name]) => isLogged(name));
  const lines = logged.flatMap(([name, label], number) => linesOf(name, label, number));
  const isFlat = lines.every((line) => line.points.every(([, value]) => value === 0));
  return lines.length && !isFlat ? new LineChart(title, unit, lines) : null;
}

// Of one run a chart for each measure, with a line for each source; of several runs a chart for each source, where the
// measures of runs that have none in common stand side by side.
function validationPanels() {
  const sources = [...new Set(data.validation.map((line) => line.source))];
  const chart = (title, lines) => {
    const drawn = lines.flatMap((line) => {
      const greedy = line.greedy ? "greedy" : "";
      const isMixed = new Set(Object.values(line.measures)).size > 1;
      const found = runs.flatMap((_, at) => {
        const label = single ? line.source + (greedy && ` (${greedy})`) : isMixed ? line.measures[at] : greedy;
        return lineOf(at, line.names[at], label, single ? sources.indexOf(line.source) : 0, line.intervals[at]);
      });
      return found.map((own) => ({ ...own, dash: line.greedy ? "dash" : null }));
    });
    const unit = drawn.some((line) => line.band) ? "band: 95% interval" : "";
    return new LineChart(`Validation, ${title}`, unit, drawn, single && drawn.length > 2);
  };
  const measure = ({ measures }) => [...new Set(Object.values(measures))].join(", ");
  const titleOf = (line) =>
    single ? measure(line) : `${line.source}${line.greedy ? " (greedy)" : ""}, ${measure(line)}`;
  const titles = [...new Set(data.validation.map(titleOf))];
  return titles.map((title) => chart(title, data.validation.filter((line) => titleOf(line) === title)));
}

function timePanel(run) {
  const { series, steps, title } = runs[run];
  const logged = Object.keys(series).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step");
  const names = logged
    .map((name) => name.slice(9))
    .sort((a, b) => (STAGES.indexOf(a) + 1 || 99) - (STAGES.indexOf(b) + 1 || 99));
  const trained = new Map(points(run, "timing_s/step"));
  const known = steps.filter((step) => trained.has(step));
  if (!known.length) return null;
  const layers = names.map((name, number) => {
    const own = new Map(points(run, `timing_s/${name}`));
    return { label: name, color: COLORS[number % COLORS.length], values: known.map((step) => own.get(step) ?? 0) };
  });
  const outside = ["testing", "save_checkpoint"];
  const inside = layers.filter((layer) => !outside.includes(layer.label));
  const rest = known.map((step, at) => trained.get(step) - total(inside.map((layer) => layer.values[at])));
  layers.push({ label: "other", color: GREY, values: rest.map((value) => Math.max(0, value)) });
  const whole = total(layers.flatMap((layer) => layer.values));
  const seen = layers.filter((layer) => total(layer.values) > 0.002 * whole);
  return new StackChart(`Time of a step by stage${single ? "" : `, ${title}`}`, "seconds", known, seen);
}
