// One run: gauges, charts that share an x axis, the round in focus with its G curve, nodes and settings.
//
// The round in focus is the last one until the user selects another with the pointer, the slider or the arrow keys.

import { ago, choose, clock, duration, el, fraction, number, percent, state, table } from "./dom.js";
import * as charts from "./charts.js";
import { clear, position } from "./plot.js";

const MANY = 2500; // rows in the page; beyond it, the page requests thinned rows
const CALM = 1000; // milliseconds between two drawings of a live run
const CLEARLY_OVER = 1.01; // share of a budget; the last round may exceed it by a little
const LISTED = 12; // nodes shown at first

export function runView(source, view, { headed = true, alone = true, open = false } = {}) {
  const at = {
    key: view.resources[0].name, cost: view.resources[0].name, range: null, zoomed: null, focus: 0, follows: true, lossAxis: "auto",
    label() { return charts.axes(view.resources).find(([key]) => key === this.key)[1]; },
  };
  const page = el("article", { class: "run" });
  const head = el("div");
  const tiles = el("div", { class: "cards tiles" });
  const gauges = el("section", { class: "cards", "aria-label": "Budget" });
  const nodes = el("section", { class: "card", "aria-label": "Nodes" });
  const notice = el("p", { class: "note", role: "status" });

  // Charts, drawn over several frames so that the page stays responsive.
  const plots = [];
  const waiting = new Map();
  let frame = 0;
  function plot(title, make, { kind = "half", shared = true, extra = null, after = null, name = "" } = {}) {
    const element = el("div", { class: "plot", role: "img", "aria-label": title, "data-chart": name });
    const line = el("div", { class: "here", hidden: true });
    const holder = el("div", { class: "plot-holder" }, element);
    const card = el("section", { class: `card ${kind}` }, el("header", {}, el(kind === "small" ? "h3" : "h2", {}, title), extra), holder, after);
    const own = { element, line, make, shared, card, drawn: false };
    plots.push(own);
    return card;
  }
  function queue(these = plots) {
    for (const each of these) waiting.set(each, true);
    if (!frame) frame = requestAnimationFrame(work);
  }
  function work() {
    frame = 0;
    const began = performance.now();
    for (const each of [...waiting.keys()]) {
      waiting.delete(each);
      paint(each);
      if (performance.now() - began > 25) break;
    }
    if (waiting.size) frame = requestAnimationFrame(work);
    else page.dataset.drawn = String(view.columns.round.length);
  }
  function paint(each) {
    if (!each.element.isConnected) return;
    const figure = each.make(at.zoomed || view.columns);
    if (!figure) return;
    each.drawn = charts.draw(each.element, figure, each.shared ? { label: at.label(), range: at.range || whole(), on: { focus: focusOn, zoom } } : {});
    if (each.drawn && each.shared) { each.element.append(each.line); mark(each); }
  }
  function whole() {
    const x = charts.xOf(view.columns, at.key);
    return [0, 1.02 * Math.max(x[x.length - 1] || 0, 1e-9)];
  }
  function mark(each) {
    const columns = at.zoomed || view.columns;
    const row = nearest(columns.round, at.focus);
    const place = row < 0 ? null : position(each.element, between(columns, at.key, at.focus, row));
    each.line.hidden = place === null;
    for (const [name, pixels] of Object.entries(place || {})) each.line.style[name] = `${pixels}px`;
  }

  // Zoom: the same range in all charts, with every round of it if there are not too many.
  async function zoom(range) {
    at.range = range;
    at.zoomed = null;
    again.disabled = range === null;
    if (range !== null) {
      const x = charts.xOf(view.columns, at.key), rounds = view.columns.round;
      let first = 0, last = x.length - 1;
      while (first < last && x[first + 1] < range[0]) first++;
      while (last > first && x[last - 1] > range[1]) last--;
      const rows = await source.rows(rounds[first], rounds[last]);
      if (at.range !== range) return;
      at.zoomed = rows.columns;
    }
    queue(plots.filter((each) => each.shared));
  }

  // The round in focus.
  const words = el("p", { class: "words", "aria-live": "polite" });
  const slider = el("input", { type: "range", min: 1, max: Math.max(1, view.rounds), step: 1, "aria-label": "Round in focus", oninput: () => focusOn(Number(slider.value)) });
  const latest = el("button", { type: "button", onclick: () => { at.follows = true; focusOn(latestRound(view), true); } }, "Latest");
  const previous = el("button", { type: "button", "aria-label": "Previous round", onclick: () => focusOn(at.focus - 1) }, "←");
  const next = el("button", { type: "button", "aria-label": "Next round", onclick: () => focusOn(at.focus + 1) }, "→");
  let choice = null, asking = 0;
  async function focusOn(round, following = false) {
    round = Math.min(Math.max(1, round), view.rounds);
    if (!following) at.follows = round >= latestRound(view);
    if (round < 1 || (round === at.focus && choice && choice.record.round === round)) return;
    at.focus = round;
    slider.value = round;
    plots.filter((each) => each.shared && each.drawn).forEach(mark);
    const turn = ++asking;
    const answer = await source.choice(round).catch(() => null);
    if (turn !== asking || !answer) return;
    choice = answer;
    tell();
    queue([bend]);
  }
  function tell() {
    const { record, spent } = choice;
    const what = record.tau > 0 ? `τ = ${record.tau}` : "no update";
    const rest = [`loss ${number(record.loss)}`, record.accuracy === null ? null : `accuracy ${fraction(record.accuracy)}`,
      Object.entries(spent).map(([name, text]) => `${name} ${text}`).join(", "), choice.missed ? `${choice.missed} nodes missing` : null];
    const sentence = choice.sentence.replace(/^[a-z]/, (letter) => letter.toUpperCase()); // not τ, which would become a T
    words.replaceChildren(el("strong", {}, `Round ${record.round}: ${what}, ${record.reason}. `), `${sentence}. `,
      el("span", { class: "muted" }, rest.filter(Boolean).join(" · ")));
    words.dataset.round = record.round;
    words.setAttribute("aria-live", at.follows ? "off" : "polite"); // a screen reader would read every round of a live run
    slider.setAttribute("aria-valuetext", `round ${record.round}, ${what}, ${record.reason}`);
  }
  function keys(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || ((Math.abs(step) > 1 || !alone) && !page.contains(event.target))) return;
    event.preventDefault();
    focusOn(at.focus + step);
  }

  // All charts.
  const small = (title, of, colour, name) => plot(title, (columns) => charts.single(columns, at.key, of(columns), colour), { kind: "small", name });
  const cost = view.resources.length < 2 ? null : choose("Costs of", view.resources.map(({ name }) => [name, name]), at.cost, (name) => { at.cost = name; queue(); });
  const sites = () => view.summary?.site_report;
  const personal = view.settings.personal === "True" || sites();
  const grid = el("div", { class: "charts" },
    plot("Loss on the round's samples, and on validation samples", (columns) => charts.loss(columns, at.key, at.lossAxis), {
      name: "loss", extra: choose("Axis", [["auto", "auto"], ["log", "log"], ["linear", "linear"]], "auto", (axis) => { at.lossAxis = axis; queue(); }),
    }),
    plot(`${charts.isReal(view.columns) ? "RMSE" : "Accuracy"} on test samples`, (columns) => charts.accuracy(columns, at.key), { name: "accuracy" }),
    plot("Local updates per round (τ), and the reason", (columns) => charts.chosen(columns, at.key), { kind: "half wide", name: "tau" }),
    plot("Why this τ, in the round in focus", () => choice && charts.curve(choice), {
      kind: "half side", shared: false, name: "G",
      after: el("div", {}, words, el("div", { class: "round-controls" }, previous, slider, next, latest)),
    }),
    plot("Budget spent", (columns) => charts.shares(columns, at.key, view.resources), { kind: "half", name: "spent" }),
    el("section", { class: "card half" }, el("header", {}, el("h2", {}, "Nodes")), nodes),
    small("ρ̂, Lipschitz", (columns) => columns.rho, "c1", "rho"),
    small("β̂, smoothness", (columns) => columns.beta, "c2", "beta"),
    small("δ̂, divergence", (columns) => columns.delta, "c3", "delta"),
    small("η, step size", (columns) => columns.eta, "c4", "eta"),
    small("ĉ, cost of an update", (columns) => columns.c[at.cost] || [], "c1", "c"),
    small("b̂, cost of an aggregation", (columns) => columns.b[at.cost] || [], "c2", "b"),
    personal ? plot("Sites: trivial, alone, global and personal model", () => charts.sites(sites() || {}), { kind: "half wide", shared: false, name: "sites" }) : null,
  );
  nodes.classList.remove("card");
  const bend = plots.find((each) => !each.shared);

  const again = el("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Whole run");
  const controls = el("div", { class: "bar-of-controls" },
    choose("X axis", charts.axes(view.resources), at.key, (key) => { at.key = key; zoom(null); }),
    cost, again, el("span", { class: "note" }, "Drag in a chart to zoom. ← and → change the round."), notice);
  const settings = el("details", { class: "card settings", open }, el("summary", {}, "Settings"),
    el("dl", {}, ...Object.entries(view.settings).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  page.append(head, tiles, gauges, controls, grid, settings);

  // Parts that change during the run.
  function show() {
    head.replaceChildren(...(headed ? [el("h1", {}, view.name), el("p", { class: "sub" }, view.title, " · ", state(view.state))] : []),
      el("p", { class: "lead" }, view.paragraph));
    const tile = (name, text, note, label) => el("section", { class: "card", "data-tile": label }, el("h3", { class: "muted" }, name), el("div", { class: "figure" }, text), el("div", { class: "note" }, note));
    tiles.replaceChildren(
      tile("Loss", number(view.loss), view.columns.loss.length ? `from ${number(view.columns.loss[0])}` : "", "loss"),
      ...(view.validation === null ? [] : [tile("Validation loss", number(view.validation), validationStart(view), "validation")]),
      ...(view.forecast ? [forecastTile(view.forecast, tile)] : []),
      ...(view.accuracy === null ? [] : [tile("Accuracy", fraction(view.accuracy), toBeat(view), "accuracy")]),
      ...view.metrics.map((each) => tile(each.label, each.text, each.note, each.name)),
      tile("Rounds", number(view.rounds), view.summary ? `${view.summary.stopped_by === "interrupted" ? "interrupted" : `ended by ${view.summary.stopped_by}`}` : `last ${ago(view.written)}`, "rounds"),
      tile("Average τ", view.average_tau === null ? "–" : view.average_tau.toFixed(1), "local updates per aggregation", "tau"));
    gauges.replaceChildren(...view.gauges.map(gauge));
    nodes.replaceChildren(nodesTable(view.nodes, view, nodes.querySelector("details")?.open));
    slider.max = Math.max(1, view.rounds);
    page.dataset.state = view.state;
    page.dataset.rounds = view.rounds;
  }
  function begin() {
    show();
    queue();
    if (view.rounds > 0) focusOn(latestRound(view), true);
    document.addEventListener("keydown", keys);
  }

  let stop = () => {}, turn = Promise.resolve();
  async function take({ columns, ...rest }) {
    const fresh = append(view.columns, columns, view.columns.round.at(-1) ?? 0);
    Object.assign(view, rest);
    if (view.summary || view.columns.round.length > MANY) Object.assign(view, await source.view().catch(() => ({})));
    notice.textContent = view.summary ? "The run has ended." : "";
    show();
    if (!fresh && !view.summary) return;
    later();
    if (at.follows) focusOn(latestRound(view), true);
  }
  // Charts of a live run are redrawn at most once a second; figures and gauges change at once.
  let timer = 0, last = -Infinity;
  function later() {
    timer ||= setTimeout(() => {
      timer = 0;
      last = performance.now();
      if (at.range === null) queue(plots.filter((each) => each.shared));
    }, Math.max(0, CALM - (performance.now() - last)));
  }
  function follow() {
    if (!source.follow || view.summary) return;
    stop = source.follow(view.rounds, {
      trouble: (is) => { notice.textContent = is ? "The connection is lost; reconnecting." : ""; },
      reset: async () => { view = await source.view(); show(); queue(); follow(); },
      // In order: the next event may arrive while the whole run is requested again.
      news: (news) => { turn = turn.then(() => take(news)); },
    });
  }
  return {
    page,
    show, // all but the charts
    begin() { begin(); follow(); },
    redraw: () => queue(),
    end() { stop(); clearTimeout(timer); document.removeEventListener("keydown", keys); for (const each of plots) clear(each.element); },
  };
}

function validationStart({ columns }) {
  const first = columns.validation.find((value) => value !== null);
  return first === undefined ? "" : `from ${number(first)}`;
}

// The forecast of the loss with its interval, or the reason why there is none.
function forecastTile({ ended, chance, median, low, high, reason, validated }, tile) {
  const name = `${validated ? "Validation loss" : "Loss"} ${ended ? "with 50 % more budget" : "at the end"}`;
  if (median === undefined) return tile(name, "–", `unknown: ${reason}`, "forecast");
  return tile(name, number(median), `${number(low)} to ${number(high)}, ${Math.round(100 * chance)} % interval`, "forecast");
}

// The last round that chose a τ: the one after it only evaluates the loss.
function latestRound(view) {
  const { tau, round } = view.columns;
  for (let row = tau.length - 1; row >= 0; row--) if (tau[row] > 0) return round[row];
  return view.rounds;
}

function gauge(given) {
  const share = Math.min(1, given.share);
  const until = given.until === null ? null : `at this pace until ${clock(given.until)} (${duration(Math.max(0, given.until - Date.now() / 1000))})`;
  const note = given.over ? `${given.over} over` : `${given.left} left`;
  return el("section", { class: `card gauge${given.share > CLEARLY_OVER ? " over" : ""}`, "data-gauge": given.name },
    el("header", {}, el("h2", {}, given.name), el("span", { class: "amount" }, given.text)),
    el("div", { class: "track", role: "meter", "aria-label": `${given.name} spent`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share), "aria-valuetext": given.text },
      el("div", { class: "filled", style: `width: ${(100 * share).toFixed(2)}%` })),
    el("div", { class: "note" }, [`${(100 * given.share).toFixed(1)}% spent`, note, given.source, until].filter(Boolean).join(" · ")));
}

function nodesTable(status, view, open) {
  if (!status || status.count === 0) return el("p", { class: "note" }, "This run has no list of its nodes.");
  const { samples } = status;
  const about = `${number(status.count)} nodes with ${number(samples.total)} samples: ${number(samples.smallest)} to ${number(samples.largest)} each, median ${number(samples.median)}.`;
  if (status.nodes.length === 0) return el("p", {}, about);
  const remote = status.nodes.some((node) => node.last_seen !== null);
  const time = view.columns.c.time;
  const simulated = time && time.length ? time[time.length - 1] : null;
  const cost = (seconds) => (seconds === null || seconds === undefined ? "–" : 1000 * seconds < 0.001 ? "below 0.001 ms" : `${number(1000 * seconds, 3)} ms`);
  const shares = status.nodes.some((node) => node.updates);
  const idle = (share) => (share === null || share === undefined ? "–" : percent(share));
  const rows = status.nodes.map((node) => [
    node.name, number(node.samples), cost(node.step_seconds ?? (simulated && node.speed ? simulated / node.speed : simulated)),
    ...(shares ? [node.updates ? number(node.updates) : "–", idle(node.idle), idle(node.idle_equal)] : []),
    ...(remote ? [node.last_seen === null ? "never" : view.summary ? clock(node.last_seen) : ago(node.last_seen), number(node.missed), ...(view.summary ? [] : [node.state || ""])] : [])]);
  const headings = ["node", "#samples", "#per update", ...(shares ? ["#updates", "#idle", "#idle at equal τ"] : []), ...(remote ? ["#last seen", "#missed", ...(view.summary ? [] : ["now"])] : [])];
  const listed = el("div", { class: "scroll" }, table("", headings, rows.slice(0, LISTED)));
  const more = rows.length <= LISTED ? null : el("details", { open }, el("summary", {}, `${rows.length - LISTED} more`), el("div", { class: "scroll" }, table("", headings, rows.slice(LISTED))));
  const without = view.excluded.length === 0 ? null : el("p", { class: "warning" }, `Losses do not count of: ${view.excluded.join(", ")}. They contradicted those of the other nodes.`);
  return el("div", {}, without, el("p", { class: "note" }, about, remote ? "" : " They are simulated; the cost of an update is that of the last round."), listed, more);
}

// Appends rows after a round; returns their number.
function append(columns, more, after) {
  const rows = more.round.map((round, row) => row).filter((row) => more.round[row] > after);
  const add = (to, from) => {
    for (const [name, values] of Object.entries(from)) {
      if (Array.isArray(values)) (to[name] ??= []).push(...rows.map((row) => values[row]));
      else add((to[name] ??= {}), values);
    }
  };
  add(columns, more);
  return rows.length;
}

// The last row whose round is at most this one.
function nearest(rounds, round) {
  let low = 0, high = rounds.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rounds[middle] <= round) low = middle; else high = middle - 1;
  }
  return high < 0 ? -1 : low;
}

// The x of a round that is not drawn, interpolated between its neighbours.
function between(columns, key, round, row) {
  const x = charts.xOf(columns, key), rounds = columns.round;
  if (rounds[row] >= round || row + 1 >= rounds.length) return x[row];
  return x[row] + ((round - rounds[row]) / (rounds[row + 1] - rounds[row])) * (x[row + 1] - x[row]);
}

// The note below the accuracy, with the accuracy of always predicting the majority class.
function toBeat(view) {
  const majority = view.summary?.to_beat?.accuracy;
  return majority === undefined ? "on test samples" : `on test samples; majority class ${fraction(majority)}`;
}
