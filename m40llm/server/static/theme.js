// Runs before the first paint: the theme is the user's choice, else the system's. `null` means the system's.
"use strict";
(() => {
  const KEY = "m40llm.theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : null;
  };
  const apply = () => {
    document.documentElement.dataset.theme = stored() ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  addEventListener("storage", (event) => event.key === KEY && apply());
  globalThis.m40llmTheme = {
    stored,
    set(value) {
      if (value) localStorage.setItem(KEY, value);
      else localStorage.removeItem(KEY);
      apply();
    },
  };
  apply();
})();
