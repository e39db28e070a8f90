// Elements and numbers. Text is always set as text, never as HTML: the files of a run are not trusted.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits)));
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

// Accuracy with four decimals, as the command line shows it.
export function fraction(value) {
  return value === null || value === undefined ? "–" : value.toFixed(4);
}

export function clock(seconds) {
  const then = new Date(1000 * seconds);
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  return then.toDateString() === new Date().toDateString() ? time : `${then.toLocaleDateString()} ${time}`;
}

export function ago(seconds) {
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 3) return "now";
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  return clock(seconds);
}

export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function state(name) {
  return el("span", { class: `state ${name.replace(" ", "-")}` }, name);
}

export function choose(label, options, chosen, changed) {
  const select = el("select", { onchange: () => changed(select.value) });
  for (const [value, text] of options) select.append(el("option", { value, selected: value === chosen }, text));
  return el("label", { class: "pick" }, el("span", { class: "note" }, label), select);
}

export function table(caption, headings, rows, kind = "") {
  const numeric = (heading) => (heading.startsWith("#") ? "number" : null);
  const plain = headings.map((heading) => heading.replace("#", ""));
  return el("table", { class: kind },
    caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, ...headings.map((heading, at) => el("th", { scope: "col", class: numeric(heading) }, plain[at])))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, at) =>
      el("td", { class: numeric(headings[at]), "data-of": plain[at] }, typeof cell === "string" ? cell : el("span", {}, cell)))))));
}
