"use strict";
// Overview, summary and metrics of one run.

PAGES.overview = { show: showOverview, title: "Overview" };
PAGES.summary = { show: showSummary, title: "Summary" };
PAGES.metrics = { show: showMetrics, title: "Metrics" };

const OVERVIEW_CHARTS = [
  { title: "Reward", names: [["reward/mean", "training"], ["eval/reward", "held-out"]] },
  { title: "Groups without variance", names: [["groups/zero_variance", "share"]], hint: "they teach nothing" },
  { title: "Entropy", unit: "nats", names: [["entropy/mean", "mean"]] },
  { title: "Reply length", unit: "tokens", names: [["reply/tokens_mean", "mean"], ["reply/tokens_p95", "95 %"], ["reply/tokens_max", "longest"]] },
  { title: "Step time", unit: "s", names: [["time/step_s", "step"], ["time/batch_wait_s", "waits for episodes"], ["time/train_s", "trains"]] },
  { title: "Engine against trainer", unit: "nats", names: [["logprob/engine_trainer_mean_abs_diff", "mean"], ["logprob/engine_trainer_p99_abs_diff", "99 %"]] },
  { title: "Staleness", unit: "steps", names: [["staleness/mean", "mean"], ["staleness/max", "oldest"]] },
  { title: "Gradient norm", names: [["grad_norm", "norm"]] },
  { title: "Cut replies", names: [["reply/cut_fraction", "share"]] },
];
const LIMITS = [
  ["generation", "generation", "var(--series-1)"], ["training", "training", "var(--series-3)"],
  ["weights", "weight updates", "var(--series-2)"], ["evaluation", "evaluation", "var(--series-4)"],
];

async function showOverview(main, query) {
  const data = await fetchData("overview", { run: query.run });
  const steps = data.steps;
  const x = steps.map((row) => row.step);
  const hasValues = ({ names }) => names.some(([name]) => steps.some((row) => typeof row[name] === "number"));
  const charts = [...OVERVIEW_CHARTS.slice(0, 1), ...listSetCharts(steps), ...OVERVIEW_CHARTS.slice(1)].filter(hasValues).map(({ names, ...chart }) => buildChart({
    ...chart, restarts: data.restarts,
    series: names.map(([name, label]) => ({ name: label, x, y: steps.map((row) => row[name] ?? null) })),
  }));
  const sft = data.sft.length > 1 && buildChart({ title: "SFT loss", series: [{
    name: "loss", x: data.sft.map((row) => row.step), y: data.sft.map((row) => row.loss ?? null) }] });
  main.replaceChildren(
    element("h1", {}, data.name, " ", element("span", { class: `state ${data.state.split(/[ ,]/)[0]}` }, data.state)),
    ...data.alerts.map((alert) => element("div", { class: `alert ${alert.level}`, role: "status" },
      element("b", {}, alert.level, ": "), alert.message, element("div", { class: "quiet small" }, `try: ${alert.hint}`))),
    element("div", { class: "panel" }, buildFacts(data.progress.map(splitFact)), describeStepTimes(data.step_times)),
    element("h2", {}, "Curves"),
    charts.length ? "" : element("p", { class: "quiet" }, "No step is trained yet."),
    element("div", { class: "grid" }, charts, sft),
    element("p", { class: "quiet small" }, "Dashed lines: the trainer started again. All metrics: ",
      element("a", { href: buildHash("metrics", { run: query.run }) }, "Metrics"), "."),
    element("h2", {}, "Last events"),
    listEvents(data.events),
    element("h2", {}, "Recipe"),
    listRecipe(data.recipe));
}

/** List one chart of the mean rewards of evaluation sets, if there are several. */
function listSetCharts(steps) {
  const names = [...new Set(steps.flatMap((row) => Object.keys(row)))].map((name) => [name, /^evaluation\/([^/]+)\/avg@\d+$/.exec(name)?.[1]]);
  const sets = names.filter(([, set]) => set);
  return sets.length > 1 ? [{ title: "Evaluation sets", names: sets, hint: "mean rewards" }] : [];
}

/** Split `reward            0.969` into a term and its value. */
function splitFact(line) {
  const [term, ...rest] = line.split(/ {2,}/);
  return [term, rest.join(" ")];
}

/** Show the shares of the steps' time as a bar. */
function describeStepTimes(times) {
  if (!times) return "";
  const shares = LIMITS.map(([name, label, color]) => ({ label, color, share: times.shares[name] || 0 }));
  const text = shares.filter((part) => part.share >= 0.005).map((part) => `${part.label} ${Math.round(part.share * 100)} %`).join(", ");
  return element("div", {}, element("p", { class: "small quiet", style: { margin: "10px 0 4px" } },
    `Where the time of ${times.steps} steps went: ${text}`),
  element("div", { class: "stack", role: "img", "aria-label": text }, shares.map((part) =>
    element("div", { title: part.label, style: { background: part.color, width: `${part.share * 100}%` } }))));
}

function listEvents(events) {
  if (!events.length) return element("p", { class: "quiet" }, "none");
  const columns = [
    { title: "time", cell: (event) => formatTime(event.time) },
    { title: "role", cell: (event) => event.role },
    { title: "event", cell: (event) => event.event },
    { title: "facts", wide: true, cell: (event) => Object.entries(event)
      .filter(([key]) => !["time", "role", "event"].includes(key))
      .map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join("  ").slice(0, 600) },
  ];
  const table = buildTable(columns, [...events].reverse());
  table.classList.add("events");
  return table;
}

function listRecipe(recipe) {
  const rows = Object.entries(recipe);
  const columns = [
    { title: "key", cell: ([key]) => element("span", { class: "mono" }, key) },
    { title: "value", wide: true, cell: ([, value]) => element("span", { class: "mono" }, value) },
  ];
  const holder = element("div", {});
  const fill = (text) => holder.replaceChildren(buildTable(columns, rows.filter(([key, value]) => `${key} ${value}`.includes(text))));
  fill("");
  return element("details", {}, element("summary", {}, `${rows.length} keys, as resolved`),
    element("form", { class: "filter", onsubmit: (event) => event.preventDefault() },
      element("input", { type: "search", placeholder: "part of a key or value", "aria-label": "part of a key or value",
        oninput: (event) => fill(event.target.value) })), holder);
}

/** Show the audit, the cost, the answers about slowness, collapse and hacking, and the launches of a run. */
async function showSummary(main, query) {
  const data = await fetchData("summary", { run: query.run });
  const panel = (...children) => element("div", { class: "panel" }, children);
  const small = (text) => element("p", { class: "small" }, text);
  main.replaceChildren(
    element("h1", {}, "Summary"),
    panel(buildFacts(data.facts)),
    element("h2", {}, "Audit"),
    panel(data.audit.map(small)),
    element("h2", {}, "Answers"),
    ...data.answers.map((answer) => panel(describeAnswer(answer))),
    element("h2", {}, "Events that are not routine"),
    panel(data.events.length ? data.events.map(([event, role, count]) => small(`${count} x ${event} (${role})`)) : small("none")),
    element("h2", {}, "Launches"),
    ...data.launches.map((launch) => panel(buildFacts(launch))),
    ...(data.profiles.length ? listProfiles(data.profiles, query.run) : []));
}

/** List the traces of `trainer.profile`, for download unless this is a report. */
function listProfiles(profiles, run) {
  const link = (file) => (isReport ? file : element("a", { href: `data/profile?${new URLSearchParams({ run, file })}` }, file));
  return [element("h2", {}, "Traces"),
    element("div", { class: "panel" },
      element("p", { class: "small quiet" }, "Open a trace at ui.perfetto.dev and a snapshot of memory (.pickle) at docs.pytorch.org/memory_viz: both read the file in your browser."),
      profiles.map(({ file, bytes }) => element("p", { class: "small" }, link(file), ` ${formatNumber(bytes / 1e6)} MB`)))];
}

/** Show a headline, its findings with links to their pages, and things to try. */
function describeAnswer({ headline, findings, hints }) {
  return [element("p", {}, headline),
    findings.map((finding) => element("p", { class: "small quiet" }, finding.page ? element("a", { href: finding.page }, finding.text) : finding.text)),
    hints.map((hint) => element("p", { class: "small" }, `try: ${hint}`))];
}

/** Return whether a metric is a bound of another metric's interval. */
function isBound(name, columns) {
  const match = /^(evaluation\/.*)_(low|high)$/.exec(name);
  return match !== null && match[1] in columns;
}

async function showMetrics(main, query, go) {
  const data = await fetchData("metrics", { run: query.run });
  const smoothing = Number(query.smooth || 0);
  const byTime = query.axis === "time";
  const begin = data.times.find((time) => time) || 0;
  const x = byTime ? data.times.map((time) => ((time || begin) - begin) / 3600) : data.steps;
  const restarts = byTime ? [] : data.restarts;
  const groups = new Map();
  for (const name of Object.keys(data.columns)) {
    if (isBound(name, data.columns)) continue; // drawn with the metric that it bounds
    if (query.text && !`${name} ${data.catalogue[name].meaning}`.includes(query.text)) continue;
    const group = name.includes("/") ? name.split("/")[0] : "step";
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  const choose = (changes) => go("metrics", { ...query, ...changes });
  const option = (text, pressed, changes) =>
    element("button", { type: "button", class: "plain", "aria-pressed": String(pressed), onclick: () => choose(changes) }, text);
  main.replaceChildren(
    element("h1", {}, "Metrics"),
    element("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); choose({ text: event.target.text.value }); } },
      element("input", { type: "search", name: "text", "data-focus": "filter", value: query.text || "", placeholder: "part of a name or meaning", "aria-label": "part of a name or meaning" }),
      option("by step", !byTime, { axis: "" }), option("by hour", byTime, { axis: "time" }),
      element("label", { class: "small quiet" }, "smoothing ", element("select", { onchange: (event) => choose({ smooth: event.target.value }) },
        ["0", "0.6", "0.9", "0.97"].map((strength) => element("option", { value: strength, selected: Number(strength) === smoothing }, strength))))),
    ...[...groups].map(([group, names]) => element("section", {}, element("h2", {}, group),
      element("div", { class: "grid" }, names.map((name) => {
        const { unit, meaning } = data.catalogue[name];
        return buildChart({ title: name, unit, hint: meaning, restarts, height: 120,
          formatX: byTime ? (hours) => `${hours.toFixed(2)} h` : undefined,
          series: [{ name, x, y: smoothValues(data.columns[name], smoothing),
            ...(data.columns[`${name}_low`] && data.columns[`${name}_high`]
              ? { low: smoothValues(data.columns[`${name}_low`], smoothing), high: smoothValues(data.columns[`${name}_high`], smoothing) } : {}) }] });
      })))),
    groups.size ? "" : element("p", { class: "quiet" }, "no metric has this in its name or meaning"));
}
