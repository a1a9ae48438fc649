// A tree as WAI-ARIA describes it: arrow keys move, open and close; Home and End go to the edges.

// items: treeitem elements in the order of the tree. parents: index of each one's parent or null.
// onToggle gets the index of an item that was opened or closed.
export function setUpTree(tree, items, parents, onToggle) {
  const isParent = (i) => items[i].hasAttribute("aria-expanded");
  const isOpen = (i) => items[i].getAttribute("aria-expanded") === "true";
  const isShown = (i) => !items[i].hidden;

  const update = () => {
    for (const [i, item] of items.entries()) {
      const parent = parents[i];
      item.hidden = parent !== null && (items[parent].hidden || !isOpen(parent));
    }
  };
  const focus = (i) => {
    for (const item of items) item.tabIndex = -1;
    items[i].tabIndex = 0;
    items[i].focus();
  };
  const toggle = (i) => {
    if (!isParent(i)) return;
    items[i].setAttribute("aria-expanded", String(!isOpen(i)));
    onToggle(i);
    update();
  };
  const shownFrom = (i, step) => {
    for (let at = i + step; at >= 0 && at < items.length; at += step) if (isShown(at)) return at;
    return i;
  };
  const openOrEnter = (i) => {
    if (!isParent(i)) return;
    if (isOpen(i)) focus(i + 1);
    else toggle(i);
  };
  const closeOrLeave = (i) => {
    if (isParent(i) && isOpen(i)) toggle(i);
    else if (parents[i] !== null) focus(parents[i]);
  };
  const actions = {
    ArrowDown: (i) => focus(shownFrom(i, 1)),
    ArrowUp: (i) => focus(shownFrom(i, -1)),
    ArrowRight: openOrEnter,
    ArrowLeft: closeOrLeave,
    Home: () => focus(0),
    End: () => focus(shownFrom(items.length, -1)),
    Enter: toggle,
    " ": toggle,
  };

  tree.addEventListener("keydown", (event) => {
    const i = items.indexOf(event.target);
    const action = actions[event.key];
    if (i < 0 || !action || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    action(i);
  });
  tree.addEventListener("click", (event) => {
    const i = items.indexOf(event.target.closest('[role="treeitem"]'));
    if (i < 0) return;
    focus(i);
    toggle(i);
  });
  update();
}
