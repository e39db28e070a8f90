// Several runs in one chart over the spent budget, and in a table.

import { choose, el, fraction, number, state, table } from "./dom.js";
import * as charts from "./charts.js";
import { clear } from "./plot.js";

const WHAT = [["best_loss", "loss of the best parameters so far"], ["validation_best", "lowest validation loss so far"], ["loss", "loss of the latest parameters"], ["accuracy", "accuracy"], ["tau", "τ"]];

export function compareView(runs) {
  const common = charts.axes(runs[0].resources).filter(([key]) =>
    key === "round" || key === "wall" || runs.every((run) => run.resources.some((resource) => resource.name === key)));
  const at = { key: common[0][0], what: "best_loss" };
  const element = el("div", { class: "plot", role: "img", "aria-label": "Runs compared", "data-chart": "compared", style: "height: 430px" });
  const rows = el("div", { class: "scroll" });
  const page = el("article", { class: "compare" },
    el("div", { class: "bar-of-controls" },
      choose("Show", WHAT, at.what, (what) => { at.what = what; show(); }),
      choose("against", common, at.key, (key) => { at.key = key; show(); })),
    el("div", { class: "charts" }, el("section", { class: "card" }, element)),
    el("section", { class: "card" }, rows));
  function show() {
    charts.draw(element, charts.compared(runs, at.key, at.what), { label: common.find(([key]) => key === at.key)[1] });
    rows.replaceChildren(table("", ["run", "state", "method", "τ", "#loss", "#accuracy", "#average τ", "#rounds", "spent"],
      runs.map((run) => [
        run.link ? el("a", { href: run.link }, run.name) : run.name, state(run.state), run.settings.method, run.settings.tau, number(run.loss), fraction(run.accuracy),
        run.average_tau === null ? "–" : run.average_tau.toFixed(1), number(run.rounds), run.gauges.map((gauge) => `${gauge.name} ${gauge.text}`).join(", "),
      ]), "stacks"));
    page.dataset.traces = String(runs.length);
  }
  return { page, begin: show, redraw: show, update(views) { runs = views; show(); }, end() { clear(element); } };
}
