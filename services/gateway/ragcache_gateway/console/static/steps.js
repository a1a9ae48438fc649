// Draws the steps of an answer over time, as a table.

import { el, ms, table } from "./dom.js";

// A row of the waterfall. marks are moments within it, as {atMs, label}.
export function step(name, kind, startMs, endMs) {
  return { name, kind, startMs, endMs, predictedMs: null, note: "", marks: [] };
}

export function drawSteps(caption, rows, totalMs, firstTokenMs) {
  // The engine's own times may end later than what the gateway measured.
  const endMs = Math.max(totalMs, 0.001, ...rows.map((row) => row.endMs));
  const share = (value) => `${(100 * value) / endMs}%`;
  const cells = rows.map((row) => [
    el("span", { class: "step" }, row.name, row.note ? el("small", {}, row.note) : null),
    el(
      "div",
      { class: "track", "aria-hidden": "true" },
      el("div", {
        class: `bar ${row.kind}`,
        style: { left: share(row.startMs), width: share(Math.max(0, row.endMs - row.startMs)) },
      }),
      row.marks.map((mark) => el("div", { class: "mark", title: mark.label, style: { left: share(mark.atMs) } })),
      firstTokenMs === null ? null : el("div", { class: "first-token", style: { left: share(firstTokenMs) } }),
    ),
    ms(row.startMs),
    ms(row.endMs - row.startMs),
    ms(row.predictedMs),
  ]);
  const drawn = table(caption, ["Step", "Time line", "Start", "Measured", "Predicted"], cells, "steps");
  const end = firstTokenMs === null ? "" : `First token after ${ms(firstTokenMs)}, the vertical line.`;
  return el("div", {}, drawn, el("p", { class: "hint" }, end));
}
