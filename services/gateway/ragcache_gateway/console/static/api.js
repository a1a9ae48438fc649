// Requests to the gateway that serves this page, with the key of its user.

const KEY = "ragcache.key";
const STAGE = "ragcache.stage";

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function savedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function getJson(path) {
  return (await send(path, {})).json();
}

export async function getText(path) {
  return (await send(path, {})).text();
}

// Whether questions can be answered. A gateway that cannot answer says why with status 503.
export async function getStatus() {
  const response = await fetch("v1/status", { headers: headers() });
  const body = await response.json();
  if (!response.ok && body.parts === undefined) throw errorOf(response.status, body);
  return body;
}

// Ask a question; calls onStage with each stage before the first token, then onEvent with each
// event of the answer, as they arrive.
export async function ask(body, onEvent, onStage, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, ragcache: { ...body.ragcache, events: true } }),
    signal,
  });
  const events = new EventParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    const text = done ? decoder.decode() : decoder.decode(value, { stream: true });
    for (const { name, data } of events.push(text)) {
      if (data.error) throw new RequestError(data.error.code ?? 500, data.error.message);
      if (name === STAGE) onStage(data);
      else onEvent(data);
    }
    if (done) return;
  }
}

// Splits a stream of server-sent events into {name, data}; data is JSON. The end mark is none.
export class EventParser {
  #rest = "";

  push(text) {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop();
    return blocks
      .map((block) => ({ name: field(block, "event"), text: field(block, "data") }))
      .filter(({ text: data }) => data && data !== "[DONE]")
      .map(({ name, text: data }) => ({ name, data: JSON.parse(data) }));
  }
}

function field(block, name) {
  const line = block.split("\n").find((one) => one.startsWith(`${name}: `));
  return line === undefined ? "" : line.slice(name.length + 2);
}

async function send(path, options) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (!response.ok) throw errorOf(response.status, await response.json().catch(() => ({})));
  return response;
}

function headers() {
  const key = savedKey();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function errorOf(status, body) {
  const message = body.error?.message ?? `the gateway answered with status ${status}`;
  return new RequestError(status, message);
}
