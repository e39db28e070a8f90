// Draws curves and markers as SVG: axes, legend, pointer and zoom. charts.js says what to draw.
//
// A trace has columns x and y, and a name. `mode` contains "lines", "markers" or both. A value of null breaks a line.
// Text comes from the files of a run, and is always set as text.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4", longdashdot: "12 4 2 4" };
const FONT = 11.5, ROW = 17, DRAGGED = 6; // pixels

function make(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const canvas = document.createElement("canvas").getContext("2d");
function widthOf(text) {
  canvas.font = `${FONT}px system-ui, sans-serif`;
  return canvas.measureText(text).width;
}

// The paths of markers around (0, 0), for a radius of 1.
const SHAPES = {
  square: "M-.9-.9H.9V.9H-.9Z", diamond: "M0-1.25 1.25 0 0 1.25-1.25 0Z", "triangle-up": "M0-1.2 1.15.9H-1.15Z",
  "triangle-down": "M0 1.2 1.15-.9H-1.15Z", x: "M-1-.6-.6-1 0-.4.6-1 1-.6.4 0 1 .6.6 1 0 .4-.6 1-1 .6-.4 0Z",
  cross: "M-.35-1.1H.35V-.35H1.1V.35H.35V1.1H-.35V.35H-1.1V-.35H-.35Z", hexagon: "M-.6-1.05H.6L1.2 0 .6 1.05H-.6L-1.2 0Z",
  star: "M0-1.3.35-.4 1.3-.4.55.2.8 1.1 0 .55-.8 1.1-.55.2-1.3-.4-.35-.4Z", circle: "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0-1 0Z",
};
function marker({ symbol = "circle", color, size = 6 }, x, y) {
  const open = symbol.endsWith("-open");
  return make("path", {
    d: SHAPES[symbol.replace("-open", "")] || SHAPES.circle, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size / 2})`,
    fill: open ? "none" : color, stroke: open ? color : null, "stroke-width": open ? 3.2 / size : null,
  });
}

// A number in few characters, as an axis or a pointer shows it.
export function short(value, digits = 4) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

// A scale from values to pixels, with ticks. Types: linear, log, category.
function scale({ type = "linear", range = null, rangemode, format, categories }, values, pixels, count) {
  const [from, to] = pixels;
  if (type === "category") {
    const step = (to - from) / Math.max(1, categories.length);
    return { at: (value) => from + (categories.indexOf(value) + 0.5) * step, step, ticks: categories.map((name) => [name, name]), low: 0, high: 1 };
  }
  const log = type === "log";
  const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  let low = range ? range[0] : known.reduce((least, value) => Math.min(least, value), Infinity);
  let high = range ? range[1] : known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!Number.isFinite(low)) [low, high] = log ? [0.1, 1] : [0, 1];
  if (!range && rangemode === "tozero") [low, high] = [Math.min(0, low), Math.max(0, high)];
  const of = log ? Math.log10 : (value) => value;
  if (!range) {
    const room = (of(high) - of(low) || (log ? 1 : Math.abs(high) || 1)) * 0.06;
    const back = (value) => (log ? 10 ** value : value);
    const fixed = rangemode === "tozero";
    [low, high] = [fixed && low === 0 ? 0 : back(of(low) - room), fixed && high === 0 ? 0 : back(of(high) + room)];
  }
  const at = (value) => from + ((of(value) - of(low)) / (of(high) - of(low))) * (to - from);
  const ticks = log ? logTicks(low, high, count) : linearTicks(low, high, count);
  return { at, low, high, ticks: ticks.map((value) => [value, format ? format(value) : short(value)]), invert: (pixel) => low + ((pixel - from) / (to - from)) * (high - low) };
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return linearTicks(low, high, count);
  const within = [];
  const every = Math.max(1, Math.ceil(decades / count));
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const digit of decades < 2.5 ? [1, 2, 5] : [1]) {
      const tick = Number(`${digit}e${power}`);
      if (tick >= low && tick <= high && (decades < 2.5 || power % every === 0)) within.push(tick);
    }
  }
  return within;
}

function path(trace, x, y) {
  let d = "", before = null;
  trace.x.forEach((value, at) => {
    const there = [x.at(value), y.at(trace.y[at])];
    if (trace.y[at] === null && trace.connectgaps) return;
    if (trace.y[at] === null || !there.every(Number.isFinite)) { before = null; return; }
    const [left, top] = there.map((each) => each.toFixed(1));
    if (before === null) d += `M${left} ${top}`;
    else d += trace.line?.shape === "hv" ? `H${left}V${top}` : `L${left} ${top}`;
    before = there;
  });
  return d;
}

// The legend above the plot, in as many rows as it needs; returns its height.
function legend(parent, traces, width, colours) {
  let left = 2, top = FONT;
  for (const trace of traces) {
    const needed = 26 + widthOf(trace.name) + 14;
    if (left > 2 && left + needed > width) { left = 2; top += ROW; }
    const y = top - 4;
    if (trace.mode.includes("lines")) parent.append(make("path", { d: `M${left} ${y}h22`, stroke: trace.line.color, "stroke-width": trace.line.width, "stroke-dasharray": DASHES[trace.line.dash] || null, fill: "none" }));
    if (trace.mode.includes("markers")) parent.append(marker({ ...trace.marker, size: Math.min(9, trace.marker.size || 6) }, left + 11, y));
    parent.append(make("text", { class: "legendtext", x: left + 27, y: top, fill: colours.text }, trace.name));
    left += needed;
  }
  return top + 6;
}

// Draws traces into an element, again whenever its size changes.
export function plot(element, traces, layout) {
  element.data = traces;
  element._layout = layout;
  if (!element._observer) {
    element._observer = new ResizeObserver(() => { if (element.data && element.clientWidth !== element._width) paint(element); });
    element._observer.observe(element);
  }
  paint(element);
}

export function clear(element) {
  element._observer?.disconnect();
  for (const name of ["data", "_layout", "_observer", "_scale", "_width"]) delete element[name];
  element.replaceChildren();
}

function paint(element) {
  const { data: traces, _layout: layout } = element;
  const width = element.clientWidth, height = element.clientHeight;
  if (!width || !height) return;
  element._width = width;
  const { colours, xaxis = {}, yaxis = {} } = layout;
  const svg = make("svg", { width, height, "font-size": FONT, "font-family": "system-ui, sans-serif" });
  const top = 6 + (layout.showlegend ? legend(svg, traces.filter((trace) => trace.showlegend !== false), width, colours) : 2);
  const bottom = height - (xaxis.title ? 38 : 20);
  const all = (name) => traces.flatMap((trace) => trace[name]);
  const yValues = [...all("y"), ...traces.flatMap((trace) => (trace.error || []).flatMap((error, at) => [trace.y[at] - error, trace.y[at] + error])), ...(yaxis.include || [])];
  const y = scale(yaxis, yValues, [bottom, top], Math.max(2, Math.floor((bottom - top) / 42)));
  const left = 10 + Math.max(...y.ticks.map(([, text]) => widthOf(text)), 14);
  const categories = xaxis.type === "category" ? [...new Set(all("x"))] : null;
  const x = scale({ ...xaxis, categories }, categories ? [] : all("x"), [left, width - 10], Math.max(2, Math.floor((width - left) / 90)));
  const text = (what, attributes) => make("text", { fill: colours.muted, ...attributes }, what);
  for (const [value, name] of y.ticks) {
    svg.append(make("path", { d: `M${left} ${y.at(value).toFixed(1)}H${width - 10}`, stroke: colours.grid }));
    svg.append(text(name, { x: left - 5, y: y.at(value) + 4, "text-anchor": "end" }));
  }
  let free = -Infinity;
  for (const [value, name] of x.ticks) {
    const at = x.at(value), half = widthOf(name) / 2;
    if (!categories) svg.append(make("path", { d: `M${at.toFixed(1)} ${top}V${bottom}`, stroke: colours.grid }));
    if (at - half < free || at + half > width) continue; // does not fit
    svg.append(text(name, { x: at, y: bottom + 15, "text-anchor": "middle" }));
    free = at + half + 6;
  }
  svg.append(make("path", { d: `M${left} ${top}V${bottom}H${width - 10}`, stroke: colours.line, fill: "none" }));
  if (xaxis.title) svg.append(text(xaxis.title, { x: (left + width - 10) / 2, y: bottom + 32, "text-anchor": "middle" }));
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  svg.append(make("clipPath", { id: clip }, make("rect", { x: left, y: top - 5, width: Math.max(0, width - 10 - left), height: bottom - top + 10 })));
  const drawn = make("g", { "clip-path": `url(#${clip})` });
  for (const value of layout.lines || []) drawn.append(make("path", { d: `M${left} ${y.at(value).toFixed(1)}H${width}`, stroke: colours.muted, "stroke-dasharray": DASHES.dot }));
  traces.forEach((trace, number) => {
    const shift = categories && traces.length > 1 ? ((number + 0.5) / traces.length - 0.5) * 0.7 * x.step : 0;
    if (trace.mode.includes("lines")) drawn.append(make("path", { d: path(trace, x, y), stroke: trace.line.color, "stroke-width": trace.line.width, "stroke-dasharray": DASHES[trace.line.dash] || null, fill: "none", "stroke-linejoin": "round" }));
    if (!trace.mode.includes("markers")) return;
    const every = Math.ceil(trace.x.length / (trace.marker.most || Infinity)) || 1;
    trace.x.forEach((value, at) => {
      if (trace.y[at] === null || at % every) return;
      const there = [x.at(value) + shift, y.at(trace.y[at])];
      if (!there.every(Number.isFinite)) return;
      const error = trace.error?.[at];
      if (error) drawn.append(make("path", { d: `M${there[0].toFixed(1)} ${y.at(trace.y[at] - error).toFixed(1)}V${y.at(trace.y[at] + error).toFixed(1)}`, stroke: trace.marker.color }));
      drawn.append(marker(trace.marker, ...there));
    });
  });
  svg.append(drawn);
  element._scale = { x, left, right: width - 10, top, height: bottom - top };
  const area = make("rect", { class: "nsewdrag", x: left, y: top, width: Math.max(0, width - 10 - left), height: bottom - top, fill: "transparent" });
  svg.append(area);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  element.replaceChildren(svg, tip);
  if (!categories) follow(element, area, tip);
}

// The pointer: values at its position, the round in focus, and zoom by dragging.
function follow(element, area, tip) {
  const { on = {}, touch } = element._layout;
  const { x, left, right, top, height } = element._scale;
  const pixel = (event) => Math.min(right, Math.max(left, event.clientX - element.getBoundingClientRect().left));
  let from = null, band = null;
  area.addEventListener("pointermove", (event) => {
    const here = pixel(event);
    if (from !== null) {
      band ??= area.parentNode.insertBefore(make("rect", { y: top, height, fill: element._layout.colours.accent, opacity: 0.18 }), area);
      band.setAttribute("x", Math.min(from, here));
      band.setAttribute("width", Math.abs(here - from));
      return;
    }
    const rows = element.data.filter((trace) => trace.tip && trace.x.length).map((trace) => [trace, nearest(trace.x, here, x)]).filter(([trace, at]) => at >= 0 && trace.y[at] !== null);
    if (rows.length === 0) return;
    const [[trace, at]] = rows.toSorted(([one, a], [other, b]) => Math.abs(x.at(one.x[a]) - here) - Math.abs(x.at(other.x[b]) - here));
    const best = Math.abs(x.at(trace.x[at]) - here);
    const shown = rows.filter(([each, row]) => Math.abs(x.at(each.x[row]) - here) <= best + 1);
    tip.replaceChildren(...shown.map(([each, row]) => { const line = document.createElement("div"); line.textContent = each.tip(each.x[row], each.y[row]); return line; }));
    tip.hidden = false;
    const after = here < (left + right) / 2;
    tip.style.left = after ? `${here + 12}px` : "";
    tip.style.right = after ? "" : `${element.clientWidth - here + 12}px`;
    tip.style.top = `${top + 4}px`;
    if (on.focus && trace.rounds) on.focus(trace.rounds[at]);
  });
  area.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (!on.zoom || touch) return;
  area.addEventListener("pointerdown", (event) => { from = pixel(event); area.setPointerCapture(event.pointerId); tip.hidden = true; });
  area.addEventListener("pointerup", (event) => {
    const ends = [from, pixel(event)].sort((one, other) => one - other);
    from = null;
    band?.remove();
    band = null;
    if (ends[1] - ends[0] > DRAGGED) on.zoom(ends.map(x.invert));
  });
  area.addEventListener("dblclick", () => on.zoom(null));
}

// The row whose x is nearest to a pixel; x is ascending.
function nearest(values, pixel, x) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x.at(values[middle]) < pixel) low = middle + 1; else high = middle;
  }
  return low > 0 && pixel - x.at(values[low - 1]) < x.at(values[low]) - pixel ? low - 1 : low;
}

// Position of a value of x in a drawn plot: left, top and height in pixels; null if it is not visible.
export function position(element, value) {
  const scale = element._scale;
  if (!scale || value === null || value === undefined || value < scale.x.low || value > scale.x.high) return null;
  return { left: scale.x.at(value), top: scale.top, height: scale.height };
}
