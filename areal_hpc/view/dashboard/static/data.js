"use strict";
// Data of the pages: from the server, or from the file itself if it is a report.

const reportData = document.getElementById("report");
const report = reportData && JSON.parse(reportData.textContent);
const isReport = report !== null;

/** Fetch the JSON of a page of data. Raises an Error whose message is for the reader. */
async function fetchData(page, query = {}) {
  if (isReport) return findReported(page, query);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const response = await fetch(`data/${page}?${new URLSearchParams(given)}`);
  const content = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(content.error);
  return content;
}

function findReported(page, query) {
  if (page === "runs") return report.list;
  const run = report.runs[query.run];
  if (!run) throw new Error("this run is not in the report");
  const content = page === "trajectory" ? run.trajectories[query.row] : run[page];
  if (!content) throw new Error("this conversation is not in the report");
  const problem = page === "trajectory" ? content.problem : content.error; // `error` of a trajectory is that of the episode
  if (problem) throw new Error(problem);
  if (page !== "rows" || !query.sort) return content;
  const sign = query.order === "up" ? 1 : -1;
  const value = (row) => row[query.sort];
  const rows = [...content.rows].sort((a, b) =>
    (value(a) === null) - (value(b) === null) || sign * (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0));
  return { ...content, rows };
}

let changeEvents = null;
let followed = null;

/** Call `refresh` whenever files of a run (of all runs without a name) have changed. */
function followChanges(run, refresh) {
  followed = isReport ? null : { run, refresh };
  listen(false);
}

/** Stop the stream, for a page whose data do not change. */
function stopFollowing() {
  followed = null;
  listen(false);
}

/** Open the stream of changes while the page is visible: browsers allow six to one server. */
function listen(isLate) {
  if (changeEvents) changeEvents.close();
  changeEvents = null;
  if (!followed || document.hidden) return;
  const { run, refresh } = followed;
  const source = new EventSource(`live${run ? `?${new URLSearchParams({ run })}` : ""}`);
  changeEvents = source;
  let due = null;
  let hasMissed = isLate;
  source.addEventListener("change", () => {
    clearTimeout(due);
    due = setTimeout(() => { if (changeEvents === source) refresh(); }, 150);
  });
  const showStatus = (text) => { const status = document.getElementById("live"); if (status) status.textContent = text; };
  source.addEventListener("open", (event) => {
    showStatus("live");
    if (event.data === undefined) return; // the browser's own event: the server's means that it polls now
    if (hasMissed) refresh();
    hasMissed = true;
  });
  source.addEventListener("error", () => showStatus("not connected: is areal-hpc view still running?"));
}

document.addEventListener("visibilitychange", () => listen(true));
