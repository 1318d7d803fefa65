"use strict";
// Data of the pages: from the server, or from the scripts of a bundle.

const isBundle = "bundle" in window;

/** The JSON of a page of data. Raises an Error whose message is for the reader. */
async function fetchData(page, query = {}) {
  if (isBundle) return findBundled(page, query);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const answer = await fetch(`data/${page}?${new URLSearchParams(given)}`);
  const content = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(content.error);
  return content;
}

async function findBundled(page, query) {
  if (page !== "trajectory") {
    if (window.bundle[page].error) throw new Error(window.bundle[page].error);
    if (page !== "rows" || !query.sort) return window.bundle[page];
    const sign = query.order === "up" ? 1 : -1;
    const value = (row) => row[query.sort];
    const rows = [...window.bundle.rows.rows].sort((a, b) =>
      (value(a) === null) - (value(b) === null) || sign * (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0));
    return { ...window.bundle.rows, rows };
  }
  if (!window.bundle.rows.rows.some((row) => nameRow(row) === query.row)) throw new Error("this conversation is not in the bundle");
  if (!(query.row in window.bundle)) {
    await new Promise((resolve, reject) => {
      const file = `rows/${query.row.replace("/", "-")}.js`;
      document.head.append(element("script", { src: file, onload: resolve, onerror: () => reject(new Error("this conversation is not in the bundle")) }));
    });
  }
  const content = window.bundle[query.row];
  if (content.problem) throw new Error(content.problem); // `error` is that of the episode
  return content;
}

let news = null;
let followed = null;

/** Call `refresh` whenever files of a run (of all runs without a name) have changed. */
function followChanges(run, refresh) {
  followed = isBundle ? null : { run, refresh };
  listen(false);
}

/** No more news: what the page shows does not change. */
function stopFollowing() {
  followed = null;
  listen(false);
}

/** Open the stream of news while the page is seen: browsers allow six to one server. */
function listen(isLate) {
  if (news) news.close();
  news = null;
  if (!followed || document.hidden) return;
  const { run, refresh } = followed;
  const source = new EventSource(`live${run ? `?${new URLSearchParams({ run })}` : ""}`);
  news = source;
  let due = null;
  let hasMissed = isLate;
  source.addEventListener("change", () => {
    clearTimeout(due);
    due = setTimeout(() => { if (news === source) refresh(); }, 150);
  });
  const tell = (text) => { const place = document.getElementById("live"); if (place) place.textContent = text; };
  source.addEventListener("open", (event) => {
    tell("live");
    if (event.data === undefined) return; // the browser's own: the server's says that it looks now
    if (hasMissed) refresh();
    hasMissed = true;
  });
  source.addEventListener("error", () => tell("not connected: is areal-hpc view still running?"));
}

document.addEventListener("visibilitychange", () => listen(true));
