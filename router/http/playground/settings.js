// What goes with every request: the model and the sampling parameters.

import * as forms from "./forms.js";

const $ = (selector, from = document) => from.querySelector(selector);

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const CONTROLS = [...NUMBERS, "stop"]; // each has the name of its argument as its id
const SAVED = [...CONTROLS, ...forms.CONTROLS];

let models = []; // what can be asked for
const changed = new Set(); // the controls that a person has changed
let wantedModel = "";

/** Returns the arguments for a request; what is left empty is left to the server. */
export function requestArguments() {
  const number = (id) => ($(`#${id}`).value === "" ? undefined : Number($(`#${id}`).value));
  return {
    model: $("#model").value || undefined,
    ...Object.fromEntries(NUMBERS.map((id) => [id, number(id)])),
    stop: $("#stop").value || undefined,
  };
}

/** Returns what is saved: what a person has chosen. */
export function state() {
  const values = [...changed].map((id) => [id, $(`#${id}`).value]);
  return { model: $("#model").value || wantedModel, values: Object.fromEntries(values) };
}

export function restore({ model, values }) {
  wantedModel = model;
  for (const id of SAVED.filter((id) => id in values)) {
    $(`#${id}`).value = values[id];
    changed.add(id);
    if (id === "tools") forms.refresh(); // the choice that follows may be one of them
  }
  showSummary();
}

/** Offers the models, and keeps the one that was chosen as long as it is there. */
export function showModels(listed) {
  if (JSON.stringify(listed) === JSON.stringify(models)) return;
  models = listed;
  const names = models.map(({ id }) => id);
  const { options, value } = $("#model");
  if (names.join("\n") !== [...options].map((option) => option.value).join("\n")) {
    const chosen = value || wantedModel;
    $("#model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) $("#model").value = chosen;
  }
  models.forEach(({ id, status }, i) => {
    options[i].text = status.value === "loaded" ? id : `${id} (${status.value})`;
  });
  showDefaults();
}

/** Marks the control whose value the server refused. */
export function markRefused(argument, message) {
  const known = CONTROLS.includes(argument);
  if (known) $(`#${argument}`).ariaInvalid = "true";
  if (known || forms.markRefused(argument, message)) $("#settings").open = true;
}

/** Shows the settings of a mode. */
export function choose(mode) {
  forms.choose(mode);
  showSummary();
}

export function start() {
  forms.start();
  $("#model").addEventListener("change", showDefaults);
  $("#settings").addEventListener("input", ({ target }) => {
    if (SAVED.includes(target.id)) changed.add(target.id);
    if (CONTROLS.includes(target.id)) target.ariaInvalid = null;
    showSummary();
  });
  // A browser can point at a wrong value only where it is seen.
  $("#settings").addEventListener("invalid", () => ($("#settings").open = true), true);
  showSummary();
}

/** Shows the values that the model's authors chose, else the page's own. */
function showDefaults() {
  const shown = models.find(({ id }) => id === $("#model").value);
  if (!shown) return;
  for (const id of NUMBERS.filter((id) => !changed.has(id)))
    $(`#${id}`).value = shown.default_sampling?.[id] ?? $(`#${id}`).defaultValue;
  showSummary();
}

function showSummary() {
  const parts = CONTROLS.map((id) => [id.replace("_", " "), $(`#${id}`).value]);
  const set = parts.filter(([, value]) => value !== "").map((part) => part.join(" "));
  $("#settings-summary").textContent = [...set, ...forms.summary()].join(" · ");
}
