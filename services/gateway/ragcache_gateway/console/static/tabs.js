// Tabs as WAI-ARIA describes them: arrow keys, Home and End move between them.

export function setUpTabs(list, onSelect) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const select = (tab) => {
    for (const one of tabs) {
      const isSelected = one === tab;
      one.setAttribute("aria-selected", String(isSelected));
      one.tabIndex = isSelected ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = !isSelected;
    }
    onSelect(tab.id);
  };
  for (const [i, tab] of tabs.entries()) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const next = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      const target = tabs[(next + tabs.length) % tabs.length];
      select(target);
      target.focus();
    });
  }
}
