"use strict";
// Which page is shown: the address after `#` names it, with all that was chosen on it.

const PAGES = {
  "": { show: showRuns },
  overview: { show: showOverview, title: "Overview" },
  metrics: { show: showMetrics, title: "Metrics" },
  timeline: { show: showTimeline, title: "Timeline" },
  evaluations: { show: showEvaluations, title: "Evaluations" },
  trajectories: { show: showTrajectories, title: "Trajectories" },
  trajectory: { show: showTrajectory },
};

function buildHash(page, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const text = new URLSearchParams(given).toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

function parseHash() {
  const [page, text] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page in PAGES ? page : "", query: Object.fromEntries(new URLSearchParams(text || "")) };
}

function go(page, query) {
  location.hash = buildHash(page, query);
}

function showHeader(page, query) {
  const header = document.getElementById("header");
  const tabs = query.run ? Object.entries(PAGES).filter(([, one]) => one.title).map(([name, one]) =>
    element("a", { href: buildHash(name, { run: query.run }), "aria-current": name === page || (page === "trajectory" && name === "trajectories") ? "page" : null }, one.title)) : [];
  header.replaceChildren(
    element("a", { class: "brand", href: buildHash("") }, "areal-hpc"),
    query.run ? element("span", { class: "run" }, query.run) : "",
    tabs.length ? element("nav", { "aria-label": "pages of the run" }, tabs) : "",
    element("span", { class: "live", id: "live" }));
  document.title = [PAGES[page].title, query.run, "areal-hpc"].filter(Boolean).join(" · ");
}

const WAIT_AFTER_MS = 400;
const WAIT_TEXT = "Reading the files of the run: many trajectories take some seconds when they are looked at for the first time.";

let shown = 0;
let loading = 0;
let isStale = false;
let lastPlace = "";

/** Show the page of the address. News that come while one is loading are asked for once, after it. */
async function showPage(options = {}) {
  if (options.isRefresh && loading) { isStale = true; return; }
  loading += 1;
  try { await loadPage(options); } finally { loading -= 1; }
  if (isStale && !loading) { isStale = false; showPage({ isRefresh: true }); }
}

/** Load a page and show it, unless another was asked for meanwhile. */
async function loadPage({ isRefresh = false }) {
  const { page, query } = parseHash();
  const number = ++shown;
  const main = document.getElementById("main");
  const made = document.createElement("div");
  if (!isRefresh) {
    showHeader(page, query);
    if (page === "trajectory") stopFollowing();
    else followChanges(query.run, () => showPage({ isRefresh: true }));
  }
  const tellWait = () => { if (number === shown) main.replaceChildren(element("p", { class: "quiet", role: "status" }, WAIT_TEXT)); };
  const focusedBefore = findFocused(main);
  const wait = isRefresh ? null : setTimeout(tellWait, WAIT_AFTER_MS);
  try {
    await PAGES[page].show(made, query, go);
  } catch (error) {
    made.replaceChildren(element("p", { class: "problem", role: "alert" }, error.message));
  }
  clearTimeout(wait);
  if (number !== shown) return;
  const typed = isRefresh && main.contains(document.activeElement) && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
  if (typed) return; // the reader is at it: what is new comes with the next change
  const opened = isRefresh ? [...main.querySelectorAll("details")].map((one) => one.open) : [];
  const place = [page, query.run, query.row, query.offset].join("|");
  const focused = place === lastPlace ? findFocused(main) || (document.activeElement === document.body && focusedBefore) : null;
  const chosen = isRefresh ? main.querySelector("tr.chosen")?.dataset.link : null;
  main.replaceChildren(...made.childNodes);
  main.querySelectorAll("details").forEach((one, index) => { if (opened[index] !== undefined) one.open = opened[index]; });
  if (chosen) main.querySelector(`tr[data-link="${CSS.escape(chosen)}"]`)?.classList.add("chosen");
  if (focused) [...main.querySelectorAll(FOCUSABLE)].find((one) => nameFocusable(one) === focused)?.focus({ preventScroll: true });
  if (place !== lastPlace) window.scrollTo(0, 0);
  lastPlace = place;
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

function findFocused(main) {
  const one = document.activeElement;
  return one !== main && main.contains(one) ? nameFocusable(one) : null;
}

/** What an element that had the focus is recognized by when the page is made anew. */
function nameFocusable(one) {
  return [one.tagName, one.title || one.getAttribute("aria-label") || one.name || one.textContent].join("|");
}

/** Keys of the page: `/` to the filter, `j` and `k` through a table, Enter opens. */
document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isTyping) document.activeElement.blur();
  if (isTyping) return;
  const rows = [...document.querySelectorAll("tr[data-link]")];
  const at = rows.findIndex((row) => row.classList.contains("chosen"));
  if (event.key === "/") {
    const filter = document.querySelector("[data-focus='filter']");
    if (filter) { event.preventDefault(); filter.focus(); }
  } else if ((event.key === "j" || event.key === "k") && rows.length) {
    const next = Math.max(0, Math.min(rows.length - 1, at + (event.key === "j" ? 1 : -1)));
    rows.forEach((row, index) => row.classList.toggle("chosen", index === next));
    rows[next].scrollIntoView({ block: "nearest" });
  } else if (event.key === "Enter" && at >= 0 && ["BODY", "MAIN", "DIV"].includes(document.activeElement.tagName)) {
    location.hash = rows[at].dataset.link;
  }
});

window.addEventListener("hashchange", () => showPage());
showPage();
