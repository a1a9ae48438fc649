// Connects the forms of the page.

import { getJson, saveKey, savedKey } from "./api.js";
import { showAnswer } from "./answer.js";
import { compare } from "./compare.js";
import { byId, el } from "./dom.js";
import { startPolling, stopPolling } from "./platform.js";
import { setUpTabs } from "./tabs.js";
import { showTree } from "./tree.js";

let running = null;

function showKeyState() {
  byId("key-state").textContent = savedKey() ? "A key is in use until this tab is closed." : "";
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value.trim());
  byId("key").value = "";
  showKeyState();
});

byId("ask-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  running?.abort();
  const own = new AbortController();
  running = own;
  byId("ask-stop").disabled = false;
  byId("ask-state").textContent = "The gateway answers.";
  const body = question("ask", byId("ask-reuse").value);
  const result = await showAnswer(byId("ask-answer"), body, own.signal);
  if (running !== own) return;
  running = null;
  byId("ask-stop").disabled = true;
  byId("ask-state").textContent = result ? "The answer is complete." : "There is no complete answer.";
});

byId("ask-stop").addEventListener("click", () => running?.abort());

byId("compare-form").addEventListener("submit", (event) => {
  event.preventDefault();
  compare((reuse) => question("compare", reuse), byId("compare-reuse").value);
});

async function listModels() {
  try {
    const { data } = await getJson("v1/models");
    byId("models").replaceChildren(...data.map(({ id }) => el("option", { value: id })));
  } catch {
    // The field takes a name that is not in the list, too.
  }
}

for (const form of ["ask", "compare"]) byId(`${form}-model`).addEventListener("focus", listModels);

function question(form, reuse) {
  const maxTokens = byId(`${form}-max-tokens`).valueAsNumber;
  const model = byId(`${form}-model`).value;
  return {
    ...(model && { model }),
    messages: [{ role: "user", content: byId(`${form}-question`).value }],
    temperature: 0,
    ...(maxTokens && { max_tokens: maxTokens }),
    ragcache: {
      collection: byId(`${form}-collection`).value,
      explain: true,
      ...(reuse && { reuse }),
    },
  };
}

byId("tree-form").addEventListener("submit", (event) => {
  event.preventDefault();
  showTree();
});

setUpTabs(document.querySelector('[role="tablist"]'), (id) => {
  if (id === "tab-platform") startPolling();
  else stopPolling();
  if (id === "tab-tree") showTree();
});
showKeyState();
