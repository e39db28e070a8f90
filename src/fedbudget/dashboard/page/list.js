// All runs of the folder, updated regularly; check boxes select runs to compare.

import { clock, el, fraction, number, state, table } from "./dom.js";

export function listView(picked) {
  const holder = el("div");
  const compare = el("button", { type: "button", class: "main", disabled: true, onclick: () => { location.href = `/compare?${[...picked].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`; } }, "Compare");
  const page = el("article", {}, el("div", { class: "bar-of-controls" }, el("h1", {}, "Runs"), compare), holder);
  let before = "";
  function pickable() {
    compare.disabled = picked.size < 2;
    compare.textContent = picked.size < 2 ? "Compare: select two or more" : `Compare ${picked.size} runs`;
  }
  function show({ folder, runs }) {
    const now = JSON.stringify(runs);
    if (now === before) return; // keeps the focus
    before = now;
    const focused = document.activeElement?.dataset?.pick;
    if (runs.length === 0) {
      holder.replaceChildren(el("p", {}, `There are no runs in ${folder} yet. Start one with: fedbudget run`));
      return;
    }
    holder.replaceChildren(el("div", { class: "card list scroll" }, table("", ["compare", "run", "state", "what", "#loss", "#accuracy", "#rounds", "spent", "began"], runs.map(row), "stacks")));
    if (focused) holder.querySelector(`[data-pick="${CSS.escape(focused)}"]`)?.focus();
    pickable();
  }
  function row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, "data-pick": run.name, checked: picked.has(run.name), disabled: run.state === "unreadable",
      onchange: () => { if (box.checked) picked.add(run.name); else picked.delete(run.name); pickable(); } });
    if (run.state === "unreadable") return [box, run.name, state(run.state), run.title, "", "", "", "", ""];
    return [
      box, el("a", { href: `/run/${encodeURIComponent(run.name)}` }, run.name), state(run.state), run.title, number(run.loss), fraction(run.accuracy), number(run.rounds),
      el("span", {}, ...run.spent.map((each) => el("div", { class: "whole" }, el("span", { class: "meter", "aria-hidden": "true" }, el("i", { style: `width: ${Math.min(100, 100 * each.share)}%` })), `${each.name} ${each.text}`))),
      el("span", { class: "whole" }, clock(run.began))];
  }
  pickable();
  return { page, show };
}
