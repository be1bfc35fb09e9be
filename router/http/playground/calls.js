// The tools that an answer calls, each with room for what the tool returns.

const $ = (selector, from = document) => from.querySelector(selector);

/** Adds a piece of a call, as a stream has it, to the calls so far. */
export function addPiece(calls, { index, id, function: piece }) {
  calls[index] ??= { id: "", name: "", arguments: "", result: "" };
  const call = calls[index];
  call.id ||= id ?? "";
  call.name ||= piece?.name ?? "";
  call.arguments += piece?.arguments ?? "";
}

/** Returns calls as messages of a chat have them. */
export function asMessage(calls) {
  return calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
}

/** Shows the calls of one answer. Their text is the model's: it is never more than text. */
export class CallsView {
  #box;
  #onResults;
  #items = [];

  /**
   * @param {HTMLElement} box
   * @param {() => void} onResults the results are to be sent
   */
  constructor(box, onResults) {
    this.#box = box;
    this.#onResults = onResults;
    $(".send-results", box).addEventListener("click", () => onResults());
  }

  clear() {
    for (const item of this.#items) item.remove();
    this.#items = [];
  }

  show(calls, working) {
    this.#box.hidden = calls.length === 0;
    calls.forEach((call, i) => this.#showCall((this.#items[i] ??= this.#add(call)), call, working));
    $(".buttons", this.#box).hidden = working;
  }

  #add(call) {
    const item = $("#call-template").content.cloneNode(true).firstElementChild;
    const result = $(".result textarea", item);
    result.value = call.result;
    result.addEventListener("input", () => (call.result = result.value));
    result.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#onResults();
    });
    $(".buttons", this.#box).before(item);
    return item;
  }

  #showCall(item, call, working) {
    $(".name", item).textContent = call.name;
    $(".arguments", item).textContent = working ? call.arguments : indented(call.arguments);
    $(".result", item).hidden = working;
  }
}

const SPACE_OUTSIDE_STRINGS = /("(?:[^"\\]|\\.)*")|\s+/g;

/**
 * Returns JSON on several lines. What would not be the same stays as it is: what is none, as when
 * the answer was cut, and numbers that JavaScript does not have.
 */
function indented(text) {
  try {
    const value = JSON.parse(text);
    const same = JSON.stringify(value) === text.replace(SPACE_OUTSIDE_STRINGS, "$1");
    return same ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}
