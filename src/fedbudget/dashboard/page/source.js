// Where a run's page gets its figures from: the dashboard's own address, live.

export async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error || `the dashboard answered ${answer.status}`);
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
    // Calls back with news after a round, until the run ends; gives what stops it.
    follow(after, { news, reset, trouble }) {
      const events = new EventSource(`${at}/events?after=${after}`);
      const told = (event) => news(JSON.parse(event.data));
      events.addEventListener("now", told);
      events.addEventListener("end", (event) => { events.close(); told(event); });
      events.addEventListener("reset", () => { events.close(); known.clear(); reset(); });
      events.addEventListener("error", () => trouble(true));
      events.addEventListener("open", () => trouble(false));
      return () => events.close();
    },
  };
}
