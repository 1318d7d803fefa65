"use strict";
// Elements of the page. Text is always set as text, so that text of agents is never markup.

/** Pages by the names in their addresses, in the order of their tabs: each script adds its pages. */
const PAGES = {};

/** Make an element with attributes, listeners (`onclick`) and children: elements or texts. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Make an SVG element. */
function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Format a number for people; a dash for none. */
function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumFractionDigits: size >= 100 ? 1 : digits });
}

/** Format seconds as `41 s`, `12 min` or `3 h 5 min`. */
function formatSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function formatTime(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString("sv-SE");
}

/** Build a table; columns are `{title, cell(row), number, sort}`. */
function buildTable(columns, rows, { onsort, sorted, link } = {}) {
  const head = columns.map((column) => {
    const shown = sorted && sorted.field === column.sort ? (sorted.up ? " ↑" : " ↓") : "";
    const title = column.sort && onsort
      ? element("button", { onclick: () => onsort(column.sort), title: `sort by ${column.sort}` }, column.title + shown)
      : column.title;
    const direction = shown ? (sorted.up ? "ascending" : "descending") : null;
    return element("th", { class: column.number ? "number" : null, scope: "col", "aria-sort": direction }, title);
  });
  const body = rows.map((row) => element("tr", { "data-link": link ? link(row) : null },
    columns.map((column) => element("td", { class: [column.number && "number", column.wide && "wrap"].filter(Boolean).join(" ") || null },
      column.cell(row)))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

/** Build a list of terms and their values. */
function buildFacts(pairs) {
  return element("dl", { class: "facts" },
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([term, value]) => [element("dt", {}, term), element("dd", {}, value)]));
}
