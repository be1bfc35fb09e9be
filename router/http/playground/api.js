// The router's HTTP API, as this page uses it.

const KEY = "octavo-key";

/** A call that failed; `status` is 0 if there was no HTTP answer. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param; // the argument at fault
    this.retryAfter = retryAfter; // seconds
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value.trim());
}

export async function get(path) {
  return (await call(path, { headers: headers() })).json();
}

export async function post(path, body, signal) {
  return (await call(path, { ...posting(body), signal })).json();
}

/** Yields a stream's chunks as they come; `signal` cancels the request. */
export async function* stream(path, body, signal) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const request = posting({ ...body, stream: true, stream_options: options });
  const response = await call(path, { ...request, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { param: chunk.error.param });
    yield chunk;
  }
  throw cut();
}

/** Yields the data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : cut();
    });
    if (done) return;
    pending += value;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    yield* parts.map((part) => part.replace(/^data: /, ""));
  }
}

function cut() {
  return new ApiError("The connection was lost before the answer was complete.");
}

function headers() {
  return key() ? { Authorization: `Bearer ${key()}` } : {};
}

function posting(body) {
  return {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
}

async function call(path, request) {
  const response = await fetch(path, request).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Check that it is running, then try again.");
  });
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error;
  throw new ApiError(error?.message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    param: error?.param,
    retryAfter: retryAfter(response.headers),
  });
}

function retryAfter(answered) {
  const milliseconds = Number(answered.get("Retry-After-Ms"));
  return milliseconds / 1000 || Number(answered.get("Retry-After")) || null;
}
