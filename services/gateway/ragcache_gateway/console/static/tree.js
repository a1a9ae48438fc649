// The knowledge tree: which chunks are used most, and in which tiers their KV is.

import { getJson } from "./api.js";
import { byId, bytes, copyWords, count, el, ms, showError } from "./dom.js";
import { setUpTree } from "./tree_keys.js";

const OPEN_DEPTH = 2;
const toggled = new Set();

// Read the tree and draw it.
export async function showTree() {
  const target = byId("tree-content");
  const path = `v1/cache/tree?limit=${byId("tree-limit").value}`;
  byId("tree-state").textContent = "The gateway reads its tree.";
  try {
    const outline = await getJson(path);
    byId("tree-state").textContent = summary(outline);
    target.replaceChildren(...(outline.nodes.length ? [drawTree(outline.nodes)] : []));
  } catch (error) {
    byId("tree-state").textContent = "";
    showError(target, error);
  }
}

function summary(outline) {
  if (!outline.total) return "The tree is empty: no engine and no shard has told of a variant.";
  return `${count(outline.nodes.length)} of ${count(outline.total)} nodes, the most used ones.`;
}

function drawTree(nodes) {
  const hottest = Math.max(...nodes.map((node) => node.uses));
  const children = childrenOf(nodes);
  const paths = pathsOf(nodes);
  const items = nodes.map((node, i) => item(node, i, { children, hottest, path: paths[i] }));
  const tree = el("ul", { role: "tree", "aria-label": "Knowledge tree, most used first", class: "tree" }, items);
  const parents = nodes.map((node) => node.parent);
  setUpTree(tree, items, parents, (index) => {
    const path = paths[index];
    if (!toggled.delete(path)) toggled.add(path);
  });
  return tree;
}

function childrenOf(nodes) {
  const children = new Map();
  for (const [i, node] of nodes.entries()) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(i);
  }
  return children;
}

// A name of each node by the keys of those before it, so that a node stays open when it is read again.
function pathsOf(nodes) {
  const paths = [];
  for (const node of nodes) paths.push(`${node.parent === null ? "" : paths[node.parent]}/${node.key}`);
  return paths;
}

function item(node, i, { children, hottest, path }) {
  const siblings = children.get(node.parent);
  const isParent = children.has(i);
  const isOpen = node.depth < OPEN_DEPTH !== toggled.has(path);
  return el(
    "li",
    {
      role: "treeitem",
      "aria-level": node.depth + 1,
      "aria-posinset": siblings.indexOf(i) + 1,
      "aria-setsize": siblings.length,
      "aria-expanded": isParent ? String(isOpen) : null,
      tabindex: i === 0 ? 0 : -1,
      style: { "--depth": Math.min(node.depth, 12) },
    },
    el("span", { class: "node-name" }, nodeName(node)),
    heatBar(node.uses, hottest),
    el("span", { class: "node-heat" }, `${uses(node.uses)} uses`),
    tierBadges(node),
    el("small", {}, details(node)),
  );
}

// What people call a node.
export function nodeName(node) {
  if (node.kind === "chunk") return node.title ? `${node.title} (${node.chunk})` : node.chunk;
  return node.kind === "template" ? "Template" : `Unnamed ${node.key.slice(0, 8)}`;
}

function uses(value) {
  return value >= 10 ? count(value) : value.toFixed(2);
}

function heatBar(value, hottest) {
  // Uses differ by powers of ten, so the bar has their logarithm.
  const share = hottest > 0 ? Math.log1p(value) / Math.log1p(hottest) : 0;
  return el("span", { class: "heat", "aria-hidden": "true" }, el("span", { style: { width: `${(100 * share).toFixed(1)}%` } }));
}

function tierBadges(node) {
  if (!node.copies.length) return el("span", { class: "badge evicted" }, "in no tier");
  return el("span", {}, [...tiersOf(node)].map((tier) => el("span", { class: `badge tier-${tier}` }, tier)));
}

function tiersOf(node) {
  const order = ["device", "host", "memory", "disk"];
  return new Set(node.copies.map((copy) => copy.tier).sort((a, b) => order.indexOf(a) - order.indexOf(b)));
}

function details(node) {
  const parts = [node.tokens ? `${count(node.tokens)} tokens` : "length not known"];
  if (node.bytes) parts.push(bytes(node.bytes));
  if (node.cost_ms !== null) parts.push(`computing took ${ms(node.cost_ms)}`);
  for (const copy of node.copies) {
    parts.push(`${copyWords(copy.tier, copy.source)}${copy.exact ? "" : ", approximate"}`);
  }
  if (node.children_cut) parts.push(`${count(node.children_cut)} of ${count(node.children)} nodes after it not shown`);
  return parts.join(" · ");
}
