// The same question with reuse on and off, one after the other, so that neither slows the other.

import { showAnswer } from "./answer.js";
import { byId, count, el, ms, percent, table } from "./dom.js";
import { diffWords } from "./explain.js";

const MOST_DIFFED_CHARACTERS = 8000;
let isRunning = false;

// Ask twice; questionOf gives the request's body for a way to reuse KV.
export async function compare(questionOf, reuse) {
  if (isRunning) return;
  isRunning = true;
  const state = byId("compare-state");
  byId("compare-result").replaceChildren();
  byId("compare-off").replaceChildren();
  try {
    state.textContent = "The gateway answers with reuse on.";
    const on = await showAnswer(byId("compare-on"), questionOf(reuse));
    state.textContent = "The gateway answers with reuse off.";
    const off = on && (await showAnswer(byId("compare-off"), questionOf("off")));
    state.textContent = off ? "Both answers are complete." : "There is no comparison.";
    if (off) byId("compare-result").replaceChildren(summary(on, off), difference(on.text, off.text));
  } finally {
    isRunning = false;
  }
}

function summary(on, off) {
  const tokens = (result, kind) => result.usage?.ragcache?.[`${kind}_tokens`] ?? null;
  const rows = [
    ["Time to the first token", ms(on.timing?.first_token), ms(off.timing?.first_token)],
    ["Time until the end", ms(on.timing?.total), ms(off.timing?.total)],
    ["Prompt tokens", count(on.usage?.prompt_tokens), count(off.usage?.prompt_tokens)],
    ...["cached", "loaded", "blended", "recomputed", "computed"].map((kind) => [
      `Tokens ${kind}`,
      count(tokens(on, kind)),
      count(tokens(off, kind)),
    ]),
    ["Tokens of the answer", count(on.usage?.completion_tokens), count(off.usage?.completion_tokens)],
  ];
  return el("div", {}, el("p", { class: "summary" }, verdict(on, off)), table("Reuse on and off", ["", "Reuse on", "Reuse off"], rows, "pairs"));
}

function verdict(on, off) {
  const a = on.timing?.first_token;
  const b = off.timing?.first_token;
  if (!a || !b) return "The time to the first token of one answer is not known.";
  const share = percent(Math.abs(1 - a / b));
  const difference = ms(Math.abs(b - a));
  return `With reuse the first token came ${difference} (${share}) ${a <= b ? "sooner" : "later"}.`;
}

function difference(left, right) {
  if (left === right) return el("p", { class: "summary" }, "The two answers are equal.");
  const cut = (text) => text.slice(0, MOST_DIFFED_CHARACTERS);
  const words = diffWords(cut(left), cut(right)).map((word) => [
    word.side === "both" ? word.text : el(word.side === "left" ? "del" : "ins", {}, word.text),
    " ",
  ]);
  return el(
    "section",
    { "aria-labelledby": "difference" },
    el("h3", { id: "difference" }, "The answers differ"),
    el("p", { class: "hint" }, "Struck out: only with reuse on. Underlined: only with reuse off."),
    el("p", { class: "answer-text" }, words.flat()),
  );
}
