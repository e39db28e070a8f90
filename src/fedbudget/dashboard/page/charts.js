// The charts of the page and the report, drawn by plot.js from columns.
//
// A chart is a function from columns and an x axis to traces and a layout. Every difference in colour is also a
// difference in the shape of a marker or in the dashes of a line.

import { fraction, percent } from "./dom.js";
import { clear, plot, short } from "./plot.js";
import { colours } from "./theme.js";

export const REASONS = {
  "start": { symbol: "circle-open", colour: "c5" },
  "minimum of G": { symbol: "circle", colour: "c1" },
  "aggregation cost": { symbol: "circle", colour: "c1" },
  "search limit": { symbol: "triangle-up", colour: "c2" },
  "round limit": { symbol: "triangle-up", colour: "c3" },
  "budget": { symbol: "square", colour: "c4" },
  "remaining rounds": { symbol: "triangle-down", colour: "c2" },
  "rest of the budget": { symbol: "hexagon", colour: "c4" },
  "privacy plan": { symbol: "circle", colour: "c3" },
  "update norms": { symbol: "circle-open", colour: "c4" },
  "Newton step": { symbol: "diamond", colour: "c3" },
  "ridge": { symbol: "diamond-open", colour: "c3" },
  "fixed": { symbol: "diamond", colour: "c1" },
  "recovery": { symbol: "x", colour: "c2" },
};
const OWN_REASONS = ["star", "cross", "square", "diamond"]; // in turn, for reasons of custom controllers
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const COLOURS = ["c1", "c2", "c3", "c4", "c5"];
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "x", "star"];

// Choices of the x axis: [key, label].
export function axes(resources) {
  const unit = (resource) => (resource.unit ? ` (${resource.unit})` : "");
  return [
    ...resources.map((resource) => [resource.name, `${resource.name} spent${unit(resource)}`]),
    ["round", "round"],
    ["wall", "wall clock (s)"],
  ];
}

export function xOf(columns, key) {
  if (key === "round" || key === "wall") return columns[key];
  return columns.spent[key] || columns.round;
}

const shown = (name, text) => (name ? `${name}: ${text}` : text);

function line(columns, key, y, name, colour, dash, more = {}) {
  const look = { mode: "lines", line: { color: colour, width: 2, dash }, tip: (at, value) => shown(name, short(value)) };
  return { ...look, x: xOf(columns, key), y, name, rounds: columns.round, ...more };
}

// A log axis, if the values need one: they are positive and differ by a factor of ten.
export function needsLog(values) {
  const known = values.filter((value) => value !== null);
  return known.length > 0 && known.every((value) => value > 0) && known.reduce((most, value) => Math.max(most, value)) > 10 * known.reduce((least, value) => Math.min(least, value));
}

export function loss(columns, key, axis = "auto") {
  const c = colours();
  const log = axis === "auto" ? needsLog([...columns.loss, ...columns.best_loss, ...columns.validation]) : axis === "log";
  const validated = columns.validation.some((value) => value !== null);
  // Not every round validates.
  const validation = (y, name, dash) => line(columns, key, y, name, c.c3, dash, { connectgaps: true });
  return {
    traces: [
      line(columns, key, columns.loss, "training, latest parameters", c.c1, "solid"),
      line(columns, key, columns.best_loss, "training, best parameters so far", c.c2, "dash"),
      ...(validated ? [validation(columns.validation, "validation", "dot"), validation(columns.validation_best, "validation, lowest so far", "solid")] : []),
    ],
    layout: { showlegend: true, yaxis: { type: log ? "log" : "linear" } },
  };
}

// Whether targets are real numbers, with an error instead of an accuracy.
export function isReal(columns) {
  return columns.accuracy.every((value) => value === null) && columns.rmse.some((value) => value !== null);
}

// Accuracy on test samples; RMSE for real targets.
export function accuracy(columns, key) {
  const c = colours();
  const real = isReal(columns);
  const values = real ? columns.rmse : columns.accuracy;
  const kept = values.map((value, at) => at).filter((at) => values[at] !== null);
  const x = xOf(columns, key);
  return {
    traces: kept.length === 0 ? [] : [{
      mode: "lines+markers", x: kept.map((at) => x[at]), y: kept.map((at) => values[at]), rounds: kept.map((at) => columns.round[at]),
      name: real ? "RMSE" : "accuracy", tip: (at, value) => (real ? short(value) : fraction(value)),
      line: { color: c.c3, width: 2 }, marker: { size: 5, color: c.c3 },
    }],
    layout: {},
    empty: "this model or data has no accuracy",
  };
}

export function chosen(columns, key) {
  const c = colours();
  const x = xOf(columns, key);
  const made = columns.tau.map((tau, at) => at).filter((at) => columns.tau[at] > 0);
  const traces = [{
    mode: "lines", x: made.map((at) => x[at]), y: made.map((at) => columns.tau[at]), line: { color: c.c5, width: 1, shape: "hv" }, showlegend: false,
  }];
  const present = new Set(made.map((at) => columns.reason[at]));
  const own = [...present].filter((reason) => !Object.hasOwn(REASONS, reason)).map((reason, at) => [reason, { symbol: OWN_REASONS[at % OWN_REASONS.length], colour: "c3" }]);
  for (const [reason, { symbol, colour }] of [...Object.entries(REASONS).filter(([reason]) => present.has(reason)), ...own]) {
    const those = made.filter((at) => columns.reason[at] === reason);
    traces.push({
      mode: "markers", name: reason, x: those.map((at) => x[at]), y: those.map((at) => columns.tau[at]), rounds: those.map((at) => columns.round[at]),
      marker: { symbol, color: c[colour], size: those.length > 400 ? 5 : 7 }, tip: (at, tau) => `τ = ${tau}, ${reason}`,
    });
  }
  return { traces, layout: { showlegend: true, yaxis: { rangemode: "tozero" } } };
}

export function shares(columns, key, resources) {
  const c = colours();
  return {
    traces: resources.map((resource, at) =>
      line(columns, key, (columns.spent[resource.name] || []).map((spent) => spent / resource.limit), resource.name,
        c[COLOURS[at % COLOURS.length]], DASHES[at % DASHES.length], { tip: (x, share) => `${resource.name}: ${percent(share)}` })),
    layout: { showlegend: true, yaxis: { format: (share) => `${Math.round(100 * share)}%`, rangemode: "tozero", include: [1] }, lines: [1] },
  };
}

// A small chart with a single curve.
export function single(columns, key, y, colour) {
  const known = y.some((value) => value !== null);
  return {
    traces: known ? [line(columns, key, y, "", colours()[colour], "solid", { line: { color: colours()[colour], width: 1.5 } })] : [],
    layout: { yaxis: { rangemode: "tozero" }, xaxis: { title: "" } },
    empty: "not estimated",
  };
}

// What the controller minimised, against τ: the bound G, or the budget that an effective update costs.
export function curve(choice) {
  const c = colours();
  const costs = choice.quantity !== "G(τ)";
  const finite = choice.curve.filter((value) => value !== null && value > 0);
  const low = Math.min(...finite), high = Math.max(...finite);
  const values = costs ? choice.curve.map((value) => value / low) : choice.curve;
  const at = (tau) => choice.candidates.indexOf(tau);
  const mark = (tau, name, symbol, colour, size) => at(tau) < 0 ? [] : [{
    mode: "markers", x: [tau], y: [values[at(tau)]], name, marker: { symbol, size, color: c[colour] }, tip: () => `${name}: τ = ${tau}`,
  }];
  // G soon becomes very large; show the part around its minimum and around the chosen τ.
  const top = Math.max(Math.min(high, 300 * low), choice.curve[at(choice.record.tau)] ?? 0);
  let upright = costs ? { rangemode: "tozero" } : {};
  if (!costs && high / low > 20) upright = { type: "log", range: [low / 1.6, 1.25 * top] };
  const last = choice.candidates[choice.candidates.length - 1];
  return {
    traces: finite.length === 0 ? [] : [
      { mode: "lines", x: choice.candidates, y: values, name: costs ? `${choice.quantity}, relative to the smallest` : choice.quantity, line: { color: c.c1, width: 2 }, tip: (tau, value) => `τ = ${tau}: ${short(value)}` },
      ...mark(choice.minimum, "smallest", "circle-open", "c3", 13),
      ...mark(choice.record.tau, "chosen τ", "diamond", "c2", 10),
    ],
    layout: { showlegend: true, yaxis: upright, xaxis: { title: "local updates per round (τ)", ...(last > 30 ? { type: "log" } : {}) } },
    empty: choice.record.round === 1 ? "round 1 was chosen from a trial round, which is not recorded" : `${choice.record.reason}: no curve`,
  };
}

// Several runs in one chart; each has its own colour, dashes and markers.
const MOST_SITES = 40;

// The figures of each site with one standard error, the least gain first.
export function sites(report) {
  const c = colours();
  const gain = ([, site]) => site.gain?.value ?? 0;
  const entries = Object.entries(report).sort((one, other) => gain(one) - gain(other));
  const half = MOST_SITES / 2;
  const listed = entries.length > MOST_SITES ? [...entries.slice(0, half), ...entries.slice(-half)] : entries;
  const models = [["trivial", "trivial", c.muted], ["alone", "alone", c.c3], ["shared", "global", c.c1], ["personal", "personal", c.c2]];
  const traces = models.map(([key, name, color]) => {
    const known = listed.filter(([, site]) => site[key]);
    return {
      name, mode: "markers", x: known.map(([site]) => site), y: known.map(([, site]) => site[key].value), marker: { color, size: 8 },
      error: known.map(([, site]) => site[key].error),
    };
  }).filter((trace) => trace.x.length);
  const metric = entries.length ? entries[0][1].metric : "";
  return {
    traces, empty: "known when the run has ended",
    layout: { showlegend: true, xaxis: { type: "category", title: metric } },
  };
}

export function compared(runs, key, what) {
  const c = colours();
  return {
    traces: runs.map((run, at) => {
      const x = xOf(run.columns, key);
      const kept = run.columns[what].map((value, row) => row).filter((row) => run.columns[what][row] !== null);
      return {
        mode: "lines+markers", name: run.name, x: kept.map((row) => x[row]), y: kept.map((row) => run.columns[what][row]),
        line: { color: c[COLOURS[at % COLOURS.length]], dash: DASHES[at % DASHES.length], width: 2 },
        marker: { symbol: SYMBOLS[at % SYMBOLS.length], size: 8, most: 14, color: c[COLOURS[at % COLOURS.length]] },
        tip: (at, value) => `${run.name}: ${what === "accuracy" ? fraction(value) : short(value)}`,
      };
    }),
    layout: { showlegend: true, xaxis: { rangemode: "tozero" }, yaxis: what === "accuracy" ? {} : { type: what !== "tau" && needsLog(runs.flatMap((run) => run.columns[what])) ? "log" : "linear" } },
    empty: "nothing to compare",
  };
}

// Draws a chart, or shows why there is nothing to draw.
export function draw(element, figure, { label = "", range = null, on = {} } = {}) {
  if (figure.traces.length === 0) {
    clear(element);
    element.classList.add("empty");
    element.textContent = figure.empty || "no data yet";
    return false;
  }
  if (element.classList.contains("empty")) {
    element.classList.remove("empty");
    element.textContent = "";
  }
  const own = figure.layout || {};
  const touch = matchMedia("(pointer: coarse)").matches;
  plot(element, figure.traces, { ...own, colours: colours(), touch, on, xaxis: { title: label, ...(range ? { range } : {}), ...own.xaxis } });
  return true;
}
