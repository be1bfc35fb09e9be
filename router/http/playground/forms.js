// What answers must be: the schema that they keep to, and the tools that may be called.

const $ = (selector, from = document) => from.querySelector(selector);

export const CONTROLS = ["schema", "tools", "tool_choice"];

const FIELDS = { schema: readSchema, tools: readTools };
const REFUSED = { response_format: "schema", tools: "tools", tool_choice: "tools" };
const RULES = ["auto", "required", "none"];
const NAMED = "function "; // before a tool's name, which may be that of a rule

/** Returns the argument for the form of the answer, which every mode has. */
export function schemaArgument() {
  const schema = read("schema").value;
  if (!schema) return {};
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

/**
 * Returns the arguments about tools, which a chat has.
 *
 * @param {object} options
 * @param {boolean} options.answering whether a tool has returned something: then the model is not
 *   made to call one again
 */
export function toolArguments({ answering }) {
  const tools = read("tools").value;
  if (!tools) return {};
  return { tools, tool_choice: answering && $("#tool_choice").value !== "none" ? "auto" : toolChoice() };
}

export function hasSchema() {
  return Boolean(read("schema").value);
}

/** Returns what is set, in words. */
export function summary() {
  const count = read("tools").value?.length;
  const tools = count && !$("#tools").disabled ? `${count} tool${count > 1 ? "s" : ""}` : "";
  return [hasSchema() ? "JSON Schema" : "", tools].filter(Boolean);
}

/** Shows the server's words at the field that it refused; returns whether there is one. */
export function markRefused(argument, message) {
  const field = REFUSED[/^\w+/.exec(argument ?? "")?.[0]];
  if (field) show(field, message);
  return Boolean(field);
}

/** Has only the fields checked that the mode has. */
export function choose(mode) {
  $("#tools").disabled = mode !== "chat";
}

/** Brings what depends on the fields in line with them. */
export function refresh() {
  for (const field of Object.keys(FIELDS)) $(`#${field}`).setCustomValidity(read(field).error ?? "");
  offerTools();
}

export function start() {
  for (const field of Object.keys(FIELDS)) {
    const area = $(`#${field}`);
    area.addEventListener("input", () => {
      show(field, "");
      refresh();
    });
    for (const type of ["change", "invalid"])
      area.addEventListener(type, () => show(field, area.validationMessage));
  }
  refresh();
}

/** Returns a field's value, undefined if it is empty, or what is wrong with it. */
function read(field) {
  const text = $(`#${field}`).value.trim();
  if (!text) return {};
  try {
    return { value: FIELDS[field](JSON.parse(text)) };
  } catch (error) {
    const what = error instanceof SyntaxError ? `This is not JSON: ${error.message}` : error.message;
    return { error: what };
  }
}

function readSchema(value) {
  if (!isObject(value)) throw new Error("A JSON Schema is an object.");
  return value;
}

/** Returns tools as the API has them; one alone, and functions without their wrapping, are taken. */
function readTools(value) {
  const tools = (Array.isArray(value) ? value : [value]).map((tool, i) => {
    const wrapped = isObject(tool) && !("function" in tool) ? { type: "function", function: tool } : tool;
    if (typeof wrapped?.function?.name !== "string")
      throw new Error(`Tool ${i + 1} needs a name: {"name": …, "description": …, "parameters": …}`);
    return wrapped;
  });
  return tools.length ? tools : undefined;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function toolChoice() {
  const chosen = $("#tool_choice").value;
  if (!chosen.startsWith(NAMED)) return chosen;
  return { type: "function", function: { name: chosen.slice(NAMED.length) } };
}

/** Offers the tools to be chosen from; while the field is wrong, those that were there. */
function offerTools() {
  const { value, error } = read("tools");
  if (error) return;
  const named = (value ?? []).map((tool) => NAMED + tool.function.name);
  const select = $("#tool_choice");
  const wanted = [...RULES, ...named];
  if (wanted.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map((one) => new Option(one.replace(NAMED, ""), one)));
  if (wanted.includes(chosen)) select.value = chosen;
}

function show(field, message) {
  $(`#${field}`).ariaInvalid = message ? "true" : null;
  $(`#${field}-wrong`).textContent = message;
}
