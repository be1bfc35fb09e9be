// The page: three ways to ask, the answers as they come, and the engines at work.

import { follow } from "./engines.js";
import { hasSchema } from "./forms.js";
import * as images from "./images.js";
import * as keys from "./keys.js";
import { BATCH, BATCH_SYSTEM, LABELS } from "./modes.js";
import { within } from "./pace.js";
import { describe } from "./problem.js";
import { REQUESTS } from "./requests.js";
import { Run } from "./run.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { scrollToEnd, View } from "./view.js";

const $ = (selector, from = document) => from.querySelector(selector);

const SAVE_MS = 1000;
const LEAVE_MS = 5000;

const views = {
  chat: makeView("chat", { markdown: true }),
  text: makeView("text", { markdown: false }),
  batch: makeView("batch", { markdown: true, prompt: BATCH, system: BATCH_SYSTEM }),
};
let mode = "chat";
let running = null; // the Run that is on its way, of any mode
let leaving = false; // another page is on its way

function makeView(name, { markdown, prompt = "", system = "" }) {
  const retry = (answer) => again(name, answer);
  const actions = { markdown, retry, sendResults, giveKey: keys.askForKey };
  return new View($(`#answers-${name}`), { prompt, system, actions });
}

// Asking

async function send() {
  const prompt = $("#prompt").value;
  if (!prompt.trim() || running) return;
  const view = views[mode];
  if (mode === "batch") {
    view.clear();
    await ask(mode, view.add(prompt.split("\n").filter((line) => line.trim()), options()));
    return;
  }
  const asked = { ...options(), images: mode === "chat" ? images.take() : [] };
  if (mode === "chat") $("#prompt").value = view.prompt = "";
  await ask(mode, view.add([prompt], asked));
}

/** Goes on with what the tools returned that the last answer calls. */
async function sendResults(answer) {
  const view = views.chat;
  if (running || answer !== view.answers.at(-1) || !$("#composer").reportValidity()) return;
  const results = answer.record.calls.map(({ id, result }) => ({ id, result }));
  const shown = answer.record.calls.map(({ name, result }) => `${name}: ${result}`).join("\n");
  $("#prompt").focus();
  await ask("chat", view.add([shown], { ...options(), results }));
}

/** Returns what an answer is to be, by the settings. */
function options() {
  return { json: hasSchema() };
}

/** Asks for an answer once more, in its place. */
async function again(name, answer) {
  if (running || !$("#composer").reportValidity()) return;
  answer.restart(hasSchema());
  $("#prompt").focus();
  await ask(name, [answer]);
}

async function ask(name, answers) {
  const view = views[name];
  view.showProblem(null);
  if (name !== "batch") view.scroll(true);
  running = new Run(answers, (changed, figures) => {
    for (const answer of changed) if (name === "batch") scrollToEnd(answer.text);
    if (name !== "batch") view.scroll();
    view.summary = figures;
    showSummary();
    saveSoon();
  });
  showRunning();
  const error = await running.finish(...REQUESTS[name](view, answers));
  running = null;
  showRunning();
  if (error) showError(name, answers, error);
  save();
}

function showError(name, answers, error) {
  const view = views[name];
  settings.markRefused(error.param, error.message);
  if (error.status === 401) keys.showRefused(true);
  if (name === "batch") {
    view.showProblem(describe(error), send, keys.askForKey);
    view.box.scrollTop = 0;
  } else {
    answers[0].fail(describe(error));
    view.scroll();
  }
}

// The page

function choose(next) {
  mode = next;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.mode === mode;
    tab.ariaSelected = String(chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  for (const [name, { box }] of Object.entries(views)) box.hidden = name !== mode;
  $("#composer").dataset.mode = mode;
  $("#prompt-label").textContent = LABELS[mode];
  $("#prompt").placeholder = LABELS[mode];
  $("#prompt").value = views[mode].prompt;
  $("#system").value = views[mode].system;
  settings.choose(mode);
  $("#send").textContent = mode === "batch" ? "Run all" : "Send";
  delete document.body.dataset.engines;
  $("#engines-button").ariaPressed = "false";
  showSummary();
  saveSoon();
}

function showSummary() {
  $("#summary").textContent = views[mode].summary;
}

/** Shows the end of the answers, but the beginning of a batch. */
function focusPrompt() {
  $("#prompt").focus();
  if (mode !== "batch") return views[mode].scroll(true);
  $("#prompt").setSelectionRange(0, 0);
  $("#prompt").scrollTop = 0;
}

/** Shows the one button that can be used now: to send, or to stop. */
function showRunning() {
  const [shown, other] = running ? ["#cancel", "#send"] : ["#send", "#cancel"];
  const focused = document.activeElement === $(other);
  $(shown).hidden = false;
  if (focused) $(shown).focus();
  $(other).hidden = true;
}

function stop() {
  running?.stop();
}

function clear() {
  stop();
  views[mode].clear();
  showSummary();
  save();
  $("#prompt").focus();
}

// What survives a reload

const saveSoon = within(SAVE_MS, save);

function save() {
  if (leaving) return;
  const states = Object.entries(views).map(([name, view]) => [name, view.state()]);
  store.save({ mode, settings: settings.state(), views: Object.fromEntries(states) });
}

/** Saves before the browser ends a request on its way, which then looks like a failure. */
function leave() {
  save();
  leaving = true;
  setTimeout(() => (leaving = false), LEAVE_MS);
}

function restore() {
  const saved = store.load();
  if (!saved) return;
  mode = saved.mode;
  settings.restore(saved.settings);
  for (const [name, view] of Object.entries(views)) view.restore(saved.views[name]);
}

// Events

function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => {
      choose(tab.dataset.mode);
      focusPrompt();
    });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const next = tabs.at((tabs.indexOf(tab) + step) % tabs.length);
      choose(next.dataset.mode);
      next.focus();
    });
  }
}

function startComposer() {
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("#composer").addEventListener("input", () => {
    Object.assign(views[mode], { prompt: $("#prompt").value, system: $("#system").value });
    saveSoon();
  });
  $("#prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || mode === "batch") return;
    event.preventDefault();
    $("#composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("#key-dialog").open) stop();
  });
  $("#cancel").addEventListener("click", stop);
  $("#clear").addEventListener("click", clear);
}

function startExamples() {
  for (const example of document.querySelectorAll(".example"))
    example.addEventListener("click", () => {
      $("#prompt").value = views[mode].prompt = example.textContent;
      $("#composer").requestSubmit();
      $("#prompt").focus();
    });
}

function startEngines() {
  $("#engines-button").addEventListener("click", () => {
    const shown = document.body.toggleAttribute("data-engines");
    $("#engines-button").ariaPressed = String(shown);
  });
  let asked = false; // once, by itself
  const refresh = follow({
    onModels: (models) => {
      keys.showRefused(false);
      settings.showModels(models);
    },
    onRefused: () => {
      keys.showRefused(true);
      if (!asked) keys.askForKey();
      asked = true;
    },
  });
  keys.start(refresh);
}

settings.start();
restore();
choose(mode);
startTabs();
startComposer();
images.start();
startExamples();
startEngines();
focusPrompt();
addEventListener("beforeunload", leave);
addEventListener("pagehide", save); // phones
$("#model").addEventListener("change", saveSoon);
