// An answer before its first token: the stages that the gateway tells, as rows of a waterfall.

import { count, el, ms, percent } from "./dom.js";
import { drawSteps, step } from "./steps.js";

const ACTIONS = [
  ["cached", "cached in the engine"],
  ["load", "to load"],
  ["blend", "to blend"],
  ["compute", "to compute"],
];

const GUESSES = {
  started: "A guess is computed while the search runs",
  kept: "The guess is kept: the hits are the same",
  cancelled: "The guess is cancelled: the hits have changed",
  "warm-up": "The prompt's beginning is computed while the search runs",
  confirmed: "The guess is confirmed: it was the question's prompt",
  wrong: "The guess was wrong: the prompt is another one",
  failed: "The guess failed in the engine",
};

// What a stage says, in words.
export function stageWords(stage) {
  switch (stage.stage) {
    case "search_begun":
      return stage.search === 1 ? "The search has begun" : `Search ${stage.search} has begun`;
    case "search":
      return stage.final
        ? `The search has ended with ${hits(stage)}`
        : `${percent(stage.progress)} searched: ${hits(stage)}, final with a probability of ${percent(stage.final_probability)}`;
    case "guess":
      return `${GUESSES[stage.outcome] ?? stage.outcome} (${count(stage.tokens)} tokens)`;
    case "plan":
      return `The plan is made: ${planWords(stage)}`;
    case "engine":
      return `The engine ${stage.engine} has accepted the request`;
    case "first_token":
      return "The first token has come";
    default:
      return stage.stage;
  }
}

function hits(stage) {
  return `${stage.hits} ${stage.hits === 1 ? "hit" : "hits"}`;
}

function planWords(plan) {
  const chunks = plan.parts.filter((part) => part.chunk !== null);
  const counts = ACTIONS.map(([action, words]) => [chunks.filter((part) => part.planned === action).length, words]);
  const known = counts.filter(([number]) => number > 0).map(([number, words]) => `${number} ${words}`);
  const time = plan.predicted_ms ? `, predicted ${ms(plan.predicted_ms.total)}` : "";
  return `${chunks.length} ${chunks.length === 1 ? "chunk" : "chunks"} (${known.join(", ") || "none"}), ${count(plan.prompt_tokens)} tokens${time}`;
}

// Rows of the waterfall at a time, from the stages until then. Without stages it is one row.
export function liveRows(stages, nowMs, firstTokenMs) {
  const rows = [];
  const endMs = firstTokenMs ?? nowMs;
  let search = null;
  let guess = null;
  let planned = null;
  let accepted = null;
  let searchedMs = null;
  for (const stage of stages) {
    const at = stage.elapsed_ms;
    if (stage.stage === "search_begun") {
      search = add(rows, stage.search === 1 ? "Search" : `Search ${stage.search}`, "search", at, endMs);
    } else if (stage.stage === "search" && search) {
      search.marks.push({ atMs: at, label: stageWords(stage) });
      search.note = stage.final ? hits(stage) : `${hits(stage)}, ${percent(stage.final_probability)} final`;
      if (stage.final) searchedMs = search.endMs = at;
    } else if (stage.stage === "guess") {
      if (stage.outcome === "started" || stage.outcome === "warm-up") {
        if (guess) guess.endMs = Math.min(guess.endMs, at);
        guess = add(rows, stage.outcome === "started" ? "Speculation" : "Speculation, prompt's beginning", "speculation", at, endMs);
      }
      if (guess) {
        guess.note = `${stage.outcome}, ${count(stage.tokens)} tokens`;
        if (!["started", "kept", "warm-up"].includes(stage.outcome)) guess.endMs = Math.min(guess.endMs, at);
      }
    } else if (stage.stage === "plan") {
      if (guess) guess.endMs = Math.min(guess.endMs, at);
      planned = add(rows, "Build and plan the prompt", "gateway", searchedMs ?? 0, at);
      planned.note = planWords(stage);
      accepted = add(rows, "Engine: load, recompute and prefill", "prefill", at, endMs);
      accepted.predictedMs = stage.predicted_ms?.total ?? null;
      accepted.note = "sent";
    } else if (stage.stage === "engine" && accepted) {
      accepted.note = `accepted by ${stage.engine}`;
      accepted.marks.push({ atMs: at, label: stageWords(stage) });
    }
  }
  if (!rows.length) add(rows, "Search, plan and prefill", "prefill", 0, endMs);
  if (searchedMs !== null && !planned && firstTokenMs === null) {
    add(rows, "Build and plan the prompt", "gateway", searchedMs, nowMs);
  }
  if (firstTokenMs !== null) add(rows, "Generate the answer", "answer", firstTokenMs, nowMs);
  return rows;
}

function add(rows, name, kind, startMs, endMs) {
  const row = step(name, kind, startMs, Math.max(startMs, endMs));
  rows.push(row);
  return row;
}

// The waterfall and a clock while an answer is under way.
export function liveWaterfall(stages, nowMs, firstTokenMs) {
  return [
    el("p", { class: "clock", role: "timer" }, `${(nowMs / 1000).toFixed(1)} s`),
    drawSteps("Waterfall, as it runs", liveRows(stages, nowMs, firstTokenMs), nowMs, firstTokenMs),
  ];
}

// What has happened so far, one line for each stage.
export function stageItem(stage) {
  return el("li", {}, el("span", { class: "at" }, ms(stage.elapsed_ms)), ` ${stageWords(stage)}`);
}
