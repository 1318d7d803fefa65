"use strict";
// Choice of the page: the address after `#` names it, with all choices made on it.

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
  const tabs = query.run ? Object.entries(PAGES).filter(([, item]) => item.title).map(([name, item]) =>
    element("a", { href: buildHash(name, { run: query.run }), "aria-current": name === page || (page === "trajectory" && name === "trajectories") ? "page" : null }, item.title)) : [];
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
let lastAddress = "";

/** Show the page of the address. Changes during a load lead to one more load after it. */
async function showPage(options = {}) {
  if (options.isRefresh && loading) { isStale = true; return; }
  loading += 1;
  try { await loadPage(options); } finally { loading -= 1; }
  if (isStale && !loading) { isStale = false; showPage({ isRefresh: true }); }
}

/** Load a page and show it, unless another was requested meanwhile. */
async function loadPage({ isRefresh = false }) {
  const { page, query } = parseHash();
  const number = ++shown;
  const main = document.getElementById("main");
  const made = document.createElement("div");
  if (!isRefresh) {
    showHeader(page, query);
    if (page === "trajectory" || page === "side_by_side") stopFollowing();
    else followChanges(query.run, () => showPage({ isRefresh: true }));
  }
  const showWait = () => { if (number === shown) main.replaceChildren(element("p", { class: "quiet", role: "status" }, WAIT_TEXT)); };
  const focusedBefore = findFocused(main);
  const wait = isRefresh ? null : setTimeout(showWait, WAIT_AFTER_MS);
  try {
    await PAGES[page].show(made, query, go);
  } catch (error) {
    made.replaceChildren(element("p", { class: "problem", role: "alert" }, error.message));
  }
  clearTimeout(wait);
  if (number !== shown) return;
  if (isRefresh && isInUse(main)) { isHeldBack = true; return; }
  isHeldBack = false;
  const address = [page, query.run, query.row, query.offset].join("|");
  const isSame = address === lastAddress;
  const focused = isSame ? findFocused(main) || (document.activeElement === document.body && focusedBefore) : null;
  const restore = isSame ? keepView(main, isRefresh) : null;
  main.replaceChildren(...made.childNodes);
  if (restore) restore();
  if (focused) focusAgain(main, focused);
  if (!isSame) window.scrollTo(0, 0);
  lastAddress = address;
}

/** Return whether the reader types, has marked text or holds the pointer down: a new page would end that. */
function isInUse(main) {
  const focused = document.activeElement;
  const isTyping = main.contains(focused) && (
    (focused.tagName === "INPUT" && focused.value !== focused.defaultValue)
    || (focused.tagName === "SELECT" && (!CSS.supports("selector(:open)") || focused.matches(":open"))));
  const marked = document.getSelection();
  return isPressed || isTyping || (!marked.isCollapsed && main.contains(marked.anchorNode));
}

/** Show a page that was held back as soon as the reader is done. */
function showHeldBack() {
  if (isHeldBack && !isInUse(document.getElementById("main"))) { isHeldBack = false; showPage({ isRefresh: true }); }
}

document.addEventListener("pointerdown", (event) => { isPressed = event.button === 0; });
for (const name of ["pointerup", "pointercancel", "change"]) document.addEventListener(name, endPress);
window.addEventListener("blur", endPress);
// A scroll bar or a list of choices may take the pointer, and the event of its release with it.
for (const name of ["pointermove", "pointerover"]) {
  document.addEventListener(name, (event) => { if (isPressed && !(event.buttons & 1)) endPress(); });
}
for (const name of ["focusout", "selectionchange"]) document.addEventListener(name, showHeldBackSoon);

function endPress() {
  isPressed = false;
  showHeldBackSoon();
}

function showHeldBackSoon() {
  setTimeout(showHeldBack); // after other handlers of the event
}

/** Read what is open, scrolled, chosen and typed; return a function that restores it in the new page. */
function keepView(main, isRefresh) {
  const opened = [...main.querySelectorAll("details")].map((item) => item.open);
  const scrolled = [...main.querySelectorAll(".scroll")].map((item) => [item.scrollLeft, item.scrollTop]);
  const chosen = main.querySelector("tr.chosen")?.dataset.link;
  const typed = isRefresh ? listSearches(main).map((item) => item.value === item.defaultValue ? null : item.value) : [];
  return () => {
    main.querySelectorAll("details").forEach((item, index) => { item.open = opened[index] ?? item.open; });
    listSearches(main).forEach((item, index) => {
      if ((typed[index] ?? null) === null) return;
      item.value = typed[index];
      item.dispatchEvent(new Event("input"));
    });
    main.querySelectorAll(".scroll").forEach((item, index) => { [item.scrollLeft, item.scrollTop] = scrolled[index] || [0, 0]; });
    if (chosen) main.querySelector(`tr[data-link="${CSS.escape(chosen)}"]`)?.classList.add("chosen");
  };
}

function listSearches(main) {
  return [...main.querySelectorAll("input[type='search']")];
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

/** Return the name of the focused element, and the position of the cursor in a text. */
function findFocused(main) {
  const { activeElement } = document;
  const focused = nameFocusables(main).find((item) => item.node === activeElement);
  return focused && { name: focused.name, cursor: activeElement.type === "search" ? [activeElement.selectionStart, activeElement.selectionEnd] : null };
}

/** Focus the element that had the focus before, or the page if it is gone: Tab continues from there. */
function focusAgain(main, { name, cursor }) {
  const node = nameFocusables(main).find((item) => item.name === name)?.node || main;
  node.focus({ preventScroll: true });
  if (cursor && node !== main) node.setSelectionRange(...cursor);
}

/** List the elements that can have the focus, with names by which the new page finds them. */
function nameFocusables(main) {
  const counts = new Map();
  return [...main.querySelectorAll(FOCUSABLE)].map((node) => {
    const label = node.getAttribute("href") || node.dataset.name || node.title || node.getAttribute("aria-label") || node.name || node.textContent;
    const name = `${node.tagName}|${label}`;
    counts.set(name, (counts.get(name) || 0) + 1);
    return { node, name: `${name}|${counts.get(name)}` };
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
