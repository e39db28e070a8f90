// Dark or light: the system's setting, until the user changes it.

const KEY = "fedbudget-theme";

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["back", "card", "text", "muted", "line", "grid", "accent", "c1", "c2", "c3", "c4", "c5", "fill"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function stored(value) {
  try { // a file opened from disk may have no storage
    if (value) localStorage.setItem(KEY, value);
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

// Calls `changed` when the colours change.
export function themed(button, changed) {
  const before = stored();
  if (before === "dark" || before === "light") document.documentElement.dataset.theme = before;
  const name = () => {
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", isDark() ? "Change to light colours" : "Change to dark colours");
  };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    stored(next);
    name();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); changed(); });
  name();
}
