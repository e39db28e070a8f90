// The live source of a run's figures: the dashboard's own server.

export async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) {
    const content = await answer.json().catch(() => ({}));
    throw new Error(content.error || `the dashboard answered with status ${answer.status}`);
  }
  return answer.json();
}

export function liveSource(name) {
  const at = `/api/runs/${encodeURIComponent(name)}`;
  const known = new Map();
  return {
    view: () => ask(at),
    rows: (first, last) => ask(`${at}/rows?from=${first}&to=${last}`),
    async choice(round) {
      if (!known.has(round)) {
        if (known.size > 500) known.clear();
        known.set(round, await ask(`${at}/rounds/${round}`));
      }
      return known.get(round);
    },
    // Calls back with the news after a round, until the run ends; returns a function that stops it.
    follow(after, { news, reset, trouble }) {
      const events = new EventSource(`${at}/events?after=${after}`);
      const update = (event) => news(JSON.parse(event.data));
      events.addEventListener("now", update);
      events.addEventListener("end", (event) => { events.close(); update(event); });
      events.addEventListener("reset", () => { events.close(); known.clear(); reset(); });
      events.addEventListener("error", () => trouble(true));
      events.addEventListener("open", () => trouble(false));
      return () => events.close();
    },
  };
}
