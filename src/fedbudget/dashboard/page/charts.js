// The charts of the page and the report, drawn by plotly.js from columns.
//
// A chart is a function from columns and an x axis to traces and a layout. Every difference in colour is also a
// difference in the shape of a marker or in the dashes of a line.

import { colours } from "./theme.js";

export const REASONS = {
  "start": { symbol: "circle-open", colour: "c5" },
  "minimum of G": { symbol: "circle", colour: "c1" },
  "search limit": { symbol: "triangle-up", colour: "c2" },
  "budget": { symbol: "square", colour: "c4" },
  "fixed": { symbol: "diamond", colour: "c1" },
  "recovery": { symbol: "x", colour: "c2" },
};
const OWN_REASONS = ["star", "hexagon", "cross", "triangle-down"]; // in turn, for reasons of custom controllers
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

// Escapes text of a run's files: Plotly interprets some HTML, and values between braces.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "%&#123;");
}

function line(columns, key, y, name, colour, dash, more = {}) {
  const shown = { type: "scatter", mode: "lines", hovertemplate: "%{y:.4g}", line: { color: colour, width: 2, dash } };
  return { ...shown, x: xOf(columns, key), y, name, customdata: columns.round, ...more };
}

export function loss(columns, key) {
  const c = colours();
  return {
    traces: [
      line(columns, key, columns.loss, "latest parameters", c.c1, "solid"),
      line(columns, key, columns.best_loss, "best parameters so far", c.c2, "dash"),
    ],
    layout: { showlegend: true },
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
      type: "scatter", mode: "lines+markers", x: kept.map((at) => x[at]), y: kept.map((at) => values[at]),
      customdata: kept.map((at) => columns.round[at]), name: real ? "RMSE" : "accuracy", hovertemplate: real ? "%{y:.4g}" : "%{y:.2%}",
      line: { color: c.c3, width: 2 }, marker: { size: 5 },
    }],
    layout: { yaxis: real ? {} : { tickformat: ".0%" } },
    empty: "this model or data has no accuracy",
  };
}

export function chosen(columns, key) {
  const c = colours();
  const x = xOf(columns, key);
  const made = columns.tau.map((tau, at) => at).filter((at) => columns.tau[at] > 0);
  const traces = [{
    type: "scatter", mode: "lines", x: made.map((at) => x[at]), y: made.map((at) => columns.tau[at]),
    customdata: made.map((at) => columns.round[at]), line: { color: c.c5, width: 1, shape: "hv" }, hoverinfo: "skip", showlegend: false,
  }];
  const present = new Set(made.map((at) => columns.reason[at]));
  const own = [...present].filter((reason) => !Object.hasOwn(REASONS, reason)).map((reason, at) => [reason, { symbol: OWN_REASONS[at % OWN_REASONS.length], colour: "c3" }]);
  for (const [reason, { symbol, colour }] of [...Object.entries(REASONS).filter(([reason]) => present.has(reason)), ...own]) {
    const those = made.filter((at) => columns.reason[at] === reason);
    traces.push({
      type: "scatter", mode: "markers", name: plain(reason), x: those.map((at) => x[at]), y: those.map((at) => columns.tau[at]),
      customdata: those.map((at) => columns.round[at]), marker: { symbol, color: c[colour], size: those.length > 400 ? 5 : 7 },
      meta: plain(reason), hovertemplate: "τ = %{y}, %{meta}<extra></extra>",
    });
  }
  return { traces, layout: { showlegend: true, yaxis: { rangemode: "tozero" } } };
}

export function shares(columns, key, resources) {
  const c = colours();
  return {
    traces: resources.map((resource, at) =>
      line(columns, key, (columns.spent[resource.name] || []).map((spent) => spent / resource.limit), resource.name,
        c[COLOURS[at % COLOURS.length]], DASHES[at % DASHES.length], { hovertemplate: "%{y:.1%}" })),
    layout: {
      showlegend: true, yaxis: { tickformat: ".0%", rangemode: "tozero" },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: c.c5, dash: "dot", width: 1 } }],
    },
  };
}

// A small chart with a single curve.
export function single(columns, key, y, colour) {
  const known = y.some((value) => value !== null);
  return {
    traces: known ? [line(columns, key, y, "", colours()[colour], "solid", { line: { color: colours()[colour], width: 1.5 } })] : [],
    layout: { margin: { l: 48, r: 8, t: 6, b: 26 }, yaxis: { rangemode: "tozero", nticks: 4 }, xaxis: { nticks: 4, title: { text: "" } } },
    empty: "not estimated",
  };
}

export function curve(choice) {
  const c = colours();
  const at = (tau) => choice.candidates.indexOf(tau);
  const mark = (tau, name, symbol, colour, size) => at(tau) < 0 ? [] : [{
    type: "scatter", mode: "markers", x: [tau], y: [choice.G[at(tau)]], name,
    marker: { symbol, size, color: c[colour], line: { width: 2, color: c[colour] } }, hovertemplate: `${name}: τ = ${tau}<extra></extra>`,
  }];
  const finite = choice.G.filter((value) => value !== null && value > 0);
  const low = Math.min(...finite), high = Math.max(...finite);
  // G soon becomes very large; show the part around its minimum and around the chosen τ.
  const top = Math.max(Math.min(high, 300 * low), choice.G[at(choice.record.tau)] ?? 0);
  const upright = high / low > 20
    ? { type: "log", range: [Math.log10(low) - 0.2, Math.log10(top) + 0.1], dtick: 1, exponentformat: "power" } : { nticks: 5 };
  const last = choice.candidates[choice.candidates.length - 1];
  const ticks = [1, 10, 100, 1000, 10000].flatMap((ten) => [ten, 2 * ten, 5 * ten]).filter((tau) => tau <= last);
  return {
    traces: finite.length === 0 ? [] : [
      { type: "scatter", mode: "lines", x: choice.candidates, y: choice.G, name: "G(τ)", line: { color: c.c1, width: 2 }, hovertemplate: "τ = %{x}: %{y:.4g}<extra></extra>" },
      ...mark(choice.minimum, "smallest G", "circle-open", "c3", 13),
      ...mark(choice.record.tau, "chosen τ", "diamond", "c2", 10),
    ],
    layout: {
      showlegend: true, yaxis: upright,
      xaxis: { title: { text: "local updates per round (τ)", standoff: 6, font: { size: 12 } }, ...(last > 30 ? { type: "log", tickvals: ticks } : {}) },
    },
    empty: "G was not evaluated in this round",
  };
}

// Several runs in one chart; each has its own colour, dashes and markers.
export function compared(runs, key, what) {
  const c = colours();
  return {
    traces: runs.map((run, at) => {
      const x = xOf(run.columns, key);
      const kept = run.columns[what].map((value, row) => row).filter((row) => run.columns[what][row] !== null);
      return {
        type: "scatter", mode: "lines+markers", name: run.name, x: kept.map((row) => x[row]), y: kept.map((row) => run.columns[what][row]),
        line: { color: c[COLOURS[at % COLOURS.length]], dash: DASHES[at % DASHES.length], width: 2 },
        marker: { symbol: SYMBOLS[at % SYMBOLS.length], size: 8, maxdisplayed: 14 },
        hovertemplate: "%{y:.4g}",
      };
    }),
    layout: { showlegend: true, xaxis: { rangemode: "tozero" }, yaxis: what === "accuracy" ? { tickformat: ".0%" } : {} },
    empty: "nothing to compare",
  };
}

// Draws a chart, or shows why there is nothing to draw.
export function draw(element, figure, { label = "", range = null, still = false } = {}) {
  if (figure.traces.length === 0) {
    Plotly.purge(element);
    element.classList.add("empty");
    element.textContent = figure.empty || "no data yet";
    return false;
  }
  if (element.classList.contains("empty")) {
    element.classList.remove("empty");
    element.textContent = "";
  }
  const c = colours();
  const axis = { gridcolor: c.grid, linecolor: c.line, zerolinecolor: c.line, automargin: true, tickfont: { size: 11 } };
  const own = figure.layout || {};
  const touch = matchMedia("(pointer: coarse)").matches;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x", hoverdistance: -1,
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif", color: c.text, size: 12 },
    margin: { l: 52, r: 12, t: 8, b: 40 }, dragmode: touch || still ? false : "zoom",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11.5 }, itemclick: false, itemdoubleclick: false },
    hoverlabel: { bgcolor: c.card, bordercolor: c.line, font: { color: c.text } },
    ...own,
    xaxis: { ...axis, title: { text: label, standoff: 6, font: { size: 12 } }, fixedrange: touch || still, ...(range ? { range } : { autorange: true }), ...own.xaxis },
    yaxis: { ...axis, fixedrange: true, ...own.yaxis },
  };
  Plotly.react(element, figure.traces, layout, { displayModeBar: false, responsive: true, doubleClick: false });
  return true;
}

// Position of a value of x in a drawn chart: left, top and height in pixels; null if it is not visible.
export function position(element, x) {
  const layout = element._fullLayout;
  if (!layout || !layout.xaxis || x === null || x === undefined) return null;
  const [low, high] = layout.xaxis.range;
  if (x < low || x > high) return null;
  return { left: layout.xaxis._offset + layout.xaxis.l2p(x), top: layout._size.t, height: layout._size.h };
}
