// One answer as it arrives: its text, its waterfall and the parts of its prompt.

import { ask } from "./api.js";
import { NOTHING, count, el, errorText, ms, percent, table } from "./dom.js";
import { bottleneck, explainParts, pagesOf, savings, waterfall } from "./explain.js";
import { liveWaterfall, stageItem } from "./live.js";
import { drawSteps } from "./steps.js";

const KINDS = [
  ["cached", "cached in the engine"],
  ["loaded", "loaded, exact"],
  ["blended", "loaded, blended"],
  ["recomputed", "recomputed"],
  ["computed", "computed"],
  ["unknown", "unknown"],
];
const REFRESH_MS = 100;

// Ask, and draw into a target while the answer arrives. Returns what came, or null if it failed.
export async function showAnswer(target, body, signal) {
  const startedMs = performance.now();
  const text = el("p", { class: "answer-text", "aria-live": "off" });
  const times = el("div", {});
  const details = el("div", {});
  const citations = el("div", {});
  const stageList = el("ol", { class: "stages" });
  const stageDetails = el("details", { open: true }, el("summary", {}, "Stages as they came"), stageList);
  // Beside another answer it is below the heading of its side.
  const heading = el(target.closest(".sides") ? "h4" : "h3", {}, "Answer");
  target.replaceChildren(heading, text, citations, times, stageDetails, details);
  const stages = [];
  const result = { text: "", citations: [], timing: null, cache: null, explanation: null, usage: null };
  let firstTokenMs = null;
  const drawLive = () => times.replaceChildren(...liveWaterfall(stages, performance.now() - startedMs, firstTokenMs));
  drawLive();
  const timer = setInterval(drawLive, REFRESH_MS);
  try {
    await ask(
      body,
      (event) => {
        const word = event.choices?.[0]?.delta?.content;
        if (firstTokenMs === null) firstTokenMs = performance.now() - startedMs;
        if (word) {
          result.text += word;
          text.textContent = result.text;
        }
        take(result, event);
      },
      (stage) => {
        stages.push(stage);
        stageList.append(stageItem(stage));
        drawLive();
      },
      signal,
    );
  } catch (error) {
    clearInterval(timer);
    times.replaceChildren();
    target.append(el("p", { class: "error", role: "alert" }, errorText(error)));
    return null;
  }
  clearInterval(timer);
  stageDetails.open = false;
  if (result.timing) {
    times.replaceChildren(waterfallTable(result.timing, result.explanation));
    details.replaceChildren(...partsSection(result));
  }
  citations.replaceChildren(citationList(result.citations));
  return result;
}

function take(result, event) {
  const extension = event.ragcache ?? {};
  result.citations = extension.citations ?? result.citations;
  result.timing = extension.timing_ms ?? result.timing;
  result.cache = extension.cache ?? result.cache;
  result.explanation = extension.explanation ?? result.explanation;
  result.usage = event.usage ?? result.usage;
}

function citationList(citations) {
  if (!citations.length) return "";
  const items = citations.map((one) =>
    el("li", {}, `${one.title || one.document_id} `, el("code", {}, one.chunk), `${pagesOf(one)} score ${one.score.toFixed(2)}`),
  );
  return el("details", {}, el("summary", {}, `${citations.length} sources`), el("ol", {}, items));
}

function waterfallTable(timing, explanation) {
  const rows = waterfall(timing, explanation);
  const slowest = bottleneck(rows, timing.first_token);
  const summary = slowest
    ? `${slowest.name} took most of the time to the first token: ${ms(slowest.durationMs)} of ${ms(timing.first_token)} (${percent(slowest.share)}).`
    : "The engine has no record of the time to the first token.";
  return el(
    "section",
    { class: "waterfall" },
    el("p", { class: "summary" }, summary),
    drawSteps("Waterfall of this answer", rows, timing.total, timing.first_token),
  );
}

function partsSection(result) {
  const { explanation } = result;
  if (!explanation) return [el("p", {}, "The gateway sent no explanation of this answer.")];
  const saved = savings(explanation);
  const parts = explainParts(explanation);
  const misses = parts.filter((part) => part.isMiss);
  const time = saved.savedMs === null ? "" : ` That is about ${ms(saved.savedMs)} of computing.`;
  const rows = parts.map((part) => [
    el("span", { class: "step" }, part.name, part.detail ? el("small", {}, part.detail) : null),
    tokenBar(part),
    plannedCell(part.planned),
    outcomeCell(part),
    part.why || NOTHING,
    ms(part.measuredMs),
    ms(part.predictedMs),
  ]);
  return [
    el("p", { class: "summary" }, `${count(saved.reused)} of ${count(explanation.prompt_tokens)} prompt tokens (${percent(saved.share)}) were reused.${time} ${missSummary(misses)}`),
    legend(),
    table("Parts of the prompt, in its order", ["Part", "Tokens", "Planned", "Outcome", "Why", "Computing cost", "Predicted"], rows, "parts"),
    el("p", { class: "hint" }, "The cost of a part is its share, by tokens, of the engine's time for computing."),
  ];
}

function plannedCell(planned) {
  if (planned === null) return NOTHING;
  const from = planned.from ? el("small", {}, `from ${planned.from}`) : null;
  return el("div", {}, planned.word, from, el("small", {}, planned.reason));
}

function outcomeCell(part) {
  const word = part.isMiss && part.kind === "computed" ? "Miss" : part.outcome;
  return el(
    "div",
    {},
    el("span", { class: `badge ${part.kind}` }, word),
    part.tier ? el("small", {}, `from ${part.tier}`) : null,
    part.planned && !part.planned.isKept ? el("small", { class: "unplanned" }, "not as planned") : null,
  );
}

function missSummary(misses) {
  if (!misses.length) return "No chunk missed.";
  const known = misses.filter((part) => part.measuredMs !== null);
  const them = misses.length === 1 ? "It" : "They";
  const cost = known.length ? ` ${them} cost ${ms(known.reduce((sum, part) => sum + part.measuredMs, 0))}.` : "";
  const noun = misses.length === 1 ? "chunk was" : "chunks were";
  return `${misses.length} ${noun} computed at least in part.${cost}`;
}

function tokenBar(part) {
  const kinds = KINDS.filter(([kind]) => part.tokensByKind[kind] > 0);
  const bars = kinds.map(([kind]) =>
    el("div", { class: `bar ${kind}`, style: { "flex-grow": part.tokensByKind[kind] } }),
  );
  const words = kinds.map(([kind, name]) => `${part.tokensByKind[kind]} ${name}`).join(", ");
  return el("div", {}, el("div", { class: "tokens", "aria-hidden": "true" }, bars), el("small", {}, words));
}

function legend() {
  const items = KINDS.map(([kind, name]) => el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name));
  return el("ul", { class: "legend", "aria-label": "Colours of the tokens" }, items);
}
