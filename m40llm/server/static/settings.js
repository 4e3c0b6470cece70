// The settings drawer: system prompt and sampling of a conversation, the API key, the theme button.
import { byId, el } from "./dom.js";
import { SAMPLING, storeKey, storedKey } from "./store.js";

let conversation = null;
let key = storedKey();

export const apiKey = () => key;

/** Fills the drawer with the settings of `shown`; changes go straight into it. */
export function showSettings(shown) {
  conversation = shown;
  byId("system").value = shown.system;
  for (const { name } of SAMPLING) {
    const field = byId(`sampling-${name}`);
    field.value = shown.sampling[name] ?? "";
    field.setCustomValidity("");
    byId(`sampling-${name}-error`).textContent = "";
  }
}

/** Opens the drawer, with the cursor in `focus` if given. */
export function openSettings(focus = null) {
  if (!byId("settings").open) byId("settings").showModal();
  if (focus) byId(focus).focus();
}

/** Shows the server's sampling values where the user has set none. */
export function showDefaults(values) {
  for (const { name } of SAMPLING) if (Number.isFinite(values[name])) byId(`sampling-${name}`).placeholder = String(values[name]);
}

/** The number in `field`, undefined if it is empty, or a sentence that says what is wrong with it. */
function readNumber(field, { label, min, max = Infinity, whole }) {
  if (field.validity.badInput) return `${label} must be a number.`;
  if (field.value.trim() === "") return undefined;
  const value = Number(field.value);
  const range = max === Infinity ? `${min} or more` : max === Number.MAX_SAFE_INTEGER ? `${min} to 2^53` : `${min} to ${max}`;
  if (!(value >= min && value <= max) || (whole && !Number.isInteger(value))) return `A ${whole ? "whole number" : "number"}, ${range}.`;
  return value;
}

function samplingField(spec, onChange) {
  const { name, label, note, step, whole } = spec;
  const id = `sampling-${name}`;
  // step stays off the constraint: "any" lets every decimal through; the arrows still move by a sensible amount
  const field = el("input", {
    id,
    type: "number",
    inputmode: whole ? "numeric" : "decimal",
    step: whole ? step : "any",
    placeholder: { max_tokens: "no limit", seed: "random" }[name] ?? "default",
    "aria-describedby": `${id}-note ${id}-error`,
  });
  const error = el("span", { id: `${id}-error`, class: "field-error", role: "alert" });
  field.addEventListener("input", () => {
    const value = readNumber(field, spec);
    const wrong = typeof value === "string";
    error.textContent = wrong ? value : "";
    field.setCustomValidity(wrong ? value : "");
    if (wrong) return; // the last right value stays in force
    if (value === undefined) delete conversation.sampling[name];
    else conversation.sampling[name] = value;
    onChange();
  });
  return el("div", { class: "field" }, el("label", { for: id }, label), field, el("span", { id: `${id}-note`, class: "note" }, note), error);
}

/** Wires the drawer once. `onChange` after a setting of the conversation changed, `onKey` after the API key did. */
export function setUpSettings({ onChange, onKey }) {
  const dialog = byId("settings");
  byId("sampling").replaceChildren(...SAMPLING.map((spec) => samplingField(spec, onChange)));
  byId("settings-open").addEventListener("click", () => openSettings());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // the backdrop
  dialog.addEventListener("close", () => showSettings(conversation)); // a wrong number does not stay in its field
  byId("system").addEventListener("input", () => {
    conversation.system = byId("system").value;
    onChange();
  });
  byId("sampling-reset").addEventListener("click", () => {
    conversation.sampling = {};
    showSettings(conversation);
    onChange();
  });

  byId("api-key").value = key;
  byId("api-key-remember").checked = key !== "";
  const keyChanged = () => {
    key = byId("api-key").value.trim();
    storeKey(byId("api-key-remember").checked ? key : "");
  };
  byId("api-key").addEventListener("input", keyChanged);
  byId("api-key").addEventListener("change", onKey);
  byId("api-key-remember").addEventListener("change", keyChanged);

  const theme = globalThis.m40llmTheme;
  const other = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  const showTheme = () => {
    byId("theme").setAttribute("aria-label", `Switch to the ${other()} theme`);
    byId("theme").title = `Switch to the ${other()} theme`;
    byId(`theme-${theme.stored() ?? "system"}`).checked = true;
  };
  byId("theme").addEventListener("click", () => theme.set(other()));
  for (const value of ["system", "light", "dark"]) {
    byId(`theme-${value}`).addEventListener("change", () => theme.set(value === "system" ? null : value));
  }
  addEventListener("themechange", showTheme);
  showTheme();
}
