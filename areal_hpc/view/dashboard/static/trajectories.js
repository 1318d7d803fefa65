"use strict";
// The table of recorded rows, and one row with its conversation and tokens.

PAGES.trajectories = { show: showTrajectories, title: "Trajectories" };
PAGES.trajectory = { show: showTrajectory };
PAGES.side_by_side = { show: showSideBySide };

const PAGE_ROWS = 100;
const CHUNK_TOKENS = 1000;
const ROW_COLUMNS = [
  ["kind", "kind"], ["step", "step", true], ["ticket", "ticket", true], ["attempt", "attempt", true], ["episode", "episode", true],
  ["length", "sampled", true], ["tokens", "tokens", true], ["calls", "calls", true],
  ["seconds", "seconds", true], ["task", "task", true], ["cell", "cell"], ["finish", "finish"],
];
const ID_FIELDS = ["step", "ticket", "attempt", "episode", "task"]; // as filters have them, without separators
const SHORTCUTS = [
  ["all", ""], ["trained", "kind=train"], ["held-out", "kind=evaluation"], ["failed", "kind=failed"], ["auxiliary", "kind=auxiliary"], ["people", "kind=personal"],
  ["reward 0 or less", "kind=train and reward<=0"], ["cut", "finish=length"],
];

function nameRow(row) {
  return `${row.shard}/${row.row}`;
}

function linkRow(run, row) {
  return buildHash("trajectory", { run, row: nameRow(row) });
}

function rowColumns(run, rows) {
  return [
    { title: "", cell: (row) => element("a", { href: linkRow(run, row) }, "open") },
    { title: "reward", sort: "reward", number: true, cell: (row) => describeField(row, "reward") },
    { title: "first question", wide: true, cell: (row) => row.question },
    { title: "last reply", wide: true, cell: (row) => row.reply },
    ...ROW_COLUMNS.map(([field, title, number]) => ({ title, sort: field, number, cell: (row) => describeField(row, field) })),
    { title: "versions", cell: (row) => row.oldest === row.newest ? row.oldest || "–" : `${row.oldest}..${row.newest}` },
    ...(rows.some((row) => row.cause) ? [{ title: "cause", wide: true, cell: (row) => row.cause || "" }] : []),
  ];
}

function describeField(row, field) {
  const value = row[field];
  if (value === null || value === "" || (field === "attempt" && row.kind === "evaluation")) return "–";
  if (field === "kind" && row.set) return `${value}: ${row.set}`;
  return ID_FIELDS.includes(field) ? String(value) : formatNumber(value);
}

async function showTrajectories(main, query, go) {
  const { run, where = "", sort = "", order = "", offset = "0" } = query;
  const choose = (changes) => go("trajectories", { run, where, sort, order, offset: "", ...changes });
  const failures = await fetchData("failures", { run });
  const form = isReport ? "" : element("form", { class: "filter", role: "search", onsubmit: (event) => {
    event.preventDefault();
    choose({ where: event.target.where.value });
  } },
  element("input", { type: "search", name: "where", "data-focus": "filter", value: where, spellcheck: "false", autocomplete: "off",
    "aria-label": "filter", placeholder: 'step=20 and reward<0.5 and text~"error"' }),
  element("button", { class: "plain" }, "Filter"));
  const buildChips = (shortcuts) => shortcuts.map(([title, expression]) =>
    element("button", { type: "button", class: "plain", "aria-pressed": String(where === expression), onclick: () => choose({ where: expression }) }, title));
  const chips = isReport ? "" : element("div", { class: "chips" }, buildChips(SHORTCUTS));
  const holder = element("div", {});
  main.replaceChildren(element("h1", {}, "Trajectories"), form, chips, holder,
    failures.length ? element("section", {}, element("h2", {}, "Failed episodes by exception"), buildTable([
      { title: "episodes", number: true, cell: (item) => formatNumber(item.count) },
      { title: "exception and line", wide: true, cell: (item) => isReport ? item.cause : element("a", {
        href: buildHash("trajectories", { run, where: `kind=failed and cause${compareText(item.cause)}` }) }, item.cause || "not known") },
    ], failures)) : "");
  let data;
  try {
    data = await fetchData("rows", { run, where, sort, order, offset, count: PAGE_ROWS });
  } catch (error) {
    holder.replaceChildren(element("p", { class: "problem", role: "alert" }, error.message));
    return;
  }
  if (chips && data.sets.length) chips.append(element("span", { class: "quiet" }, "evaluation sets:"), ...buildChips(data.sets.map((item) => [item.name, item.where])));
  const first = Number(offset);
  const turn = (text, to) => element("button", { type: "button", class: "plain", disabled: to < 0 || to >= data.matching,
    onclick: () => choose({ offset: String(Math.max(0, to)) }) }, text);
  const shown = `${formatNumber(Math.min(first + 1, data.matching))} to ${formatNumber(first + data.rows.length)} of ${formatNumber(data.matching)}`;
  holder.replaceChildren(
    ...(data.problems || []).map((problem) => element("p", { class: "problem small" }, problem)),
    element("p", { class: "quiet small" }, `Rows ${shown} that match; ${formatNumber(data.total)} in all. `,
      isReport ? "" : [element("kbd", {}, "/"), " filter, "], element("kbd", {}, "j"), " ", element("kbd", {}, "k"), " down and up, ", element("kbd", {}, "Enter"), " open."),
    data.rows.length
      ? buildTable(rowColumns(run, data.rows), data.rows, {
        link: (row) => linkRow(run, row),
        sorted: { field: sort, up: order === "up" },
        onsort: (field) => choose({ sort: field, order: sort === field && order !== "up" ? "up" : "" }),
      })
      : element("p", {}, data.total ? "No row matches." : "No shard is sealed yet."),
    isReport ? "" : element("p", { class: "filter", style: { display: "flex", gap: "8px", marginTop: "10px" } },
      turn("Newer", first - PAGE_ROWS), turn("Older", first + PAGE_ROWS)));
}

/** Return a comparison with a text; one with both kinds of quotes is compared by its longest part. */
function compareText(text) {
  if (!text.includes('"')) return `="${text}"`;
  if (!text.includes("'")) return `='${text}'`;
  return `~"${text.split('"').sort((a, b) => b.length - a.length)[0]}"`;
}

async function showTrajectory(main, query, go) {
  const { run, row: name, color = "logprob" } = query;
  const data = await fetchData("trajectory", { run, row: name });
  const fields = Object.entries(data.task_fields);
  const seconds = data.ended_at ? data.ended_at - data.started_at : null;
  const others = (title, rows) => rows.length > 1 || (rows.length && nameRow(rows[0]) !== name)
    ? element("details", { open: title === "The group" }, element("summary", {}, `${title}: ${rows.length} rows, reward ${describeRewards(rows)}`),
      listRelated(run, rows, name))
    : "";
  main.replaceChildren(
    element("h1", {}, `${data.set ? `Task ${data.set_task} of the evaluation set ${data.set}` : `Ticket ${data.ticket}`}, episode ${data.episode}: reward ${formatNumber(data.reward)}`),
    data.error ? element("section", {}, element("h2", {}, "Error"), element("div", { class: "message" }, element("pre", {}, data.error))) : "",
    element("h2", {}, "Conversation"),
    ...(data.messages.length ? data.messages.map(buildMessage) : [element("p", { class: "quiet" }, "The row has no messages.")]),
    fields.length ? element("section", {}, element("h2", {}, "The task"), element("div", { class: "panel" }, buildFacts(fields))) : "",
    data.tools.length ? element("details", {}, element("summary", {}, "Tools that it could call"),
      element("div", { class: "message" }, element("pre", {}, JSON.stringify(data.tools, null, 2)))) : "",
    element("div", { class: "panel" }, buildFacts([
      ["kind", data.kind], ["attempt", data.kind === "evaluation" ? "" : String(data.attempt)], ["task", data.task >= 0 ? String(data.task) : ""], ["cell", data.cell],
      ["seconds", seconds === null ? "" : formatSeconds(seconds)], ["temperature", formatNumber(data.temperature)],
      ["recorded in", element("span", { class: "mono" }, name)],
      ["in training", data.annotation ? describeOutcome(data.annotation) : ""],
      ["without effect", Object.entries(data.ignored).map(([key, count]) => `${key} (${count})`).join(", ")],
    ])),
    element("section", {}, others("The group", data.group), others("The same task at other times", data.task_rows)),
    element("h2", {}, "Tokens"),
    buildTokens(data.tokens, data.annotation, color, (to) => go("trajectory", { ...query, color: to })));
}

/** Show the conversations of several rows in columns. */
async function showSideBySide(main, { run, rows }) {
  const names = rows.split(",");
  const all = await Promise.all(names.map((row) => fetchData("trajectory", { run, row }).catch((error) => ({ missing: error.message }))));
  main.replaceChildren(element("h1", {}, "Side by side"), element("div", { class: "grid" }, all.map((data, index) =>
    data.missing ? element("p", { class: "problem" }, `${names[index]}: ${data.missing}`) : element("section", {},
      element("h2", {}, element("a", { href: buildHash("trajectory", { run, row: names[index] }) },
        `Ticket ${data.ticket}, episode ${data.episode}: reward ${formatNumber(data.reward)}`)),
      data.messages.map((message) => buildMessage(message)),
      element("div", { class: "panel" }, buildFacts(Object.entries(data.task_fields)))))));
}

/** List rows beside the shown row, which is marked. */
function listRelated(run, rows, own) {
  const table = buildTable(rowColumns(run, rows), rows, { link: (row) => linkRow(run, row) });
  table.classList.add("related");
  const at = rows.findIndex((row) => nameRow(row) === own);
  const marked = table.querySelectorAll("tbody tr")[at];
  if (marked) { marked.classList.add("own"); marked.setAttribute("aria-current", "true"); }
  return table;
}

function describeRewards(rows) {
  const rewards = rows.map((row) => row.reward);
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  return `${formatNumber(Math.min(...rewards))} to ${formatNumber(Math.max(...rewards))}, mean ${formatNumber(mean)}`;
}

function buildMessage(message, index) {
  const call = message.call;
  const facts = call ? [
    call.agent && `agent ${call.agent}`,
    call.seconds !== null && formatSeconds(call.seconds),
    `${formatNumber(call.reply_tokens)} tokens`,
    call.cached_tokens > 0 && `${formatNumber(call.cached_tokens)} of ${formatNumber(call.prompt_tokens)} prompt tokens cached`,
    call.finish && call.finish !== "stop" && call.finish,
    !call.trained && "not trained here",
  ].filter(Boolean) : [];
  const reward = call && call.reward;
  return element("article", { class: `message ${["assistant", "tool"].includes(message.role) ? message.role : ""}`, id: index === undefined ? null : `message-${index}` },
    element("header", {}, element("span", { class: "role" }, message.role, message.name ? ` ${message.name}` : ""),
      element("span", { class: "quiet small" }, facts.join(", "))),
    message.reasoning ? element("pre", { class: "reasoning" }, message.reasoning) : "",
    message.text ? element("pre", {}, message.text) : "",
    message.tool_calls.map((called) => element("pre", {}, `→ ${called}`)),
    reward ? element("pre", { class: "quiet" }, `= reward ${formatNumber(reward.value)}`
      + Object.entries({ ...reward.parts, ...reward.metrics }).map(([key, value]) => `, ${key} ${formatNumber(value)}`).join("")
      + (reward.note ? `\n${reward.note}` : "")) : "");
}

function describeOutcome({ step, outcome, advantage }) {
  return `${outcome}, in step ${step}` + (outcome === "trained" ? `, advantage ${formatNumber(advantage)}` : "");
}

/** Colors of tokens: `value` of a token, its `share` of the full color, and colors by sign. */
const TOKEN_COLORS = {
  logprob: { title: "log-probability", legend: "the redder, the less likely", value: (token) => token.logprob, share: (value) => -value / 5 },
  version: { title: "weight version" },
  trained: { title: "sampled or prompt" },
  entropy: { title: "entropy", annotated: true, legend: "the redder, the more undecided (3 nats and more are full)", value: (token) => token.entropy, share: (value) => value / 3 },
  advantage: { title: "advantage", annotated: true, legend: "green is to become likelier, red less likely (2 is full)", value: (token) => token.advantage, share: (value) => value / 2, isSigned: true },
  ratio: { title: "ratio", annotated: true, legend: "of trained to proximal policy: green above 1, red below (a factor of 1.5 is full)", value: (token) => token.ratio, share: (value) => Math.log(value) / Math.log(1.5), isSigned: true },
  mismatch: { title: "mismatch", annotated: true, legend: "the trainer's log-probability less the engine's: green above, red below (0.5 nats are full)", value: (token) => token.mismatch, share: (value) => value / 0.5, isSigned: true },
  mask: { title: "mask", annotated: true, legend: "colored is what did not teach, or not fully" },
};
const REASON_COLORS = { "cut reply": "--warn", "untrainable reply": "--series-4", "weight out of bounds": "--bad", clipped: "--series-2" };

/** List the recorded and annotated values of each token, as objects. */
function listTokens(tokens, annotation) {
  const pick = (name, index) => annotation ? annotation[name][index] : null;
  return tokens.ids.map((id, index) => {
    const trainer = pick("logprobs", index);
    return { id, index, text: tokens.texts ? tokens.texts[index] : `${id} `, isSampled: tokens.mask[index] === 1,
      logprob: tokens.logprobs[index], version: tokens.versions[index], trainer,
      entropy: pick("entropies", index), advantage: pick("advantages", index), ratio: pick("ratios", index),
      mismatch: trainer === null ? null : trainer - tokens.logprobs[index], reason: pick("reasons", index) };
  });
}

function describeToken(token) {
  if (!token.isSampled) return `${token.index}: id ${token.id}, prompt`;
  const known = [["trainer", token.trainer], ["entropy", token.entropy], ["advantage", token.advantage], ["ratio", token.ratio]]
    .filter(([, value]) => value !== null).map(([name, value]) => `, ${name} ${value.toFixed(4)}`).join("");
  return `${token.index}: id ${token.id}, log-probability ${token.logprob.toFixed(4)} (${(100 * Math.exp(token.logprob)).toFixed(1)} %), weights ${token.version}${known}${token.reason ? `, ${token.reason}` : ""}`;
}

function buildTokens(tokens, annotation, color, choose) {
  const chosen = TOKEN_COLORS[color] && (annotation || !TOKEN_COLORS[color].annotated) ? color : "logprob";
  const versions = [...new Set(tokens.versions.filter(Boolean))];
  const holder = element("div", { class: "tokens panel", tabindex: "0", role: "group", "aria-label": "tokens" });
  const known = listTokens(tokens, annotation);
  const chunks = fillOnSight(holder, known, (token) => {
    const piece = document.createElement("span");
    piece.textContent = token.text;
    if (!token.isSampled) piece.className = "prompt";
    else piece.style.background = pickTokenColor(chosen, token, versions.indexOf(token.version));
    return piece;
  });
  const status = describeOnDemand(holder, chunks, known);
  const sampled = tokens.mask.filter((item) => item === 1).length;
  const offered = Object.entries(TOKEN_COLORS).filter(([, item]) => annotation || !item.annotated);
  return element("div", {},
    element("div", { class: "chips" }, element("span", { class: "quiet" }, "color:"), offered.map(([key, { title }]) =>
      element("button", { type: "button", class: "plain", "aria-pressed": String(key === chosen), onclick: () => choose(key) }, title))),
    element("p", { class: "quiet small" }, `${formatNumber(tokens.ids.length)} tokens, ${formatNumber(sampled)} sampled by the model`
      + (tokens.texts ? "" : "; shown as ids: the tokenizer is not on this machine")
      + (TOKEN_COLORS[chosen].legend ? `; ${TOKEN_COLORS[chosen].legend}` : "")),
    chosen === "mask" ? element("p", { class: "legend" }, Object.entries(REASON_COLORS).map(([reason, variable]) =>
      element("span", {}, element("i", { style: { background: `var(${variable})` } }), reason))) : "",
    status, holder);
}

/** Insert the text of all tokens; a chunk of it gets an element per token when it comes into sight. */
function fillOnSight(parent, tokens, build) {
  const chunks = [];
  for (let start = 0; start < tokens.length; start += CHUNK_TOKENS) {
    const part = tokens.slice(start, start + CHUNK_TOKENS);
    const holder = element("span", {}, part.map((token) => token.text).join(""));
    const chunk = { start, holder, pieces: null, fill: () => {
      if (chunk.pieces) return;
      chunk.pieces = part.map(build);
      holder.replaceChildren(...chunk.pieces);
    } };
    chunks.push(chunk);
  }
  const sight = new IntersectionObserver((seen) => seen.filter((entry) => entry.isIntersecting).forEach((entry) => {
    chunks.find((chunk) => chunk.holder === entry.target).fill();
    sight.unobserve(entry.target);
  }), { rootMargin: "800px" });
  chunks[0]?.fill();
  for (const chunk of chunks.slice(1)) sight.observe(chunk.holder);
  parent.append(...chunks.map((chunk) => chunk.holder));
  return chunks;
}

/** Make a line that describes the token under the pointer, or chosen with the arrow keys. */
function describeOnDemand(parent, chunks, tokens) {
  const status = element("p", { class: "status-line quiet small", role: "status" }, "Point at a token, or choose one with the arrow keys.");
  let at = -1;
  let marked = null;
  const choose = (index) => {
    if (!(index in tokens)) return;
    const chunk = chunks[Math.floor(index / CHUNK_TOKENS)];
    chunk.fill();
    marked?.classList.remove("chosen");
    at = index;
    marked = chunk.pieces[index - chunk.start];
    marked.classList.add("chosen");
    status.textContent = describeToken(tokens[at]);
  };
  parent.addEventListener("pointerover", (event) => {
    const chunk = chunks.find((item) => item.holder === event.target.parentElement);
    if (chunk) choose(chunk.start + chunk.pieces.indexOf(event.target));
  });
  parent.addEventListener("keydown", (event) => {
    const targets = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 };
    if (!(event.key in targets)) return;
    event.preventDefault();
    choose(targets[event.key]);
    marked?.scrollIntoView({ block: "nearest" });
  });
  return status;
}

function pickTokenColor(color, token, version) {
  if (color === "version") return `color-mix(in srgb, var(--series-${(version % 5) + 1}) 30%, transparent)`;
  if (color === "trained") return "color-mix(in srgb, var(--accent) 25%, transparent)";
  if (color === "mask") return token.reason ? `color-mix(in srgb, var(${REASON_COLORS[token.reason] || "--bad"}) 45%, transparent)` : "";
  const { value, share, isSigned } = TOKEN_COLORS[color];
  const number = value(token);
  if (number === null) return "";
  const strength = Math.min(1, Math.abs(share(number)));
  const variable = isSigned && number > (color === "ratio" ? 1 : 0) ? "--good" : "--bad";
  return `color-mix(in srgb, var(${variable}) ${Math.round((isSigned ? 0 : 5) + 60 * strength)}%, transparent)`;
}
