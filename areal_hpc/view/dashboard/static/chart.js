"use strict";
// Line charts as SVG.

const MARGIN = { left: 52, right: 10, top: 8, bottom: 20 };
const COLORS = [1, 2, 3, 4, 5].map((number) => `var(--series-${number})`);

/** Return round numbers that divide a range. */
function findTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  if (Math.floor(high / step) - Math.ceil(low / step) < 1 && count < 12) return findTicks(low, high, count * 2);
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9 && ticks.length < 50; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

/** Return the exponential moving average over the points that have a value. */
function smoothValues(values, strength) {
  let mean = null;
  return values.map((value) => {
    if (value === null || strength === 0) return value;
    mean = mean === null ? value : strength * mean + (1 - strength) * value;
    return mean;
  });
}

/**
 * Build a chart with a title. `series` are `{name, x, y}` with equally long arrays, null for no value;
 * `low` and `high`, if given, are bounds of the values, drawn as a band. `restarts` are x positions of
 * dashed lines.
 */
function buildChart({ title, hint, unit, series, restarts = [], height = 150, formatX = (x) => `step ${x}` }) {
  const drawn = series.filter((curve) => curve.y.some((value) => value !== null && value !== undefined));
  const value = element("div", { class: "value" });
  const holder = element("div", { style: { minHeight: drawn.length ? `${height}px` : "" } }); // drawn later: the page must not shrink meanwhile
  const values = drawn.map(() => element("span", {}));
  const legend = drawn.length > 1 && element("div", { class: "legend" }, drawn.map((curve, index) =>
    element("span", {}, element("i", { style: { background: COLORS[index % COLORS.length] } }), `${curve.name} `, values[index])));
  const chart = element("figure", { class: "panel chart", style: { margin: 0 } },
    element("div", { class: "head" }, element("h3", { title: hint || null }, title, unit ? element("span", { class: "quiet" }, ` ${unit}`) : ""), value),
    holder, legend);
  /** Show the values of each series at an index, and the x position of them. */
  const showValues = (indices, position) => {
    const texts = drawn.map((curve, index) => describePoint(curve, indices[index]));
    texts.forEach((text, index) => { values[index].textContent = text; });
    value.textContent = [position, drawn.length > 1 ? "" : texts[0]].filter(Boolean).join(": ");
  };
  const showLast = () => showValues(drawn.map((curve) => curve.y.findLastIndex((item) => item !== null && item !== undefined)), "");
  if (!drawn.length) {
    holder.append(element("p", { class: "quiet small" }, "no values yet"));
    return chart;
  }
  showLast();
  let drawnWidth = 0;
  const draw = () => {
    const width = Math.max(200, holder.clientWidth);
    if (width === drawnWidth) return;
    drawnWidth = width;
    holder.replaceChildren(drawLines(drawn, { width, height, restarts, 
      describe: (x) => showValues(drawn.map((curve) => curve.x.indexOf(x)), formatX(x)), leave: showLast, title }));
  };
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(holder);
  return chart;
}

function describePoint({ y, low, high }, index) {
  const text = formatNumber(y[index]);
  return low && typeof low[index] === "number" ? `${text} [${formatNumber(low[index])}, ${formatNumber(high[index])}]` : text;
}

function drawLines(series, { width, height, restarts, describe, leave, title }) {
  const xs = series.flatMap((curve) => curve.x);
  const ys = series.flatMap((curve) => [...curve.y, ...(curve.low || []), ...(curve.high || [])]).filter((item) => item !== null && item !== undefined);
  let [lowX, highX] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  let [lowY, highY] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
  if (lowX === highX) highX += 1;
  if (lowY === 0 && highY === 0) highY = 1;
  if (highY - lowY <= 1e-9 * Math.max(Math.abs(lowY), Math.abs(highY))) { lowY -= Math.abs(lowY) * 0.1 || 0.5; highY += Math.abs(highY) * 0.1 || 0.5; }
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const toX = (x) => MARGIN.left + ((x - lowX) / (highX - lowX)) * inner.width;
  const toY = (y) => MARGIN.top + (1 - (y - lowY) / (highY - lowY)) * inner.height;
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
  for (const tick of findTicks(lowY, highY, 3)) {
    figure.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: toY(tick), y2: toY(tick) }));
    const label = svg("text", { class: "axis", x: MARGIN.left - 6, y: toY(tick) + 4, "text-anchor": "end" });
    label.textContent = formatTick(tick);
    figure.append(label);
  }
  for (const tick of findTicks(lowX, highX, Math.min(6, inner.width / 70))) {
    const label = svg("text", { class: "axis", x: toX(tick), y: height - 5, "text-anchor": "middle" });
    label.textContent = formatTick(tick);
    figure.append(label);
  }
  for (const x of restarts) {
    const line = svg("line", { class: "restart", x1: toX(x), x2: toX(x), y1: MARGIN.top, y2: height - MARGIN.bottom });
    const name = svg("title");
    name.textContent = `the trainer started again before step ${x}`;
    line.append(name);
    figure.append(line);
  }
  series.forEach((curve, index) => drawOneLine(figure, curve, toX, toY, COLORS[index % COLORS.length]));
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  figure.append(cursor);
  figure.addEventListener("pointermove", (event) => {
    const box = figure.getBoundingClientRect();
    const x = lowX + (((event.clientX - box.left) * width / box.width - MARGIN.left) / inner.width) * (highX - lowX);
    const nearest = xs.reduce((best, item) => Math.abs(item - x) < Math.abs(best - x) ? item : best);
    cursor.setAttribute("x1", toX(nearest));
    cursor.setAttribute("x2", toX(nearest));
    cursor.setAttribute("visibility", "visible");
    describe(nearest);
  });
  figure.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); leave(); });
  return figure;
}

/** Draw the values as one line, and as points if they are few; steps without a value are skipped. */
function drawOneLine(figure, { x, y, low, high }, toX, toY, color) {
  if (low) {
    const known = x.map((_, index) => index).filter((index) => typeof low[index] === "number" && typeof high[index] === "number");
    const corners = [...known.map((index) => [x[index], high[index]]), ...known.reverse().map((index) => [x[index], low[index]])];
    figure.append(svg("polygon", { points: corners.map(([px, py]) => `${toX(px).toFixed(1)},${toY(py).toFixed(1)}`).join(" "), fill: color, opacity: 0.15 }));
  }
  const points = x.map((item, index) => [item, y[index]]).filter(([, item]) => item !== null && item !== undefined);
  const path = points.map(([px, py], index) => `${index ? "L" : "M"}${toX(px).toFixed(1)} ${toY(py).toFixed(1)}`).join("");
  figure.append(svg("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.6, "stroke-linejoin": "round" }));
  if (points.length <= 40) {
    for (const [px, py] of points) figure.append(svg("circle", { cx: toX(px), cy: toY(py), r: 1.9, fill: color }));
  }
}

function formatTick(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}
