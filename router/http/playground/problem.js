// An error, shown where the answer would be, with what can be done about it.

const $ = (selector, from = document) => from.querySelector(selector);

/**
 * Returns what is kept of an error; it can be saved.
 *
 * @param {import("./api.js").ApiError} error
 */
export function describe({ message, status = 0, retryAfter = null }) {
  const retryAt = retryAfter === null ? null : Date.now() + retryAfter * 1000;
  return { message, needsKey: status === 401, retryAt };
}

/**
 * Returns the element that shows a problem.
 *
 * @param {ReturnType<typeof describe>} problem
 * @param {() => void} onRetry
 * @param {() => void} onKey
 */
export function problemBox(problem, onRetry, onKey) {
  const box = $("#problem-template").content.cloneNode(true).firstElementChild;
  const retry = $(".retry", box);
  const giveKey = $(".give-key", box);
  $(".message", box).textContent = problem.message;
  giveKey.hidden = !problem.needsKey;
  giveKey.addEventListener("click", onKey);
  retry.addEventListener("click", onRetry);
  countDown(retry, problem.retryAt);
  return box;
}

/** Holds a button back until the server wants to be asked again. */
function countDown(button, until) {
  const seconds = Math.ceil(((until ?? 0) - Date.now()) / 1000);
  button.disabled = seconds > 0;
  button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  if (seconds > 0) setTimeout(() => countDown(button, until), 250);
}
