// Curves of the latest figures. They exist only while the page is open.

import { el } from "./dom.js";

export const MOST_POINTS = 300;
const WIDTH = 240;
const HEIGHT = 60;
const EDGE = 2;

// The latest points of some figures: {atMs, values}, oldest first.
export class Series {
  #points = [];

  push(values, atMs = performance.now()) {
    this.#points.push({ atMs, values });
    if (this.#points.length > MOST_POINTS) this.#points.shift();
  }

  get points() {
    return this.#points;
  }
}

// Points of a polyline for one figure; "" if it is not known at any time. Unknown points are left out.
export function polyline(points, name, top) {
  const known = points.filter((point) => point.values[name] !== null && point.values[name] !== undefined);
  if (!known.length) return "";
  const first = points[0].atMs;
  const span = points.at(-1).atMs - first;
  const x = (atMs) => (span > 0 ? (WIDTH * (atMs - first)) / span : WIDTH);
  const y = (value) => HEIGHT - EDGE - ((HEIGHT - 2 * EDGE) * Math.min(value, top)) / (top || 1);
  const drawn = known.map((point) => `${x(point.atMs).toFixed(1)},${y(point.values[name]).toFixed(1)}`);
  if (drawn.length === 1) drawn.unshift(`0,${y(known[0].values[name]).toFixed(1)}`);
  return drawn.join(" ");
}

// A drawing of several figures, with their latest values as words.
// lines: {name, label, format}. top: the value at the upper edge; null: the highest one.
export function curves(title, series, lines, top = null) {
  const { points } = series;
  const values = points.flatMap((point) => lines.map((line) => point.values[line.name] ?? 0));
  const edge = top ?? Math.max(0, ...values);
  const latest = lines.map((line) => `${line.label} ${line.format(points.at(-1)?.values[line.name])}`);
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    class: "curve",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `${title}, latest: ${latest.join(", ")}`,
  });
  for (const [i, line] of lines.entries()) {
    const drawn = polyline(points, line.name, edge);
    if (drawn) drawing.append(svg("polyline", { class: `line-${i}`, points: drawn }));
  }
  const items = lines.map((line, i) => el("li", {}, key(i), latest[i]));
  return el(
    "figure",
    { class: "curves" },
    el("figcaption", {}, `${title}${duration(points)}`),
    drawing,
    el("ul", { class: "legend" }, items),
  );
}

function duration(points) {
  const seconds = points.length > 1 ? Math.round((points.at(-1).atMs - points[0].atMs) / 1000) : 0;
  if (seconds < 1) return "";
  return seconds < 120 ? `, last ${seconds} s` : `, last ${Math.round(seconds / 60)} min`;
}

// The pattern of a line, because colours alone do not tell lines apart.
function key(i) {
  const drawing = svg("svg", { viewBox: "0 0 24 8", class: "curve-key", "aria-hidden": "true" });
  drawing.append(svg("polyline", { class: `line-${i}`, points: "0,4 24,4" }));
  return drawing;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
