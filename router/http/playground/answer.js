// One question and its answer: the record of it, which is saved, and how it is shown.

import { copyText } from "./clipboard.js";
import { MarkdownView } from "./markdown.js";
import { problemBox } from "./problem.js";

const $ = (selector, from = document) => from.querySelector(selector);

/** Returns the record of a question that has no answer yet. */
export function newRecord(asked) {
  return { asked, text: "", facts: "waiting", working: true, problem: null };
}

/** Returns the record of an answer as it is after a reload, which ends the request. */
export function restoredRecord(record) {
  if (!record.working) return record;
  return { ...record, working: false, facts: "cut off when the page was reloaded" };
}

/** Shows a record; call `draw` when it has changed. */
export class Answer {
  #markdown = null;
  #problem = null; // the one that is shown
  #actions;

  /**
   * @param {ReturnType<typeof newRecord>} record
   * @param {object} actions
   * @param {boolean} actions.markdown whether the answer is Markdown
   * @param {(answer: Answer) => void} actions.retry
   * @param {() => void} actions.giveKey
   */
  constructor(record, actions) {
    this.#actions = actions;
    this.article = $("#answer-template").content.cloneNode(true).firstElementChild;
    this.text = $(".text", this.article);
    if (actions.markdown) this.text.classList.add("markdown");
    const copy = $(".copy", this.article);
    copy.addEventListener("click", () => copyText(this.record.text, copy));
    $(".again", this.article).addEventListener("click", () => this.#retry());
    this.#start(record);
  }

  /** Forgets the answer: the question is asked once more. */
  restart() {
    this.#start(newRecord(this.record.asked));
  }

  /** Shows why there is no answer, or no end of it. */
  fail(problem) {
    this.record.problem = problem;
    this.draw();
  }

  #start(record) {
    this.record = record;
    this.text.replaceChildren();
    this.#markdown = this.#actions.markdown ? new MarkdownView(this.text) : null;
    $(".asked", this.article).textContent = record.asked;
    this.draw();
  }

  draw() {
    const { text, facts, working, problem } = this.record;
    this.article.classList.toggle("working", working);
    this.article.ariaBusy = String(working);
    if (this.#markdown) this.#markdown.show(text, !working);
    else this.text.textContent = text;
    $(".facts", this.article).textContent = facts;
    $(".actions", this.article).hidden = working;
    $(".copy", this.article).hidden = !text;
    $(".again", this.article).hidden = Boolean(problem);
    if (problem !== this.#problem) this.#showProblem(problem);
  }

  #showProblem(problem) {
    this.#problem = problem;
    $(".problem", this.article)?.remove();
    if (problem) this.text.after(problemBox(problem, () => this.#retry(), this.#actions.giveKey));
  }

  #retry() {
    this.#actions.retry(this);
  }
}
