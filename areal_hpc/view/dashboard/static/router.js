"use strict";
// Which page is shown: the address after `#` names it, with all that was chosen on it.

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
let isHeldBack = false;
let isPressed = false;
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
  if (isRefresh && isInUse(main)) { isHeldBack = true; return; }
  isHeldBack = false;
  const place = [page, query.run, query.row, query.offset].join("|");
  const isSame = place === lastPlace;
  const focused = isSame ? findFocused(main) || (document.activeElement === document.body && focusedBefore) : null;
  const restore = isSame ? keepView(main, isRefresh) : null;
  main.replaceChildren(...made.childNodes);
  if (restore) restore();
  if (focused) focusAgain(main, focused);
  if (!isSame) window.scrollTo(0, 0);
  lastPlace = place;
}

/** Whether the reader types, has marked text or holds the pointer down, which a page made anew would end. */
function isInUse(main) {
  const one = document.activeElement;
  const isTyping = main.contains(one) && (
    (one.tagName === "INPUT" && one.value !== one.defaultValue)
    || (one.tagName === "SELECT" && (!CSS.supports("selector(:open)") || one.matches(":open"))));
  const marked = document.getSelection();
  return isPressed || isTyping || (!marked.isCollapsed && main.contains(marked.anchorNode));
}

/** Show what is new as soon as the reader is done. */
function showHeldBack() {
  if (isHeldBack && !isInUse(document.getElementById("main"))) { isHeldBack = false; showPage({ isRefresh: true }); }
}

document.addEventListener("pointerdown", (event) => { isPressed = event.button === 0; });
for (const name of ["pointerup", "pointercancel", "change"]) document.addEventListener(name, endPress);
window.addEventListener("blur", endPress);
// A scroll bar or a list of choices may take the pointer, and keep what would tell that it was let go.
for (const name of ["pointermove", "pointerover"]) {
  document.addEventListener(name, (event) => { if (isPressed && !(event.buttons & 1)) endPress(); });
}
for (const name of ["focusout", "selectionchange"]) document.addEventListener(name, showHeldBackSoon);

function endPress() {
  isPressed = false;
  showHeldBackSoon();
}

function showHeldBackSoon() {
  setTimeout(showHeldBack); // after what else the event leads to
}

/** What the reader has opened, scrolled, chosen and typed; the function puts it into the page made anew. */
function keepView(main, isRefresh) {
  const opened = [...main.querySelectorAll("details")].map((one) => one.open);
  const scrolled = [...main.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
  const chosen = main.querySelector("tr.chosen")?.dataset.link;
  const typed = isRefresh ? listSearches(main).map((one) => one.value === one.defaultValue ? null : one.value) : [];
  return () => {
    main.querySelectorAll("details").forEach((one, index) => { one.open = opened[index] ?? one.open; });
    listSearches(main).forEach((one, index) => {
      if ((typed[index] ?? null) === null) return;
      one.value = typed[index];
      one.dispatchEvent(new Event("input"));
    });
    main.querySelectorAll(".scroll").forEach((one, index) => { [one.scrollLeft, one.scrollTop] = scrolled[index] || [0, 0]; });
    if (chosen) main.querySelector(`tr[data-link="${CSS.escape(chosen)}"]`)?.classList.add("chosen");
  };
}

function listSearches(main) {
  return [...main.querySelectorAll("input[type='search']")];
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

/** What has the focus in the page: its name, and the place of the cursor in a text. */
function findFocused(main) {
  const { activeElement } = document;
  const found = nameFocusables(main).find(({ one }) => one === activeElement);
  return found && { name: found.name, cursor: activeElement.type === "search" ? [activeElement.selectionStart, activeElement.selectionEnd] : null };
}

/** Give the focus to what had it before, or to the page if that is gone: Tab goes on from there. */
function focusAgain(main, { name, cursor }) {
  const one = nameFocusables(main).find((item) => item.name === name)?.one || main;
  one.focus({ preventScroll: true });
  if (cursor && one !== main) one.setSelectionRange(...cursor);
}

/** What can have the focus, with what each is recognized by when the page is made anew. */
function nameFocusables(main) {
  const counts = new Map();
  return [...main.querySelectorAll(FOCUSABLE)].map((one) => {
    const own = one.getAttribute("href") || one.dataset.name || one.title || one.getAttribute("aria-label") || one.name || one.textContent;
    const name = `${one.tagName}|${own}`;
    counts.set(name, (counts.get(name) || 0) + 1);
    return { one, name: `${name}|${counts.get(name)}` };
  });
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
