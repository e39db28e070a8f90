// The report: the views of the page, with figures from the file.

import { compareView } from "./compare.js";
import { el, state } from "./dom.js";
import { runView } from "./run.js";
import { themed } from "./theme.js";

const given = JSON.parse(document.getElementById("figures").textContent);
const content = document.getElementById("content");
const views = [];

// The file has all rows that the charts need, and the G curves of up to 300 rounds.
function keptSource(run) {
  const kept = run.choices.map((choice) => choice.record.round);
  return {
    async rows(first, last) {
      const within = run.columns.round.map((round, at) => at).filter((at) => run.columns.round[at] >= first && run.columns.round[at] <= last);
      const take = (columns) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, Array.isArray(values) ? within.map((at) => values[at]) : take(values)]));
      return { columns: take(run.columns) };
    },
    async choice(round) {
      const at = kept.reduce((best, each, index) => (Math.abs(each - round) < Math.abs(kept[best] - round) ? index : best), 0);
      return run.choices[at];
    },
  };
}

if (given.runs.length > 1) {
  const view = compareView(given.runs.map((run, at) => ({ ...run, link: `#run-${at}` })));
  content.append(el("section", {}, el("h1", {}, `${given.runs.length} runs compared`), view.page));
  views.push(view);
}
given.runs.forEach((run, at) => {
  const view = runView(keptSource(run), run, { headed: false, alone: given.runs.length === 1, open: true });
  content.append(el("section", { id: `run-${at}` }, el("h1", {}, run.name), el("p", { class: "sub" }, run.title, " · ", state(run.state)), view.page));
  views.push(view);
});
for (const view of views) view.begin();
themed(document.getElementById("theme"), () => views.forEach((view) => view.redraw()));
