// One mode's side of the page: its answers, and what is typed for the next one.

import { Answer, newRecord, restoredRecord } from "./answer.js";
import { problemBox } from "./problem.js";

/** What a mode shows and keeps. */
export class View {
  #actions;
  #problem = null;

  /**
   * @param {HTMLElement} box where the answers are shown
   * @param {object} options
   * @param {string} options.prompt what the box for the next question says at first
   * @param {string} options.system the system prompt at first
   * @param {object} options.actions what answers can do: see Answer
   */
  constructor(box, { prompt, system, actions }) {
    this.box = box;
    this.prompt = prompt;
    this.system = system;
    this.summary = "";
    this.answers = [];
    this.#actions = actions;
  }

  /** Adds answers to what is asked, which have still to come; `options` are newRecord's. */
  add(asked, options) {
    const added = asked.map((one) => new Answer(newRecord(one, options), this.#actions));
    this.#append(added);
    return added;
  }

  clear() {
    for (const { article } of this.answers) article.remove();
    this.answers = [];
    this.summary = "";
    this.showProblem(null);
  }

  /** Shows a problem of all answers together; null: none. */
  showProblem(problem, onRetry, onKey) {
    this.#problem?.remove();
    this.#problem = problem && problemBox(problem, onRetry, onKey);
    if (problem) this.box.prepend(this.#problem);
  }

  /** Scrolls to the end: always, or if it is nearly there. */
  scroll(always = false) {
    scrollToEnd(this.box, always);
  }

  /** Returns what is saved. */
  state() {
    const answers = this.answers.map(({ record }) => record);
    return { answers, prompt: this.prompt, system: this.system, summary: this.summary };
  }

  restore({ answers, prompt, system, summary }) {
    Object.assign(this, { prompt, system, summary });
    this.#append(answers.map((record) => new Answer(restoredRecord(record), this.#actions)));
  }

  #append(added) {
    this.answers.push(...added);
    this.box.append(...added.map(({ article }) => article));
  }
}

export function scrollToEnd(box, always = false) {
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  if (always || near) box.scrollTop = box.scrollHeight;
}
