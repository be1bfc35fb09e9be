// One question and its answer: the record of it, which is saved, and how it is shown.

import { CallsView } from "./calls.js";
import { copyText } from "./clipboard.js";
import { MarkdownView } from "./markdown.js";
import { problemBox } from "./problem.js";

const $ = (selector, from = document) => from.querySelector(selector);

/**
 * Returns the record of a question that has no answer yet.
 *
 * @param {string} asked
 * @param {object} options
 * @param {boolean} options.json whether the answer is to be JSON
 * @param {{name: string, url: string}[]} options.images what goes with the question
 * @param {{id: string, result: string}[] | null} options.results what tools returned, instead of a
 *   question; `asked` then shows it
 */
export function newRecord(asked, { json = false, images = [], results = null } = {}) {
  const answer = { text: "", reasoning: "", calls: [], json };
  return { asked, images, results, ...answer, facts: "waiting", working: true, problem: null };
}

/** Returns the record of an answer as it is after a reload, which ends the request. */
export function restoredRecord(record) {
  if (!record.working) return record;
  return { ...record, working: false, facts: "cut off when the page was reloaded" };
}

/** Shows a record; call `draw` when it has changed. */
export class Answer {
  #markdown = null;
  #calls;
  #folded = false; // by hand: then it stays as it is
  #problem = null; // the one that is shown
  #actions;

  /**
   * @param {ReturnType<typeof newRecord>} record
   * @param {object} actions
   * @param {boolean} actions.markdown whether the answer is Markdown
   * @param {(answer: Answer) => void} actions.retry
   * @param {(answer: Answer) => void} actions.sendResults
   * @param {() => void} actions.giveKey
   */
  constructor(record, actions) {
    this.#actions = actions;
    this.article = $("#answer-template").content.cloneNode(true).firstElementChild;
    this.text = $(".text", this.article);
    this.reasoning = $(".reasoning", this.article);
    $("summary", this.reasoning).addEventListener("click", () => (this.#folded = true));
    this.#calls = new CallsView($(".calls", this.article), () => actions.sendResults(this));
    const copy = $(".copy", this.article);
    copy.addEventListener("click", () => copyText(this.record.text, copy));
    $(".again", this.article).addEventListener("click", () => this.#retry());
    this.#start(record);
  }

  /** Forgets the answer: the question is asked once more. */
  restart(json) {
    const { asked, images, results } = this.record;
    this.#start(newRecord(asked, { json, images, results }));
  }

  /** Shows why there is no answer, or no end of it. */
  fail(problem) {
    this.record.problem = problem;
    this.draw();
  }

  #start(record) {
    this.record = record;
    this.text.replaceChildren();
    this.#calls.clear();
    this.#folded = false;
    const markdown = this.#actions.markdown && !record.json;
    this.#markdown = markdown ? new MarkdownView(this.text) : null;
    this.text.classList.toggle("markdown", markdown);
    this.text.classList.toggle("json", record.json);
    this.article.classList.toggle("after-tools", Boolean(record.results));
    const names = record.images.map(({ name }) => `[${name}]\n`);
    $(".asked", this.article).textContent = names.join("") + record.asked;
    this.draw();
  }

  draw() {
    const { text, calls, facts, working, problem } = this.record;
    this.article.classList.toggle("working", working);
    this.article.ariaBusy = String(working);
    if (this.#markdown) this.#markdown.show(text, !working);
    else this.text.textContent = text;
    this.#drawReasoning();
    this.#calls.show(calls, working);
    $(".facts", this.article).textContent = facts;
    $(".actions", this.article).hidden = working;
    $(".copy", this.article).hidden = !text;
    $(".again", this.article).hidden = Boolean(problem);
    if (problem !== this.#problem) this.#showProblem(problem);
  }

  /** Shows reasoning, open until the answer begins. */
  #drawReasoning() {
    const { reasoning, text, calls, working } = this.record;
    this.reasoning.hidden = !reasoning;
    $("p", this.reasoning).textContent = reasoning.trim();
    if (!this.#folded) this.reasoning.open = working && !text && !calls.length;
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
