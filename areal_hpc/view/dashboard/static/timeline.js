"use strict";
// The timeline: what every process did from when to when, drawn on canvases, one a lane.

PAGES.timeline = { show: showTimeline, title: "Timeline" };

const SLICE_COLORS = {
  batch_wait: "--idle", cell_wait: "--idle", command_wait: "--idle", rank_wait: "--idle", idle: "--idle", "no replica": "--bad", start: "--series-5",
  train: "--series-3", read: "--series-1", measure: "--series-5", pack: "--series-4", score: "--series-4",
  publish: "--series-2", "weight update": "--series-2", checkpoint: "--warn", eval: "--series-4", export: "--warn", files: "--warn",
  label: "--panel", "label of a light bar": "--quiet", "chosen-mark": "--text", episodes: "--series-1", serve: "--line", "server start": "--series-5", seal: "--series-3", "lost call": "--bad", several: "--quiet",
};
const LANE_HEIGHT = { one: 9, states: 14, counts: 34 };
const ZOOM = 2;
let chosenBar = null; // by arrow keys: its lane, and when it begins

async function showTimeline(main, query, go) {
  const { run } = query;
  const found = await fetchData("timeline", { run, from: query.from, to: query.to });
  const view = isReport && query.from ? { begin: Number(query.from), end: Number(query.to) } : found;
  const show = (begin, end) => go("timeline", { run, from: begin.toFixed(3), to: end.toFixed(3) });
  const length = view.end - view.begin;
  const move = (share) => show(view.begin + share * length, view.end + share * length);
  const scale = (factor) => show(view.begin + length * (1 - factor) / 2, view.end - length * (1 - factor) / 2);
  const button = (name, text, title, onclick) => element("button", { type: "button", class: "plain", title, "aria-label": title, "data-key": name, onclick }, text);
  const told = element("p", { class: "small mono told", role: "status" }, "Point at a bar, or walk through the bars of a lane with the arrow keys.");
  main.replaceChildren(
    element("h1", {}, "Timeline"),
    element("div", { class: "panel" },
      describeAnswer(found.answer),
      describeStepTimes(found.step_times)),
    element("div", { class: "chips", style: { marginTop: "12px" } },
      button("+", "Zoom in", "zoom in (key +)", () => scale(1 / ZOOM)), button("-", "Zoom out", "zoom out (key -)", () => scale(ZOOM)),
      button("[", "Earlier", "earlier (key [)", () => move(-0.5)), button("]", "Later", "later (key ])", () => move(0.5)),
      button("0", "Last steps", "the last steps (key 0)", () => go("timeline", { run }))),
    element("p", { class: "quiet small" }, `${formatTime(view.begin)} to ${formatTime(view.end)} (${formatSeconds(length)})`,
      found.shown_steps.length ? `, steps ${found.shown_steps[0]} to ${found.shown_steps[found.shown_steps.length - 1]}` : "",
      ". Drag over a lane to look closer. Keys: ", ["+", "-", "[", "]", "0"].map((key) => [element("kbd", {}, key), " "])),
    buildColorLegend(found.processes),
    told,
    element("div", { class: "timeline" },
      drawLane({ name: "steps", title: "steps", height: LANE_HEIGHT.states, view, found, run, told, show,
        slices: found.steps.map((one) => [one.begin - found.begin, one.end - found.begin, `step ${one.step}`, { limit: one.limit, reward: one.reward }]) }),
      found.processes.map((process) => describeProcess(process, { view, found, run, told, show }))),
    ...found.notes.map((note) => element("p", { class: "quiet small" }, note)),
    element("h2", {}, "What took longest here"),
    buildTable([
      { title: "what", cell: (one) => linkSlice(run, one.name, one.facts) },
      { title: "seconds", number: true, cell: (one) => formatNumber(one.seconds) },
      { title: "process", cell: (one) => one.process }, { title: "lane", cell: (one) => one.lane },
      { title: "facts", wide: true, cell: (one) => formatFacts(one.facts) },
      { title: "", cell: (one) => element("a", { href: linkTimes(run, one.begin, one.end) }, "zoom to it") },
    ], found.longest),
    element("h2", {}, "Steps"),
    buildTable([
      { title: "step", number: true, cell: (one) => element("a", { href: linkTimes(run, one.begin, one.end, 0.02) }, one.step) },
      { title: "seconds", number: true, cell: (one) => formatNumber(one.end - one.begin) },
      { title: "begins", cell: (one) => formatTime(one.begin) },
      { title: "limited by", cell: (one) => one.limit || "–" },
      { title: "reward", number: true, cell: (one) => formatNumber(one.reward) },
    ], [...found.steps].reverse()));
}

function linkTimes(run, begin, end, margin = 0.5) {
  const more = Math.max(0.001, (end - begin) * margin);
  return buildHash("timeline", { run, from: (begin - more).toFixed(3), to: (end + more).toFixed(3) });
}

/** The rows that an episode or a call belongs to, if it is known. */
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

/** Which color is what, of the states and slices that are there. */
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
      height: lane.counts ? LANE_HEIGHT.counts : lane.title === "states" ? LANE_HEIGHT.states : LANE_HEIGHT.one })));
}

/** A lane as a canvas that tells what is under the pointer, or chosen by arrow keys. */
function drawLane({ name, title, slices, counts, most, height, view, found, run, told, show }) {
  const canvas = element("canvas", { height, style: { height: `${height}px` }, role: "img", "data-name": name, tabindex: slices && slices.length ? "0" : null,
    "aria-label": counts ? `${title}: at most ${formatNumber(most)} at once` : `${title || "lane"}: ${slices.length} bars` });
  let chosen = slices && chosenBar?.lane === name ? slices.findIndex(([begin]) => Math.abs(found.begin + begin - chosenBar.begin) < 1e-3) : -1;
  let from = null;
  const toX = (seconds) => (found.begin + seconds - view.begin) / (view.end - view.begin) * canvas.clientWidth;
  const toTime = (x) => view.begin + x / canvas.clientWidth * (view.end - view.begin);
  const draw = () => {
    const pixels = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, canvas.clientWidth * pixels);
    canvas.height = height * pixels;
    const context = canvas.getContext("2d");
    context.scale(pixels, pixels);
    if (counts) drawCounts(context, counts, most, height, toX, found);
    else drawSlices(context, slices, chosen, height, toX, canvas.clientWidth);
  };
  const tell = (place) => {
    if (!slices || place < 0 || place >= slices.length) return;
    const [begin, end, what, facts] = slices[place];
    told.textContent = `${what}: ${formatSeconds(end - begin)}, from ${formatTime(found.begin + begin).slice(11)}  ${formatFacts(facts)}`;
  };
  const findAt = (x) => slices ? slices.findIndex(([begin, end]) => toX(begin) - 1 <= x && x <= Math.max(toX(end), toX(begin) + 2)) : -1;
  const findX = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => { from = findX(event); });
  canvas.addEventListener("pointermove", (event) => {
    if (counts) {
      const share = (toTime(findX(event)) - found.begin) / (found.end - found.begin);
      const value = counts[Math.floor(share * counts.length)];
      if (value !== undefined) told.textContent = `${title}: ${formatNumber(value)} under way, at most ${formatNumber(most)}`;
    } else tell(findAt(findX(event)));
  });
  canvas.addEventListener("pointerup", (event) => {
    const to = findX(event);
    const place = findAt(to);
    const page = place >= 0 && findSlicePage(run, slices[place][3]);
    if (from !== null && Math.abs(to - from) > 5) show(toTime(Math.min(from, to)), toTime(Math.max(from, to)));
    else if (page) location.hash = page;
    from = null;
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      chosen = Math.max(0, Math.min(slices.length - 1, chosen + (event.key === "ArrowRight" ? 1 : -1)));
      chosenBar = { lane: name, begin: found.begin + slices[chosen][0] };
      event.preventDefault();
      draw();
      tell(chosen);
    } else if (event.key === "Enter" && chosen >= 0) {
      const page = findSlicePage(run, slices[chosen][3]);
      location.hash = page || linkTimes(run, found.begin + slices[chosen][0], found.begin + slices[chosen][1]);
    }
  });
  tell(chosen);
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
  slices.forEach(([begin, end, name], place) => {
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
    if (place === chosen) {
      context.strokeStyle = findColor("chosen-mark");
      context.lineWidth = 2;
      context.strokeRect(left + 1, 1, Math.max(2, size - 2), height - 2);
    }
  });
}

function drawCounts(context, counts, most, height, toX, found) {
  context.fillStyle = findColor("episodes");
  const width = (found.end - found.begin) / counts.length;
  counts.forEach((count, place) => {
    const [left, right] = [toX(place * width), toX((place + 1) * width)];
    const size = most > 0 ? count / most * height : 0;
    context.fillRect(left, height - size, Math.max(1, right - left), size);
  });
}

/** One listener for all lanes that there ever are: one of each would keep it for good. */
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.querySelectorAll(".lane canvas").forEach((one) => one.dispatchEvent(new Event("redraw"))));

/** Keys of the page's buttons. */
document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = document.querySelector(`button[data-key="${CSS.escape(event.key)}"]`);
  if (button) button.click();
});
