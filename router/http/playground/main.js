// The page: what is asked, in which way, and the answers as they come.

import * as api from "./api.js";
import { follow } from "./engines.js";

const $ = (selector, from = document) => from.querySelector(selector);

const MODES = {
  chat: {
    label: "Message",
    empty: "Ask something.\nEnter sends, Shift+Enter begins a line, Escape stops.",
    prompt: "",
  },
  text: {
    label: "Text to go on from",
    empty: "The model goes on from your text as it stands, without a chat template.",
    prompt: "",
  },
  batch: {
    label: "Messages, one a line, all at once",
    empty: "Every line is a request of its own. They run together\nand share the blocks of the system prompt.",
    prompt: [
      "Why is the sky blue?",
      "How do bees find their way home?",
      "Tell a short story about a lighthouse.",
      "What makes bread rise?",
      "Explain tides to a child.",
      "Write a poem about old maps.",
      "How does a sailing boat go against the wind?",
      "What is a prime number?",
      "Describe a forest in autumn.",
      "Why do we dream?",
      "How was paper invented?",
      "What do whales sing about?",
    ].join("\n"),
  },
};
const SYSTEM =
  "You are a patient teacher who has read widely. Answer in plain words and whole sentences, " +
  "begin with what matters most, give one example from everyday life, and admit what is not known. " +
  "Do not repeat the question, use no lists and no headings, and stop when it is answered.";

const views = Object.fromEntries(
  Object.keys(MODES).map((mode) => [mode, { answers: [], prompt: MODES[mode].prompt }]),
);
let running = null; // the AbortController of what is asked now
let mode = "";
let conversation = []; // the chat's messages that were answered

function choose(next) {
  if (mode) views[mode] = { answers: [...$("#answers").children], prompt: $("#prompt").value };
  mode = next;
  for (const tab of document.querySelectorAll("nav button"))
    tab.ariaSelected = String(tab.dataset.mode === mode);
  $("#answers").dataset.mode = mode;
  $("#answers").dataset.empty = MODES[mode].empty;
  $("#answers").replaceChildren(...views[mode].answers);
  $("#prompt-label").textContent = MODES[mode].label;
  $("#prompt").value = views[mode].prompt;
  $("#composer").dataset.mode = mode;
  $("#send").textContent = mode === "batch" ? "Run all" : "Send";
  $("#prompt").focus();
  $("#prompt").setSelectionRange(0, 0);
  $("#prompt").scrollTop = 0;
}

function parameters() {
  const number = (id) => ($(`#${id}`).value === "" ? undefined : Number($(`#${id}`).value));
  return {
    model: $("#model").value,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stop: $("#stop").value || undefined,
  };
}

function system() {
  const text = $("#system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

async function send() {
  const prompt = $("#prompt").value;
  if (!prompt.trim() || running) return;
  if (mode === "text") {
    await ask([prompt], "v1/completions", async () => ({ prompt }));
  } else if (mode === "chat") {
    $("#prompt").value = "";
    const messages = [...conversation, { role: "user", content: prompt }];
    const chat = { messages: [...system(), ...messages] };
    const [text] = await ask([prompt], "v1/chat/completions", async () => chat);
    if (text) conversation = [...messages, { role: "assistant", content: text }];
  } else {
    $("#answers").replaceChildren();
    const lines = prompt.split("\n").filter((line) => line.trim());
    await ask(lines, "v1/completions", async () => ({ prompt: await Promise.all(lines.map(tokens)) }));
  }
}

// Browsers open six connections to a host, so many chats at once are one request of many prompts.
async function tokens(content) {
  const messages = [...system(), { role: "user", content }];
  return (await api.post("tokenize", { model: $("#model").value, messages })).tokens;
}

/** Shows answers to all that is asked in one request; returns their texts, as far as they came. */
async function ask(asked, path, body) {
  const list = $("#answers");
  const answers = asked.map(showQuestion);
  list.append(...answers.map(({ article }) => article));
  scroll(list, true);
  running = new AbortController();
  showRunning();
  const total = { began: performance.now(), first: 0, usage: null, ended: "stopped" };
  try {
    const request = { ...parameters(), ...(await body()) };
    for await (const chunk of api.stream(path, request, running.signal)) {
      total.usage = chunk.usage ?? total.usage;
      for (const choice of chunk.choices) showChoice(answers[choice.index], choice, total);
      $("#summary").textContent = figures(total, asked.length);
    }
    total.ended = "";
  } catch (error) {
    if (error.name !== "AbortError") total.ended = error.message;
  }
  running = null;
  showRunning();
  for (const answer of answers) {
    answer.article.classList.remove("working");
    if (total.ended && !answer.ended) answer.facts.textContent = total.ended;
  }
  $("#summary").textContent = figures(total, asked.length);
  return answers.map(({ text }) => text.textContent);
}

function showQuestion(asked) {
  const article = $("#answer-template").content.cloneNode(true).firstElementChild;
  const [text, facts] = [$(".text", article), $(".facts", article)];
  $(".asked", article).textContent = asked;
  facts.textContent = "waiting";
  article.classList.add("working");
  return { article, text, facts, began: performance.now(), first: 0, ended: false };
}

function showChoice(answer, choice, total) {
  const piece = choice.delta?.content ?? choice.text ?? "";
  if (piece) {
    answer.text.append(piece);
    answer.first ||= performance.now();
    total.first ||= answer.first;
    scroll(mode === "batch" ? answer.text : $("#answers"));
  }
  const parts = [];
  if (answer.first) parts.push(`first token ${seconds(answer.first - answer.began)}`);
  if (choice.finish_reason) {
    answer.ended = true;
    answer.article.classList.remove("working");
    const why = choice.finish_reason === "length" ? "max tokens" : "done";
    parts.push(`${why} ${seconds(performance.now() - answer.began)}`);
  }
  if (parts.length) answer.facts.textContent = parts.join(" · ");
}

/** One line: how many tokens, how fast, and what the prefix cache spared. */
function figures({ first, usage }, requests) {
  if (!first || !usage) return "";
  const elapsed = (performance.now() - first) / 1000;
  const parts = requests > 1 ? [`${requests} requests`] : [];
  parts.push(`${usage.completion_tokens} tokens`);
  if (usage.completion_tokens > requests && elapsed > 0)
    parts.push(`${((usage.completion_tokens - requests) / elapsed).toFixed(1)} tokens/s`);
  const cached = usage.prompt_tokens_details.cached_tokens;
  parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}

function seconds(milliseconds) {
  return `${(milliseconds / 1000).toFixed(2)} s`;
}

function scroll(box, always = false) {
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  if (always || near) box.scrollTop = box.scrollHeight;
}

function showRunning() {
  $("#cancel").disabled = !running;
  $("#send").disabled = Boolean(running);
}

function stop() {
  running?.abort();
}

function showModels(engines) {
  const names = [...new Set(engines.map((engine) => engine.model))].sort();
  const shown = [...$("#model").options].map((option) => option.value);
  if (names.join() === shown.join()) return;
  $("#model").replaceChildren(...names.map((name) => new Option(name, name)));
  showDefaults();
}

/** Shows the sampling parameters that the model's authors chose, where there is a field for them. */
async function showDefaults() {
  const { data } = await api.get("v1/models");
  const defaults = data.find(({ id }) => id === $("#model").value)?.default_sampling ?? {};
  for (const [name, value] of Object.entries(defaults)) if ($(`#${name}`)) $(`#${name}`).value = value;
}

function askForKey() {
  const dialog = $("#key-dialog");
  if (dialog.open) return;
  $("#key").value = api.key();
  dialog.showModal();
}

for (const tab of document.querySelectorAll("nav button"))
  tab.addEventListener("click", () => choose(tab.dataset.mode));
$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("#prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || mode === "batch") return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("#model").addEventListener("change", showDefaults);
$("#cancel").addEventListener("click", stop);
$("#clear").addEventListener("click", () => {
  stop();
  conversation = [];
  $("#answers").replaceChildren();
  $("#summary").textContent = "";
});
$("#key-button").addEventListener("click", askForKey);
$("#key-dialog").addEventListener("close", () => api.setKey($("#key").value));

$("#system").value = SYSTEM;
choose("chat");
let refused = false;
follow(showModels, () => {
  if (!refused) askForKey();
  refused = true;
});
