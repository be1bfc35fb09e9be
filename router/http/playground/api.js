// The router's HTTP API, as this page uses it.

const KEY = "octavo-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value.trim());
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  return (await checked(response)).json();
}

export async function post(path, body) {
  return (await checked(await fetch(path, posting(body)))).json();
}

/** Yields a stream's chunks as they come; `signal` cancels the request. */
export async function* stream(path, body, signal) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const request = posting({ ...body, stream: true, stream_options: options });
  const response = await checked(await fetch(path, { ...request, signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "the connection was lost");
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error.message);
      yield chunk;
    }
  }
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

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? response.statusText);
}
