// Engines, cache store, collections and savings. History is kept in the page alone.

import { getJson, getStatus, getText } from "./api.js";
import { NOTHING, byId, bytes, count, el, ms, percent, showError, table } from "./dom.js";
import { Series, curves } from "./series.js";

const EVERY_MS = 5000;
const MOST_LINES = 4;
const savingsSeries = new Series();
const engineSeries = new Series();
const tierSeries = new Series();
const precisionSeries = new Series();
const documentSeries = new Series();
let timer = null;

export function startPolling() {
  if (timer !== null) return;
  poll();
  timer = setInterval(poll, EVERY_MS);
}

export function stopPolling() {
  clearInterval(timer);
  timer = null;
}

async function poll() {
  const show = async (id, load, draw) => {
    try {
      byId(id).replaceChildren(...draw(await load()));
    } catch (error) {
      showError(byId(id), error);
    }
  };
  const cache = getJson("v1/cache");
  await Promise.all([
    show("platform-savings", () => getText("metrics"), drawSavings),
    show("platform-engines", getStatus, drawEngines),
    show("platform-cache", () => cache, drawCache),
    show("platform-sources", () => cache, drawSources),
    show("platform-collections", () => getJson("v1/collections"), drawCollections),
  ]);
}

// Sums of one metric in Prometheus' text format by the value of a label.
export function metricBy(text, name, label) {
  const sums = {};
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)\{([^}]*)\} (\S+)$/.exec(line);
    if (!match || match[1] !== name) continue;
    const found = new RegExp(`(?:^|,)${label}="([^"]*)"`).exec(match[2]);
    if (found) sums[found[1]] = (sums[found[1]] ?? 0) + Number(match[3]);
  }
  return sums;
}

// Tokens that were reused and computed, and about how long computing the reused ones takes.
export function savingsOf(text) {
  const tokens = metricBy(text, "ragcache_gateway_prompt_tokens_total", "source");
  const seconds = metricBy(text, "ragcache_gateway_stage_seconds_sum", "stage");
  const of = (...sources) => sources.reduce((sum, source) => sum + (tokens[source] ?? 0), 0);
  const reused = of("local", "loaded", "blended");
  const computed = of("computed", "recomputed");
  const computing = (seconds.prefill ?? 0) + (seconds.recompute ?? 0);
  const share = reused + computed ? reused / (reused + computed) : null;
  return { reused, computed, share, savedMs: computed ? (1000 * computing * reused) / computed : null };
}

function drawSavings(text) {
  const savings = savingsOf(text);
  savingsSeries.push(savings);
  return [
    table("Since the gateway started", ["", "Value"], [
      ["Prompt tokens reused", count(savings.reused)],
      ["Prompt tokens computed", count(savings.computed)],
      ["Share reused", percent(savings.share)],
      ["Computing time saved, about", ms(savings.savedMs)],
    ], "pairs"),
    curves("Share of prompt tokens reused", savingsSeries, [{ name: "share", label: "reused", format: percent }], 1),
    curves("Computing time saved", savingsSeries, [{ name: "savedMs", label: "saved, about", format: ms }]),
  ];
}

function drawEngines(status) {
  const { engine, retriever } = status.parts;
  const rows = engine.endpoints.map((one) => [
    one.address,
    one.model,
    one.ready ? "ready" : one.problem,
    count(one.in_flight),
    count(one.waiting),
    ms(1000 * one.queue_s),
    count(one.decoding),
    count(one.free_tokens),
  ]);
  const total = (name) => engine.endpoints.reduce((sum, one) => sum + one[name], 0);
  engineSeries.push({ inFlight: total("in_flight"), queueMs: 1000 * Math.max(0, ...engine.endpoints.map((one) => one.queue_s)) });
  const head = ["Address", "Model", "State", "Requests of this gateway", "Waiting", "Queue", "Decoding", "Free tokens"];
  return [
    table("Engines", head, rows),
    curves("Requests in flight", engineSeries, [{ name: "inFlight", label: "all engines", format: count }]),
    curves("Queue", engineSeries, [{ name: "queueMs", label: "longest", format: ms }]),
    el("p", {}, `Retriever: ${retriever.ready ? "ready" : retriever.problem}.`),
  ];
}

function drawCache(cache) {
  const misses = Object.entries(cache.misses_by_reason).map(([reason, number]) => [`Misses: ${reason.replaceAll("_", " ")}`, count(number)]);
  const evictions = Object.entries(cache.evictions).map(([tier, number]) => [`Evicted from ${tier}`, count(number)]);
  const precisions = Object.entries(cache.bytes_by_precision).map(([name, size]) => [`Stored as ${name}`, bytes(size)]);
  const used = (size, capacity) => (capacity ? size / capacity : null);
  tierSeries.push({
    memory: used(cache.memory_bytes, cache.memory_capacity_bytes),
    disk: used(cache.disk_bytes, cache.disk_capacity_bytes),
    hitRate: cache.hit_rate,
  });
  const total = Object.values(cache.bytes_by_precision).reduce((sum, size) => sum + size, 0);
  const shares = Object.entries(cache.bytes_by_precision).map(([name, size]) => [name, used(size, total)]);
  precisionSeries.push(Object.fromEntries(shares));
  return [
    table("Shards together", ["", "Value"], [
      ["Variants", count(cache.variants)],
      ["Memory tier", `${bytes(cache.memory_bytes)} of ${bytes(cache.memory_capacity_bytes)}`],
      ["Disk tier", `${bytes(cache.disk_bytes)} of ${bytes(cache.disk_capacity_bytes)}`],
      ["Hit rate", percent(cache.hit_rate)],
      ...misses,
      ...evictions,
      ...precisions,
    ], "pairs"),
    curves("Tiers and hits", tierSeries, [
      { name: "memory", label: "memory tier used", format: percent },
      { name: "disk", label: "disk tier used", format: percent },
      { name: "hitRate", label: "hit rate", format: percent },
    ], 1),
    curves("Precision mix, by bytes", precisionSeries, shares.slice(0, MOST_LINES).map(([name]) => ({ name, label: name, format: percent })), 1),
  ];
}

function drawSources(cache) {
  const rows = cache.sources.map((one) => [one.source, one.state, `${one.silence_s.toFixed(1)} s`, one.problem || NOTHING]);
  return [table("Engines and shards that the gateway follows", ["Source", "State", "Silent for", "Problem"], rows)];
}

function drawCollections(list) {
  const rows = list.data.map((one) => [
    one.name,
    count(one.documents),
    count(one.chunks),
    bytes(one.text_bytes),
    one.remake ? remakeProgress(one) : "current",
  ]);
  const sum = (name) => list.data.reduce((total, one) => total + one[name], 0);
  documentSeries.push({ documents: sum("documents"), chunks: sum("chunks") });
  return [
    table("Collections", ["Name", "Documents", "Chunks", "Text", "State"], rows),
    curves("Documents", documentSeries, [{ name: "documents", label: "documents", format: count }]),
    curves("Chunks", documentSeries, [{ name: "chunks", label: "chunks", format: count }]),
    el("p", {}, ingestWords(documentSeries.points)),
  ];
}

function remakeProgress(collection) {
  const { documents, documents_done: done, reason } = collection.remake;
  const label = `Documents of ${collection.name} prepared again`;
  return [
    el("progress", { max: Math.max(1, documents), value: done, "aria-label": label }),
    el("small", {}, `${count(done)} of ${count(documents)} prepared again: ${reason}`),
  ];
}

// How many documents and chunks have come since the view was opened.
export function ingestWords(points) {
  const first = points[0];
  const last = points.at(-1);
  const seconds = (last.atMs - first.atMs) / 1000;
  const change = (name) => last.values[name] - first.values[name];
  if (seconds < 1 || (!change("documents") && !change("chunks"))) return "No document has come or gone since this view was opened.";
  const signed = (value) => `${value < 0 ? "-" : "+"}${count(Math.abs(value))}`;
  const rate = (change("chunks") / seconds).toFixed(1);
  return `${signed(change("documents"))} documents and ${signed(change("chunks"))} chunks since this view was opened, ${rate} chunks/s.`;
}
