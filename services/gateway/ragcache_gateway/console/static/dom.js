// Elements and formats. Text always becomes text nodes, so markup in an answer is never run.

// What a cell without a value shows.
export const NOTHING = "–";

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") {
      // The page's policy forbids style attributes; properties are allowed.
      for (const [property, one] of Object.entries(value)) element.style.setProperty(property, one);
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

export function table(caption, columns, rows, classes = "") {
  const head = columns.map((column) => el("th", { scope: "col" }, column));
  const body = rows.map((cells) =>
    el(
      "tr",
      {},
      cells.map((cell, i) => el("td", { "data-label": columns[i], class: cell === NOTHING ? "nothing" : null }, cell)),
    ),
  );
  return el(
    "table",
    { class: classes },
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, body),
  );
}

export function showError(target, error) {
  target.replaceChildren(el("p", { class: "error", role: "alert" }, errorText(error)));
}

export function errorText(error) {
  if (error.status === 401) return "The gateway needs an API key: enter it at the top of the page.";
  if (error.status === 403) return `This key does not allow it: ${error.message}`;
  if (error instanceof TypeError) return "The gateway does not answer. Check that it runs.";
  return error.message;
}

export function ms(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? Math.round(value) : value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export function count(value) {
  return value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${(100 * share).toFixed(1)} %`;
}

// Where a copy of KV is: its tier, and the engine or the shard that has it. Empty: nowhere.
export function copyWords(tier, source) {
  const holder = (source ?? "").replace(":", " ");
  return tier && holder ? `${tier} of ${holder}` : tier || holder;
}
