"use strict";
// The timeline: spans of every process, drawn on canvases, one for each lane.

PAGES.timeline = { show: showTimeline, title: "Timeline" };

const SLICE_COLORS = {
  batch_wait: "--idle", cell_wait: "--idle", command_wait: "--idle", rank_wait: "--idle", idle: "--idle", "no replica": "--bad", start: "--series-5",
  train: "--series-3", read: "--series-1", measure: "--series-5", pack: "--series-4", score: "--series-4",
  publish: "--series-2", "weight update": "--series-2", checkpoint: "--warn", eval: "--series-4", export: "--warn", files: "--warn",
  label: "--panel", "label of a light bar": "--quiet", "chosen-mark": "--text", episodes: "--series-1", serve: "--line", "server start": "--series-5", seal: "--series-3", "lost call": "--bad", several: "--quiet",
};
const LANE_HEIGHT = { normal: 9, states: 14, counts: 34 };
const ZOOM = 2;
let chosenBar = null; // chosen by arrow keys: its lane and its begin

async function showTimeline(main, query, go) {
  const { run } = query;
  const data = await fetchData("timeline", { run, from: query.from, to: query.to });
  const view = isReport && query.from ? { begin: Number(query.from), end: Number(query.to) } : data;
  const show = (begin, end) => go("timeline", { run, from: begin.toFixed(3), to: end.toFixed(3) });
  const length = view.end - view.begin;
  const move = (share) => show(view.begin + share * length, view.end + share * length);
  const scale = (factor) => show(view.begin + length * (1 - factor) / 2, view.end - length * (1 - factor) / 2);
  const button = (name, text, title, onclick) => element("button", { type: "button", class: "plain", title, "aria-label": title, "data-key": name, onclick }, text);
  const status = element("p", { class: "small mono status-line", role: "status" }, "Point at a bar, or walk through the bars of a lane with the arrow keys.");
  main.replaceChildren(
    element("h1", {}, "Timeline"),
    element("div", { class: "panel" },
      describeAnswer(data.answer),
      describeStepTimes(data.step_times)),
    element("div", { class: "chips", style: { marginTop: "12px" } },
      button("+", "Zoom in", "zoom in (key +)", () => scale(1 / ZOOM)), button("-", "Zoom out", "zoom out (key -)", () => scale(ZOOM)),
      button("[", "Earlier", "earlier (key [)", () => move(-0.5)), button("]", "Later", "later (key ])", () => move(0.5)),
      button("0", "Last steps", "the last steps (key 0)", () => go("timeline", { run }))),
    element("p", { class: "quiet small" }, `${formatTime(view.begin)} to ${formatTime(view.end)} (${formatSeconds(length)})`,
      data.shown_steps.length ? `, steps ${data.shown_steps[0]} to ${data.shown_steps[data.shown_steps.length - 1]}` : "",
      ". Drag over a lane to look closer. Keys: ", ["+", "-", "[", "]", "0"].map((key) => [element("kbd", {}, key), " "])),
    buildColorLegend(data.processes),
    status,
    element("div", { class: "timeline" },
      drawLane({ name: "steps", title: "steps", height: LANE_HEIGHT.states, view, data, run, status, show,
        slices: data.steps.map((row) => [row.begin - data.begin, row.end - data.begin, `step ${row.step}`, { limit: row.limit, reward: row.reward }]) }),
      data.processes.map((process) => describeProcess(process, { view, data, run, status, show }))),
    ...data.notes.map((note) => element("p", { class: "quiet small" }, note)),
    element("h2", {}, "What took longest here"),
    buildTable([
      { title: "what", cell: (row) => linkSlice(run, row.name, row.facts) },
      { title: "seconds", number: true, cell: (row) => formatNumber(row.seconds) },
      { title: "process", cell: (row) => row.process }, { title: "lane", cell: (row) => row.lane },
      { title: "facts", wide: true, cell: (row) => formatFacts(row.facts) },
      { title: "", cell: (row) => element("a", { href: linkTimes(run, row.begin, row.end) }, "zoom to it") },
    ], data.longest),
    element("h2", {}, "Steps"),
    buildTable([
      { title: "step", number: true, cell: (row) => element("a", { href: linkTimes(run, row.begin, row.end, 0.02) }, row.step) },
      { title: "seconds", number: true, cell: (row) => formatNumber(row.end - row.begin) },
      { title: "begins", cell: (row) => formatTime(row.begin) },
      { title: "limited by", cell: (row) => row.limit || "–" },
      { title: "reward", number: true, cell: (row) => formatNumber(row.reward) },
    ], [...data.steps].reverse()));
}

function linkTimes(run, begin, end, margin = 0.5) {
  const more = Math.max(0.001, (end - begin) * margin);
  return buildHash("timeline", { run, from: (begin - more).toFixed(3), to: (end + more).toFixed(3) });
}

/** Return the page of the rows of an episode or a call, if it is known. */
function findSlicePage(run, facts) {
  if (facts.row) return buildHash("trajectory", { run, row: facts.row });
  if (facts.ticket_id === undefined || isReport) return null;
  return buildHash("trajectories", { run, where: `ticket=${facts.ticket_id} and attempt=${facts.attempt} and episode=${facts.episode}` });
}

function linkSlice(run, name, facts) {
  const page = findSlicePage(run, facts);
  return page ? element("a", { href: page }, name) : name;
}

function formatFacts(facts) {
  return Object.entries(facts).filter(([, value]) => value !== null && value !== "" && value !== undefined)
    .map(([key, value]) => `${key}=${Number.isInteger(value) ? value : formatNumber(value)}`).join("  ");
}

/** Build the legend of the colors of states and slices. */
function buildColorLegend(processes) {
  const names = new Set(processes.flatMap((process) => process.lanes.flatMap((lane) => (lane.slices || []).map(([, , name]) => name))));
  const known = [...names].filter((name) => name in SLICE_COLORS);
  return element("p", { class: "legend" }, known.map((name) =>
    element("span", {}, element("i", { style: { background: `var(${SLICE_COLORS[name]})` } }), name)));
}

function describeProcess(process, options) {
  const shares = process.shares.slice(0, 5).map(([name, share]) => `${name} ${Math.round(100 * share)} %`).join(", ");
  return element("section", {},
    element("h3", {}, process.process, element("span", { class: "quiet" }, [process.node && ` on ${process.node}`, shares && `: ${shares}`].filter(Boolean).join(""))),
    process.lanes.map((lane, index) => drawLane({ ...options, ...lane, name: `${process.process} ${process.node} ${index}`,
      height: lane.counts ? LANE_HEIGHT.counts : lane.title === "states" ? LANE_HEIGHT.states : LANE_HEIGHT.normal })));
}

/** Draw a lane as a canvas that describes the bar under the pointer, or chosen by arrow keys. */
function drawLane({ name, title, slices, counts, most, height, view, data, run, status, show }) {
  const canvas = element("canvas", { height, style: { height: `${height}px` }, role: "img", "data-name": name, tabindex: slices && slices.length ? "0" : null,
    "aria-label": counts ? `${title}: at most ${formatNumber(most)} at once` : `${title || "lane"}: ${slices.length} bars` });
  let chosen = slices && chosenBar?.lane === name ? slices.findIndex(([begin]) => Math.abs(data.begin + begin - chosenBar.begin) < 1e-3) : -1;
  let from = null;
  const toX = (seconds) => (data.begin + seconds - view.begin) / (view.end - view.begin) * canvas.clientWidth;
  const toTime = (x) => view.begin + x / canvas.clientWidth * (view.end - view.begin);
  const draw = () => {
    const pixels = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, canvas.clientWidth * pixels);
    canvas.height = height * pixels;
    const context = canvas.getContext("2d");
    context.scale(pixels, pixels);
    if (counts) drawCounts(context, counts, most, height, toX, data);
    else drawSlices(context, slices, chosen, height, toX, canvas.clientWidth);
  };
  const describeBar = (index) => {
    if (!slices || index < 0 || index >= slices.length) return;
    const [begin, end, barName, facts] = slices[index];
    status.textContent = `${barName}: ${formatSeconds(end - begin)}, from ${formatTime(data.begin + begin).slice(11)}  ${formatFacts(facts)}`;
  };
  const findAt = (x) => slices ? slices.findIndex(([begin, end]) => toX(begin) - 1 <= x && x <= Math.max(toX(end), toX(begin) + 2)) : -1;
  const findX = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => { from = findX(event); });
  canvas.addEventListener("pointermove", (event) => {
    if (counts) {
      const share = (toTime(findX(event)) - data.begin) / (data.end - data.begin);
      const value = counts[Math.floor(share * counts.length)];
      if (value !== undefined) status.textContent = `${title}: ${formatNumber(value)} under way, at most ${formatNumber(most)}`;
    } else describeBar(findAt(findX(event)));
  });
  canvas.addEventListener("pointerup", (event) => {
    const to = findX(event);
    const index = findAt(to);
    const page = index >= 0 && findSlicePage(run, slices[index][3]);
    if (from !== null && Math.abs(to - from) > 5) show(toTime(Math.min(from, to)), toTime(Math.max(from, to)));
    else if (page) location.hash = page;
    from = null;
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      chosen = Math.max(0, Math.min(slices.length - 1, chosen + (event.key === "ArrowRight" ? 1 : -1)));
      chosenBar = { lane: name, begin: data.begin + slices[chosen][0] };
      event.preventDefault();
      draw();
      describeBar(chosen);
    } else if (event.key === "Enter" && chosen >= 0) {
      const page = findSlicePage(run, slices[chosen][3]);
      location.hash = page || linkTimes(run, data.begin + slices[chosen][0], data.begin + slices[chosen][1]);
    }
  });
  describeBar(chosen);
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(canvas);
  canvas.addEventListener("redraw", draw);
  return element("div", { class: "lane" }, element("span", { class: "small quiet" }, title), canvas);
}

function findColor(name) {
  const style = getComputedStyle(document.body);
  const variable = SLICE_COLORS[name] || (name.startsWith("evaluation ") ? "--series-4" : "--series-1");
  const probe = document.getElementById("live");
  if (!probe) return style.color;
  probe.style.color = `var(${variable})`;
  const color = getComputedStyle(probe).color;
  probe.style.color = "";
  return color;
}

function drawSlices(context, slices, chosen, height, toX, width) {
  const colors = {};
  context.font = "10px system-ui, sans-serif";
  slices.forEach(([begin, end, name], index) => {
    const [left, right] = [toX(begin), toX(end)];
    if (right < 0 || left > width) return;
    colors[name] = colors[name] || findColor(name);
    context.fillStyle = colors[name];
    const size = Math.max(1, right - left - (right - left > 3 ? 1 : 0));
    context.fillRect(left, 0, size, height);
    if (height >= LANE_HEIGHT.states && size > 60) {
      context.fillStyle = findColor(["--idle", "--line"].includes(SLICE_COLORS[name]) ? "label of a light bar" : "label");
      context.fillText(name, Math.max(left, 0) + 4, height - 4, size - 8);
    }
    if (index === chosen) {
      context.strokeStyle = findColor("chosen-mark");
      context.lineWidth = 2;
      context.strokeRect(left + 1, 1, Math.max(2, size - 2), height - 2);
    }
  });
}

function drawCounts(context, counts, most, height, toX, data) {
  context.fillStyle = findColor("episodes");
  const width = (data.end - data.begin) / counts.length;
  counts.forEach((count, index) => {
    const [left, right] = [toX(index * width), toX((index + 1) * width)];
    const size = most > 0 ? count / most * height : 0;
    context.fillRect(left, height - size, Math.max(1, right - left), size);
  });
}

/** One listener for all lanes: one for each would keep its lane in memory. */
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.querySelectorAll(".lane canvas").forEach((canvas) => canvas.dispatchEvent(new Event("redraw"))));

/** Keys of the page's buttons. */
document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = document.querySelector(`button[data-key="${CSS.escape(event.key)}"]`);
  if (button) button.click();
});
