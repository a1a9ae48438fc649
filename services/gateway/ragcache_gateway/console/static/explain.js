// What an answer's times and parts mean. Pure functions of the gateway's JSON.

import { copyWords } from "./dom.js";
import { step } from "./steps.js";

const OUTCOME_WORDS = {
  cached: "Cached",
  loaded: "Loaded",
  blended: "Blended",
  computed: "Computed",
  unknown: "Unknown",
};

// What the gateway can plan for a part: its word, and the outcome that follows if all goes as planned.
const PLANS = {
  cached: { word: "Cached", outcome: "cached" },
  load: { word: "Load", outcome: "loaded" },
  blend: { word: "Blend", outcome: "blended" },
  compute: { word: "Compute", outcome: "computed" },
};

const GUESS_WORDS = {
  confirmed: "confirmed",
  wrong: "wrong prompt",
  failed: "failed",
  abandoned: "abandoned",
  "warm-up": "prompt's beginning",
};

const PLAN_WORDS = {
  resident: "It is in the engine's prefix cache.",
  stored: "It is stored after the same prefix.",
  other_prefix: "It is stored, but only after another prefix.",
  not_stored: "It is not stored.",
  after_gap: "It is stored, but a chunk before it is not.",
  other_engine: "Only another engine has it.",
  slower: "Computing it is predicted to be faster.",
  reuse_off: "Reuse is off.",
};

const MISS_WORDS = {
  never_stored: "It was never stored after these chunks.",
  "never stored": "It was never stored after these chunks.",
  evicted: "It was evicted for lack of space.",
  deleted: "Its document was changed or deleted.",
  corrupt: "Its checksum did not match, so it was not used.",
  approximate: "It is stored, but only as an approximate variant.",
  "other precision": "It is stored with less precision than exact reuse allows.",
  "timed out": "The store missed its deadline.",
  lost: "The shard that has it does not answer.",
  "after a missing chunk": "A chunk before it is missing, and exact reuse needs all of them.",
  "did not arrive in time": "The load missed its deadline.",
  "too short to load": "It is too short to be worth a load.",
  "reuse is off": "The request set reuse to off.",
  "system prompt changes with each request":
    "The system prompt before it changes with each request, so nothing after it can be loaded again. " +
    "The layout documents-first puts it after the documents.",
};

// Rows of the waterfall: {name, kind, startMs, endMs, predictedMs, note, marks}, in order of time.
export function waterfall(timing, explanation) {
  const planned = explanation?.plan?.predicted_ms ?? {};
  const rows = [];
  const searchStart = timing.embed;
  const stages = explanation?.stages ?? [];
  rows.push(step("Embed the question", "search", 0, timing.embed));
  rows.push({
    ...step("Search", "search", searchStart, Math.max(searchStart, timing.retrieve)),
    note: `${timing.stages} ${timing.stages === 1 ? "stage" : "stages"}`,
    marks: stages.map((stage, i) => ({
      atMs: stage.elapsed_ms,
      label: `stage ${i + 1}: ${stage.hits} hits${stage.final ? ", final" : ""}`,
    })),
  });
  for (const guess of explanation?.speculation ?? []) {
    rows.push({
      ...step("Speculation", "speculation", Math.max(0, guess.start_ms), guess.end_ms),
      note: `${GUESS_WORDS[guess.outcome]}, ${guess.tokens} tokens, ${guess.wasted_tokens} wasted`,
    });
  }
  let at = timing.retrieve;
  const next = (name, kind, duration, predicted) => {
    if (duration === null || duration === undefined) return;
    rows.push({ ...step(name, kind, at, at + duration), predictedMs: predicted ?? null });
    at += duration;
  };
  next("Build and plan the prompt", "gateway", timing.tokenize);
  next("Wait in the engine", "queue", timing.queue, planned.queue);
  if (timing.load !== null) {
    next("Load stored KV", "load", timing.load - timing.recompute, planned.load);
    next("Recompute tokens", "recompute", timing.recompute, planned.recompute);
  }
  next("Prefill", "prefill", timing.prefill, planned.prefill);
  if (timing.first_token !== null) {
    const gap = timing.first_token - at;
    if (gap > 0) next("Other, until the first token", "gateway", gap);
    rows.push({ ...step("Generate the answer", "answer", timing.first_token, timing.total) });
  }
  return rows;
}

// The step that took most of the time to the first token; null without a first token.
export function bottleneck(rows, firstTokenMs) {
  if (!firstTokenMs) return null;
  const steps = rows.filter((one) => one.kind !== "answer" && one.kind !== "speculation");
  const longest = steps.reduce((a, b) => (b.endMs - b.startMs > a.endMs - a.startMs ? b : a));
  const durationMs = longest.endMs - longest.startMs;
  return { name: longest.name, durationMs, share: Math.min(1, durationMs / firstTokenMs) };
}

// The pages of a citation or a part, as the end of a phrase; empty if its document has none.
export function pagesOf(one) {
  if (!one.page) return "";
  return one.page_end ? `, pages ${one.page}-${one.page_end}` : `, page ${one.page}`;
}

// The parts of the prompt in its order, with what computing them cost.
export function explainParts(explanation) {
  const parts = explanation.parts;
  const cost = costs(explanation);
  let head = 0;
  return parts.map((part, i) => {
    if (part.chunk === null && parts.slice(i).some((one) => one.chunk !== null)) head += 1;
    return {
      name: part.chunk === null ? partName(parts, i, head) : part.title || part.document_id,
      detail: part.chunk === null ? "" : part.chunk + pagesOf(part),
      rank: part.rank,
      outcome: OUTCOME_WORDS[part.outcome],
      kind: part.outcome,
      isMiss: part.chunk !== null && part.computed_tokens > 0,
      tokens: part.tokens,
      tokensByKind: tokensByKind(part),
      tier: part.tier ?? (part.outcome === "cached" ? "device" : ""),
      planned: planned(part),
      why: why(part),
      measuredMs: cost.measuredPerToken === null ? null : cost.measuredPerToken * lost(part),
      predictedMs: predictedCost(part, cost),
    };
  });
}

function partName(parts, i, head) {
  if (parts.slice(i).some((one) => one.chunk !== null)) return head > 1 ? "Template, changing part" : "Template";
  return "Question";
}

function lost(part) {
  return part.computed_tokens + part.recomputed_tokens;
}

function predictedCost(part, cost) {
  if (cost.predictedPerToken === null || part.planned === null) return null;
  return part.planned === "compute" ? cost.predictedPerToken * part.tokens : 0;
}

function costs(explanation) {
  const sum = (parts, of) => parts.reduce((total, part) => total + of(part), 0);
  const computed = sum(explanation.parts, lost);
  const measured = explanation.time?.measured_ms.passes ?? null;
  const planned = sum(
    explanation.parts.filter((part) => part.planned === "compute" || part.planned === null),
    (part) => part.tokens,
  );
  const predicted = explanation.plan.predicted_ms?.prefill ?? null;
  return {
    measuredPerToken: measured !== null && computed ? measured / computed : null,
    predictedPerToken: predicted !== null && planned ? predicted / planned : null,
  };
}

// Tokens of a part by where their KV came from; they add up to the tokens of the part.
export function tokensByKind(part) {
  const loaded = part.loaded_tokens - part.recomputed_tokens;
  const known = part.cached_tokens + part.loaded_tokens + part.computed_tokens;
  return {
    cached: part.cached_tokens,
    loaded: part.outcome === "blended" ? 0 : loaded,
    blended: part.outcome === "blended" ? loaded : 0,
    recomputed: part.recomputed_tokens,
    computed: part.computed_tokens,
    unknown: part.tokens - known,
  };
}

// What the gateway had planned for a part: {word, from, reason, isKept}; null without a plan.
// from names the tier and what had the KV. isKept tells whether it came so.
function planned(part) {
  const plan = PLANS[part.planned];
  if (!plan) return null;
  return {
    word: plan.word,
    from: copyWords(part.planned_tier, part.planned_source),
    reason: PLAN_WORDS[part.planned_reason] ?? part.planned_reason,
    isKept: part.outcome === "unknown" || part.outcome === plan.outcome,
  };
}

function why(part) {
  const sentences = [];
  if (part.reason) {
    sentences.push(MISS_WORDS[part.reason] ?? MISS_WORDS[part.reason.replaceAll("_", " ")] ?? `Reason: ${part.reason}.`);
  } else if (part.outcome === "unknown") {
    sentences.push("The engine has no record of it.");
  } else if (part.computed_tokens > 0 && part.chunk === null) {
    sentences.push("It is no chunk of a document.");
  }
  if (part.mismatch !== null && part.mismatch !== undefined) {
    sentences.push(`Mismatch of its context: ${part.mismatch.toFixed(2)}.`);
  }
  return sentences.join(" ");
}

// Reused tokens of a prompt, and about how long computing them would have taken.
export function savings(explanation) {
  const reused = explanation.parts.reduce(
    (total, part) => total + part.cached_tokens + part.loaded_tokens - part.recomputed_tokens,
    0,
  );
  const { measuredPerToken } = costs(explanation);
  return { reused, share: reused / Math.max(1, explanation.prompt_tokens), savedMs: measuredPerToken === null ? null : measuredPerToken * reused };
}

// Words of two answers, as {text, side}: side is both, left or right.
export function diffWords(left, right) {
  const a = left.match(/\S+/g) ?? [];
  const b = right.match(/\S+/g) ?? [];
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const words = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      words.push({ text: a[i], side: "both" });
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
      words.push({ text: a[i], side: "left" });
      i += 1;
    } else {
      words.push({ text: b[j], side: "right" });
      j += 1;
    }
  }
  return words;
}
