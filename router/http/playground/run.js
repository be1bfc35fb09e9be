// One request on its way: its chunks as they come, put into the answers that it is to give.

import { stream } from "./api.js";
import { addPiece } from "./calls.js";
import { perFrame } from "./pace.js";

const ENDINGS = { length: "max tokens", tool_calls: "calls tools" };

/** What `Run` measured and the server counted. */
class Figures {
  began = performance.now();
  first = 0; // when the first text came
  usage = null;

  /** One line: how many tokens, how fast, and what drafts and the prefix cache spared. */
  toString(requests) {
    if (!this.first || !this.usage) return "";
    const { completion_tokens: tokens, prompt_tokens: prompt } = this.usage;
    const elapsed = (performance.now() - this.first) / 1000;
    const parts = requests > 1 ? [`${requests} requests`] : [];
    parts.push(`${tokens} tokens`);
    if (tokens > requests && elapsed > 0)
      parts.push(`${((tokens - requests) / elapsed).toFixed(1)} tokens/s`);
    const details = this.usage.completion_tokens_details;
    const { reasoning_tokens: reasoned, drafted_tokens: drafted } = details;
    if (reasoned) parts.push(`${reasoned} of them reasoning`);
    if (drafted) parts.push(`${details.accepted_tokens} of ${drafted} drafted tokens accepted`);
    const cached = this.usage.prompt_tokens_details.cached_tokens;
    parts.push(`${cached} of ${prompt} prompt tokens cached`);
    return parts.join(" · ");
  }
}

export class Run {
  #abort = new AbortController();
  #figures = new Figures();
  #changed = new Set();
  #firsts = new Map(); // when each answer's first text came
  #answers;
  #onDrawn;
  #drawSoon;

  /**
   * @param {import("./answer.js").Answer[]} answers by the index of their choice
   * @param {(changed: import("./answer.js").Answer[], figures: string) => void} onDrawn
   */
  constructor(answers, onDrawn) {
    this.#answers = answers;
    this.#onDrawn = onDrawn;
    this.#drawSoon = perFrame(() => this.#draw());
  }

  stop() {
    this.#abort.abort();
  }

  /**
   * Sends the request and waits for its end.
   *
   * @param {string} path
   * @param {(signal: AbortSignal) => Promise<object>} makeBody
   * @returns {Promise<Error | null>} what kept an answer from its end; not a stop
   */
  async finish(path, makeBody) {
    const { signal } = this.#abort;
    let error = null;
    try {
      for await (const chunk of stream(path, await makeBody(signal), signal)) this.#take(chunk);
    } catch (thrown) {
      error = thrown.name === "AbortError" ? null : thrown;
    }
    return this.#end(error) ? error : null;
  }

  #take(chunk) {
    this.#figures.usage = chunk.usage ?? this.#figures.usage;
    for (const choice of chunk.choices) this.#takeChoice(this.#answers[choice.index], choice);
    this.#drawSoon();
  }

  #takeChoice(answer, choice) {
    const { record } = answer;
    const { content, reasoning_content: reasoning = "", tool_calls: calls = [] } = choice.delta ?? {};
    const text = content ?? choice.text ?? "";
    record.text += text;
    record.reasoning += reasoning;
    for (const call of calls) addPiece(record.calls, call);
    const piece = text || reasoning || calls.length > 0;
    if (piece && !this.#firsts.has(answer)) this.#firsts.set(answer, performance.now());
    if (piece) this.#figures.first ||= performance.now();
    if (choice.finish_reason) {
      record.working = false;
      const why = ENDINGS[choice.finish_reason] ?? "done";
      record.facts = this.#facts(answer, `${why} ${this.#since(performance.now())}`);
    } else if (piece) {
      record.facts = this.#facts(answer);
    }
    this.#changed.add(answer);
  }

  /** Ends what is unfinished; returns whether anything was. */
  #end(error) {
    const unfinished = this.#answers.filter(({ record }) => record.working);
    for (const answer of unfinished) {
      answer.record.working = false;
      answer.record.facts = this.#facts(answer, error ? "failed" : "stopped");
      this.#changed.add(answer);
    }
    this.#draw();
    return unfinished.length > 0;
  }

  #draw() {
    const changed = [...this.#changed];
    this.#changed.clear();
    for (const answer of changed) answer.draw();
    this.#onDrawn(changed, this.#figures.toString(this.#answers.length));
  }

  #facts(answer, end = "") {
    const first = this.#firsts.get(answer);
    const parts = [first ? `first token ${this.#since(first)}` : "", end];
    return parts.filter(Boolean).join(" · ");
  }

  #since(moment) {
    return `${((moment - this.#figures.began) / 1000).toFixed(2)} s`;
  }
}
