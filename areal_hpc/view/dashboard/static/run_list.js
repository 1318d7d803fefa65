"use strict";
// Page of all runs.

PAGES[""] = { show: showRuns };

async function showRuns(main, query, go) {
  const { place, runs } = await fetchData("runs");
  const chosen = new Set((query.compare || "").split(",").filter(Boolean));
  const columns = [
    { title: "", cell: (run) => element("input", {
      type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.name),
      onchange: (event) => {
        if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
        go("", { compare: [...chosen].join(",") });
      } }) },
    { title: "run", cell: (run) => element("a", { class: "mono", href: buildHash("overview", { run: run.name }) }, run.name) },
    { title: "state", cell: (run) => element("span", { class: `state ${run.state.split(/[ ,]/)[0]}` }, run.state) },
    { title: "step", number: true, cell: (run) => run.problem ? "" : `${run.step} of ${run.total_steps || "?"}` },
    { title: "reward", number: true, cell: (run) => formatNumber(run.reward?.at(-1)) },
    { title: "held-out", number: true, cell: (run) => formatNumber(run.held_out) },
    { title: "alerts", cell: (run) => run.failures ? element("span", { class: "problem" }, `${run.failures} failing`) : "" },
    { title: "held", number: true, cell: (run) => run.hours ? `${formatNumber(run.hours, 2)} ${run.hours_of}` : "" },
    { title: "step time", number: true, cell: (run) => formatSeconds(run.step_s) },
    { title: "", wide: true, cell: (run) => run.problem ? element("span", { class: "problem" }, run.problem) : "" },
  ];
  const compared = runs.filter((run) => chosen.has(run.name) && run.reward);
  main.replaceChildren(
    element("h1", {}, "Runs"),
    place ? element("p", { class: "quiet mono" }, place) : "",
    runs.length
      ? buildTable(columns, runs, { link: (run) => buildHash("overview", { run: run.name }) })
      : element("p", {}, "There is no run here yet. ", element("span", { class: "mono" }, "areal-hpc run RECIPE"), " makes one."),
    compared.length > 1 ? compareRuns(compared) : "");
}

function compareRuns(runs) {
  const known = runs.filter((run) => Object.keys(run.recipe).length); // not another user's
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.recipe)))].sort();
  const differing = keys.filter((key) => !["experiment_name", "trial_name"].includes(key)
    && new Set(known.map((run) => run.recipe[key])).size > 1);
  const columns = [
    { title: "key", cell: (key) => element("span", { class: "mono" }, key) },
    ...runs.map((run) => ({ title: run.name, wide: true, cell: (key) => run.recipe[key] ?? "–" })),
  ];
  return element("section", {},
    element("h2", {}, "Reward"),
    buildChart({ title: "reward/mean", height: 240, series: runs.map((run) => ({
      name: run.name, x: run.reward_steps, y: run.reward })) }),
    element("h2", {}, "Keys that differ"),
    differing.length ? buildTable(columns, differing) : element("p", { class: "quiet" }, "none"));
}
