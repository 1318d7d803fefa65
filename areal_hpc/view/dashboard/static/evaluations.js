"use strict";
// Evaluation sets of a run over steps, and tasks whose rewards changed between two of them.

PAGES.evaluations = { show: showEvaluations, title: "Evaluations" };

const MAX_CHANGED_TASKS = 200;

async function showEvaluations(main, query, go) {
  const data = await fetchData("evaluations", { run: query.run });
  const problem = data.problem && element("p", { class: "problem", role: "alert" }, data.problem);
  if (!data.sets.length) {
    main.replaceChildren(...[element("h1", {}, "Evaluations"), problem,
      element("p", { class: "quiet" }, "No evaluation has ended yet.")].filter(Boolean));
    return;
  }
  const chosen = data.sets.find((set) => set.name === query.set) || data.sets[0];
  const choose = (changes) => go("evaluations", { ...query, ...changes });
  const chips = element("div", { class: "chips" }, data.sets.map((set) => element("button", {
    type: "button", class: "plain", "aria-pressed": String(set === chosen),
    onclick: () => choose({ set: set.name, from: "", to: "" }) }, set.name)));
  main.replaceChildren(...[element("h1", {}, "Evaluations"), problem, chips,
    element("div", { class: "grid" }, [{ ...chosen, name: "mean reward" }, ...chosen.further].map((metric) => drawMetric(chosen, metric))),
    element("div", { class: "panel", style: { marginTop: "14px" } }, buildFacts([
      ["tasks", formatNumber(chosen.tasks)], ["samples of a task", formatNumber(chosen.samples)],
      ["failed tasks", `${formatNumber(chosen.failures.at(-1))} at the last step`],
      ["first to last", describeComparison(chosen.compared)],
    ])),
    element("h2", {}, "Tasks that changed"),
    listChangedTasks(chosen, query, choose)].filter(Boolean));
}

/** Draw a metric of a set over steps, with its interval. */
function drawMetric(set, { name, mean, low, high }) {
  return buildChart({ title: `${set.name}: ${name}`, hint: "with the 95 % interval over tasks", height: 200,
    series: [{ name, x: set.steps, y: mean, low, high }] });
}

function describeComparison(compared) {
  if (!compared) return "";
  const sign = (value) => `${value > 0 ? "+" : ""}${formatNumber(value)}`;
  const isBounded = compared.low !== null;
  const interval = isBounded ? ` [${sign(compared.low)}, ${sign(compared.high)}]` : "";
  const shown = isBounded ? compared.verdict : "too few tasks to show a difference";
  return `step ${compared.from} to ${compared.to}: ${sign(compared.difference)}${interval}, `
    + `${compared.better} tasks better, ${compared.worse} worse: ${shown}`;
}

/** List the tasks whose reward differs between two chosen steps, the largest changes first. */
function listChangedTasks(set, query, choose) {
  const findIndex = (value, otherwise) => {
    const at = value === undefined || value === "" ? -1 : set.steps.indexOf(Number(value));
    return at < 0 ? otherwise : at;
  };
  const from = findIndex(query.from, 0);
  const to = findIndex(query.to, set.steps.length - 1);
  const select = (label, name, at) => element("label", { class: "small quiet" }, `${label} `,
    element("select", { onchange: (event) => choose({ [name]: event.target.value }) },
      set.steps.map((step, index) => element("option", { value: step, selected: index === at }, step))));
  const form = element("form", { class: "filter", onsubmit: (event) => event.preventDefault() },
    select("from step", "from", from), select("to step", "to", to));
  if (set.rewards[from].length !== set.rewards[to].length) {
    return element("div", {}, form, element("p", { class: "quiet" }, "These steps were evaluated on different numbers of tasks."));
  }
  const changed = set.rewards[from]
    .map((before, task) => ({ task, before, after: set.rewards[to][task], change: set.rewards[to][task] - before }))
    .filter((row) => row.change !== 0)
    .sort((a, b) => Math.abs(b.change) - Math.abs(a.change));
  const link = (row) => isReport || set.first_ticket === null ? null
    : buildHash("trajectories", { run: query.run, where: `kind=evaluation and ticket=${set.first_ticket + row.task}` });
  const columns = [
    { title: "task", number: true, cell: (row) => link(row) ? element("a", { href: link(row) }, row.task) : row.task },
    { title: "before", number: true, cell: (row) => formatNumber(row.before) },
    { title: "after", number: true, cell: (row) => formatNumber(row.after) },
    { title: "change", number: true, cell: (row) => `${row.change > 0 ? "+" : ""}${formatNumber(row.change)}` },
  ];
  const better = changed.filter((row) => row.change > 0).length;
  const text = `${better} tasks are better, ${changed.length - better} worse, ${set.rewards[to].length - changed.length} equal`
    + (changed.length > MAX_CHANGED_TASKS ? `; the ${MAX_CHANGED_TASKS} largest changes are listed.` : ".");
  return element("div", {}, form, element("p", { class: "small quiet" }, text),
    changed.length ? buildTable(columns, changed.slice(0, MAX_CHANGED_TASKS), { link: (row) => link(row) }) : "");
}
