// What is posted to the server in each mode.

import { post } from "./api.js";
import { asMessage } from "./calls.js";
import { schemaArgument, toolArguments } from "./forms.js";
import { requestArguments } from "./settings.js";

// Of each mode: the path that is posted to, and a function that makes the body.
export const REQUESTS = {
  chat: (view, [answer]) => [
    "v1/chat/completions",
    async () => ({
      ...requestArguments(),
      ...schemaArgument(),
      ...toolArguments({ answering: Boolean(answer.record.results) }),
      messages: messages(view, answer),
    }),
  ],
  text: (view, [answer]) => [
    "v1/completions",
    async () => ({ ...requestArguments(), ...schemaArgument(), prompt: answer.record.asked }),
  ],
  // Browsers open six connections to a host, so many chats at once are one request of many prompts.
  batch: (view, answers) => [
    "v1/completions",
    async (signal) => {
      const prompts = answers.map(({ record }) => tokens(view, record.asked, signal));
      const prompt = await Promise.all(prompts);
      return { ...requestArguments(), ...schemaArgument(), prompt };
    },
  ],
};

/** Returns the chat up to a question; what was not answered is left out. */
function messages(view, last) {
  const end = view.answers.indexOf(last);
  const said = view.answers.slice(0, end).flatMap(({ record }, i) => {
    // Calls are told only with what the tools returned, which is how the next answer begins.
    const called = Boolean(view.answers[i + 1].record.results);
    if (!called && !record.text) return [];
    const calls = called ? { tool_calls: asMessage(record.calls) } : {};
    const reasoning = record.reasoning ? { reasoning_content: record.reasoning } : {};
    const answer = { role: "assistant", content: record.text, ...calls, ...reasoning };
    return [...question(record), answer];
  });
  return [...systemMessage(view), ...said, ...question(last.record)];
}

function question({ asked, images, results }) {
  if (!results) {
    const shown = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    const content = shown.length ? [...shown, { type: "text", text: asked }] : asked;
    return [{ role: "user", content }];
  }
  return results.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
}

async function tokens(view, content, signal) {
  const chat = [...systemMessage(view), { role: "user", content }];
  const { model } = requestArguments();
  return (await post("tokenize", { model, messages: chat }, signal)).tokens;
}

function systemMessage({ system }) {
  return system.trim() ? [{ role: "system", content: system.trim() }] : [];
}
