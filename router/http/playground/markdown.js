// Markdown as DOM nodes. marked's lexer reads it; nodes are made of its tokens with createElement and
// text nodes alone, so no text of a model is ever parsed as HTML. Nothing here makes the browser
// fetch: images become links, and links lead to http and https only.

import { copyText } from "./clipboard.js";
import { Lexer } from "./vendor/marked/marked.esm.js";

const OPTIONS = { gfm: true, breaks: true };
const MAX_DEPTH = 24; // of nested lists and quotes; what is deeper is shown as it was written
const ENTITIES = new Map(
  Object.entries({ amp: "&", apos: "'", gt: ">", lt: "<", nbsp: "\u00a0", quot: '"' }),
);
const PLAIN = { blockquote: "blockquote", del: "del", em: "em", paragraph: "p", strong: "strong" };
const UNDERLINE = /\n *(?:-+|=+) *$/; // what may still become a list item must not flash as a heading

/** Shows a text that grows. Blocks that are complete are neither read nor sampled again. */
export class MarkdownView {
  #box;
  #blocks = []; // { token, nodes } of each block that is shown
  #settled = 0; // how many of them cannot change any more
  #offset = 0; // where the text of the others begins

  constructor(box) {
    this.#box = box;
  }

  /**
   * Shows `source`, which begins with what was shown before.
   *
   * @param {string} source
   * @param {boolean} complete reads it as a whole: links may be defined after their use
   */
  show(source, complete) {
    const unix = source.replace(/\r\n?/g, "\n");
    const text = complete ? unix : unix.replace(UNDERLINE, "");
    if (complete) this.#settled = this.#offset = 0;
    const tokens = lex(text.slice(this.#offset));
    const redraw = complete && tokens.some((token) => token.type === "def");
    const sampled = tokens.filter((token) => token.type !== "space");
    sampled.forEach((token, i) => this.#draw(this.#settled + i, token, redraw));
    for (const block of this.#blocks.splice(this.#settled + sampled.length))
      for (const node of block.nodes) node.remove();
    if (!complete) this.#settle(text, tokens);
  }

  #draw(i, token, redraw) {
    const old = this.#blocks[i];
    if (old && !redraw && old.token.type === token.type) {
      if (old.token.raw === token.raw) return;
      if (token.type === "code" && updateCode(old.nodes[0], old.token, token)) {
        old.token = token;
        return;
      }
    }
    const nodes = blockNodes(token, 0);
    const next = this.#blocks.slice(i + 1).find((block) => block.nodes.length)?.nodes[0] ?? null;
    for (const node of old?.nodes ?? []) node.remove();
    for (const node of nodes) this.#box.insertBefore(node, next);
    this.#blocks[i] = { token, nodes };
  }

  /** Only the last block can still change: more text may belong to it. */
  #settle(text, tokens) {
    const last = tokens.findLastIndex((token) => token.type !== "space");
    for (const token of tokens.slice(0, Math.max(last, 0))) {
      if (!text.startsWith(token.raw, this.#offset)) return;
      this.#offset += token.raw.length;
      if (token.type !== "space") this.#settled += 1;
    }
  }
}

/** Returns the tokens of the text's blocks; a text that cannot be read is one block, as it stands. */
function lex(text) {
  try {
    return new Lexer(OPTIONS).lex(text);
  } catch {
    return [{ type: "html", raw: text }]; // nested too deeply for the lexer's recursion
  }
}

function element(tag, children = [], properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function blockNodes(token, depth) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "code":
      return [codeBlock(token)];
    case "heading": // the page has levels 1 and 2
      return [element(`h${Math.min(token.depth + 2, 6)}`, inside(token, depth))];
    case "hr":
      return [element("hr")];
    case "html":
      return [element("p", [token.raw.trimEnd()], { className: "raw" })];
    case "list":
      return [list(token, depth)];
    case "table":
      return [table(token, depth)];
    case "checkbox":
      return [element("input", [], { type: "checkbox", checked: token.checked, disabled: true })];
    default:
      return inlineNodes(token, depth);
  }
}

function inlineNodes(token, depth) {
  switch (token.type) {
    case "br":
      return [element("br")];
    case "codespan":
      return [element("code", [token.text])];
    case "html":
      return [/^<br\s*\/?>$/i.test(token.raw) ? element("br") : token.raw];
    case "image":
      return link(token.href, [token.text || token.href]);
    case "link":
      return link(token.href, inside(token, depth));
    case "escape":
      return [token.text];
  }
  if (token.type in PLAIN) return [element(PLAIN[token.type], inside(token, depth))];
  return token.tokens ? inside(token, depth) : [withoutEntities(token.text ?? token.raw)];
}

function inside(token, depth) {
  if (depth >= MAX_DEPTH) return [token.raw];
  return token.tokens.flatMap((child) => blockOrInline(child, depth + 1));
}

/** HTML is a block of its own only if the lexer says so. */
function blockOrInline(token, depth) {
  const inline = token.type === "html" && !token.block;
  return inline ? inlineNodes(token, depth) : blockNodes(token, depth);
}

function list(token, depth) {
  const items = token.items.map((item) =>
    element("li", inside(item, depth), { className: item.task ? "task" : "" }),
  );
  return element(token.ordered ? "ol" : "ul", items, token.ordered ? { start: token.start } : {});
}

function table(token, depth) {
  const row = (cells, tag) => element("tr", cells.map((cell) => tableCell(cell, tag, depth)));
  const head = element("thead", [row(token.header, "th")]);
  const body = element("tbody", token.rows.map((cells) => row(cells, "td")));
  const wide = element("div", [element("table", [head, body])], { className: "wide", tabIndex: 0 });
  wide.role = "region";
  wide.ariaLabel = "Table";
  return wide;
}

function tableCell(cell, tag, depth) {
  const made = element(tag, cell.tokens.flatMap((token) => inlineNodes(token, depth + 1)));
  if (cell.align) made.dataset.align = cell.align;
  return made;
}

function codeBlock(token) {
  const code = element("code", [document.createTextNode(token.text)]);
  const button = element("button", ["Copy"], { type: "button", className: "quiet" });
  button.ariaLabel = "Copy the code";
  button.addEventListener("click", () => copyText(code.textContent, button));
  const language = element("span", [(token.lang ?? "").split(/\s/)[0]]);
  const bar = element("div", [language, button], { className: "code-bar" });
  return element("div", [bar, element("pre", [code], { tabIndex: 0 })], { className: "code" });
}

/** Changes a code block's text in place, so that its button keeps the focus; returns whether it did. */
function updateCode(box, old, token) {
  if (old.lang !== token.lang) return false;
  const text = box.querySelector("code").firstChild;
  if (token.text.startsWith(old.text)) text.appendData(token.text.slice(old.text.length));
  else text.data = token.text;
  return true;
}

/** Returns a link, or what it shows if it leads elsewhere than to http or https. */
function link(href, children) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!["http:", "https:"].includes(url?.protocol)) return children;
  const properties = { href: url.href, title: url.href, rel: "noopener noreferrer" };
  return [element("a", children, { ...properties, target: "_blank" })];
}

function withoutEntities(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (whole, decimal, hex, name) => {
    if (name) return ENTITIES.get(name) ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
