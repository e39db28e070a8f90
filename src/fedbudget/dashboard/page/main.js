// Chooses the page by its address, loads its data, shows it and keeps it up to date.

import { ask, liveSource } from "./source.js";
import { compareView } from "./compare.js";
import { el } from "./dom.js";
import { listView } from "./list.js";
import { runView } from "./run.js";
import { themed } from "./theme.js";

const EVERY = 2000; // milliseconds between two requests of a list
const content = document.getElementById("content");
let redraw = () => {};

function where(...parts) {
  document.title = [...parts.filter((part) => typeof part === "string"), "fedbudget"].join(" · ");
  document.getElementById("where").replaceChildren(...parts.flatMap((part) => [" / ", part]).slice(1));
}

// Repeats while the page is visible.
function repeat(work) {
  setInterval(() => { if (!document.hidden) work().catch(() => {}); }, EVERY);
}

async function list() {
  where("Runs");
  const view = listView(new Set());
  content.replaceChildren(view.page);
  const refresh = async () => view.show(await ask("/api/runs"));
  await refresh();
  repeat(refresh);
}

async function run(name) {
  where(el("a", { href: "/" }, "Runs"), name);
  const source = liveSource(name);
  const view = runView(source, await source.view());
  content.replaceChildren(view.page);
  view.begin();
  redraw = view.redraw;
}

async function compare(names) {
  where(el("a", { href: "/" }, "Runs"), "Compare");
  const load = () => Promise.all(names.map(async (name) => ({ ...await liveSource(name).view(), link: `/run/${encodeURIComponent(name)}` })));
  let views = await load();
  const view = compareView(views);
  content.replaceChildren(el("h1", {}, `${names.length} runs compared`), view.page);
  view.begin();
  redraw = view.redraw;
  repeat(async () => {
    if (views.every((each) => each.summary)) return;
    views = await load();
    view.update(views);
  });
}

function showError(error) {
  content.replaceChildren(el("h1", {}, "This page cannot be shown"), el("p", {}, error.message), el("p", {}, el("a", { href: "/" }, "All runs")));
}

themed(document.getElementById("theme"), () => redraw());
const asked = new URLSearchParams(location.search).getAll("run");
const named = location.pathname.match(/^\/run\/(.+)$/);
const page = named ? run(decodeURIComponent(named[1])) : location.pathname === "/compare" && asked.length ? compare(asked) : list();
page.catch(showError);
