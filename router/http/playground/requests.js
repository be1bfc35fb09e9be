// What is posted to the server in each mode.

import { post } from "./api.js";
import { requestArguments } from "./settings.js";

// Of each mode: the path that is posted to, and a function that makes the body.
export const REQUESTS = {
  chat: (view, [answer]) => [
    "v1/chat/completions",
    async () => ({ ...requestArguments(), messages: messages(view, answer) }),
  ],
  text: (view, [answer]) => [
    "v1/completions",
    async () => ({ ...requestArguments(), prompt: answer.record.asked }),
  ],
  // Browsers open six connections to a host, so many chats at once are one request of many prompts.
  batch: (view, answers) => [
    "v1/completions",
    async (signal) => {
      const prompts = answers.map(({ record }) => tokens(view, record.asked, signal));
      return { ...requestArguments(), prompt: await Promise.all(prompts) };
    },
  ],
};

/** Returns the chat up to a question; what was not answered is left out. */
function messages(view, last) {
  const before = view.answers.slice(0, view.answers.indexOf(last));
  const said = before.filter(({ record }) => record.text).flatMap(({ record }) => [
    { role: "user", content: record.asked },
    { role: "assistant", content: record.text },
  ]);
  return [...systemMessage(view), ...said, { role: "user", content: last.record.asked }];
}

async function tokens(view, content, signal) {
  const chat = [...systemMessage(view), { role: "user", content }];
  const { model } = requestArguments();
  return (await post("tokenize", { model, messages: chat }, signal)).tokens;
}

function systemMessage({ system }) {
  return system.trim() ? [{ role: "system", content: system.trim() }] : [];
}
