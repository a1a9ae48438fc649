// Draws the steps of an answer over time, as a table.

import { el, ms, table } from "./dom.js";

const MOST_AFTER_FIRST_TOKEN = 1.4;

// A row of the waterfall. marks are moments within it, as {atMs, label}.
export function step(name, kind, startMs, endMs) {
  return { name, kind, startMs, endMs, predictedMs: null, note: "", marks: [] };
}

// When the time line ends. A long answer is cut, because the steps before the first token matter.
// The engine's own times may end later than what the gateway measured.
export function timeLineEnd(rows, totalMs, firstTokenMs) {
  const lastOf = (some) => Math.max(0.001, ...some.map((row) => row.endMs));
  if (firstTokenMs === null) return Math.max(totalMs, lastOf(rows));
  const before = Math.max(firstTokenMs, lastOf(rows.filter((row) => row.kind !== "answer")));
  return Math.min(Math.max(totalMs, lastOf(rows)), MOST_AFTER_FIRST_TOKEN * before);
}

export function drawSteps(caption, rows, totalMs, firstTokenMs) {
  const endMs = timeLineEnd(rows, totalMs, firstTokenMs);
  const share = (value) => `${(100 * value) / endMs}%`;
  const cells = rows.map((row) => [
    el("span", { class: "step" }, row.name, row.note ? el("small", {}, row.note) : null),
    [
      el(
        "div",
        { class: "track", "aria-hidden": "true" },
        el("div", {
          class: `bar ${row.kind}${row.endMs > endMs ? " cut" : ""}`,
          style: { left: share(row.startMs), width: share(Math.max(0, Math.min(row.endMs, endMs) - row.startMs)) },
        }),
        row.marks.map((mark) => el("div", { class: "mark", title: mark.label, style: { left: share(mark.atMs) } })),
      ),
      firstTokenMs === null ? null : el("div", { class: "first-token", "aria-hidden": "true", style: { "--at": firstTokenMs / endMs } }),
    ],
    ms(row.startMs),
    ms(row.endMs - row.startMs),
    ms(row.predictedMs),
  ]);
  const drawn = table(caption, ["Step", "Time line", "Start", "Measured", "Predicted"], cells, "steps");
  const isCut = rows.some((row) => row.endMs > endMs);
  const cut = isCut ? ` The time line ends after ${ms(endMs)}, so that the steps before it can be seen.` : "";
  const end = firstTokenMs === null ? "" : `First token after ${ms(firstTokenMs)}, the vertical line.${cut}`;
  return el("div", {}, drawn, el("p", { class: "hint" }, end));
}
