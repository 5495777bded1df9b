(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const buttons = all(".legend [data-series]");
  const rows = all("tbody tr[data-series]");
  const lines = all("svg [data-series]");
  const search = document.querySelector("input[type=search]");
  const isPressed = (button) => button.getAttribute("aria-pressed") === "true";

  // A series is hidden by its button, or if no row of it has all words of the filter.
  const refresh = () => {
    const words = (search?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => words.every((word) => row.textContent.toLowerCase().includes(word));
    const found = new Set(rows.filter(matches).map((row) => row.dataset.series));
    const off = new Set(buttons.filter((one) => !isPressed(one)).map((one) => one.dataset.series));
    for (const row of rows) row.hidden = off.has(row.dataset.series) || !matches(row);
    for (const line of lines) {
      const { series } = line.dataset;
      line.style.display = off.has(series) || (words.length && !found.has(series)) ? "none" : "";
    }
  };
  const press = (button, pressed) => button.setAttribute("aria-pressed", pressed);
  for (const button of buttons) {
    button.addEventListener("click", () => (press(button, !isPressed(button)), refresh()));
  }
  document.querySelector(".legend [data-all]")?.addEventListener("click", () => {
    const pressed = !buttons.some(isPressed);
    buttons.forEach((button) => press(button, pressed));
    refresh();
  });
  search?.addEventListener("input", refresh);

  // The name of a series is the tooltip of its lines.
  const names = new Map(buttons.map((button) => [button.dataset.series, button.textContent.trim()]));
  for (const line of lines) {
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = names.get(line.dataset.series) ?? "";
    line.append(title);
  }

  // Numbers sort from the highest down first, text from A to Z; missing values are last.
  const sort = (header) => {
    const place = header.cellIndex, isNumber = header.classList.contains("number");
    const ascending = header.ariaSort ? header.ariaSort === "descending" : !isNumber;
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rank = (a, b) =>
      isNumber ? a.dataset.number - b.dataset.number : a.textContent.localeCompare(b.textContent);
    const body = header.closest("table").tBodies[0];
    const inOrder = [...body.rows].sort(({ cells: { [place]: a } }, { cells: { [place]: b } }) => {
      const missing = ("missing" in a.dataset) - ("missing" in b.dataset);
      return missing || (ascending ? rank(a, b) : rank(b, a));
    });
    body.append(...inOrder);
  };
  for (const button of all("thead button")) {
    button.addEventListener("click", () => sort(button.parentElement));
  }
})();
