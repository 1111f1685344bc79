// Tables that sort by a click on a heading.

// A cell is text, or {node, key} with an element and what to sort by.
function sortKey(cell) {
  if (typeof cell === "object" && cell !== null && "key" in cell) return cell.key;
  const found = /^<?(-?[\d,.]+)\s*([kMGT]?)/.exec(cell);
  if (!found) return cell === "-" || cell === "" ? null : String(cell);
  return Number(found[1].replaceAll(",", "")) * { "": 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12 }[found[2]];
}

function compared(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// columns: {name, words, wide, title}; rows: arrays of cells. `sorted`: index of a column, from the largest.
function sortable(label, columns, rows, sorted = null) {
  const body = el("tbody");
  const headings = columns.map((column, index) =>
    el("th", { scope: "col", class: column.words ? "words" : null, title: column.title ?? null },
      el("button", { type: "button", on: { click: () => sort(index) } }, column.name)));
  const lines = rows.map((row) => ({
    keys: row.map(sortKey),
    element: el("tr", {}, row.map((cell, index) =>
      el("td", { class: [columns[index].words ? "words" : "", columns[index].wide ? "wide" : ""].join(" ").trim() || null,
                 title: columns[index].words && typeof cell === "string" ? cell : null },
        typeof cell === "object" && cell !== null ? cell.node : cell))),
  }));
  function sort(index, first) {
    const before = headings[index].getAttribute("aria-sort");
    const down = before ? before === "ascending" : first ?? lines.some((line) => typeof line.keys[index] === "number");
    for (const heading of headings) heading.removeAttribute("aria-sort");
    headings[index].setAttribute("aria-sort", down ? "descending" : "ascending");
    lines.sort((a, b) => {
      const missing = (a.keys[index] === null) - (b.keys[index] === null);
      return missing || (down ? -1 : 1) * compared(a.keys[index], b.keys[index]);
    });
    body.replaceChildren(...lines.map((line) => line.element));
  }
  body.append(...lines.map((line) => line.element));
  if (sorted !== null) sort(sorted, true);
  return el("div", { class: "scroll tall", role: "region", "aria-label": label, tabindex: "0" },
    el("table", {}, el("caption", { hidden: true }, label), el("thead", {}, el("tr", {}, headings)), body));
}

// Rows of (name, number, text) with bars.
function bars(label, rows) {
  const most = Math.max(...rows.map(([, number]) => number), 0) || 1;
  return el("div", { class: "scroll" }, el("table", { "aria-label": label }, el("tbody", {}, rows.map(([name, number, text]) =>
    el("tr", {}, el("td", { class: "words wide" }, name), el("td", {}, text),
      el("td", { class: "words half" }, el("span", { class: "bar", css: { width: `${(100 * number) / most}%` } })))))));
}

function regionTable(subject, open) {
  const measured = subject.measured;
  const columns = [
    { name: "#" }, { name: "operators", words: true }, { name: "kind", words: true }, { name: measured ? "time" : "predicted" }, { name: "share" },
    ...(measured ? [{ name: "predicted" }, { name: "ratio", title: "measured time / predicted time" }] : []),
    { name: "bound by", words: true }, { name: "limit", title: "the nearest lower bound of the time" }, { name: "candidates" },
    { name: "schedule", words: true },
  ];
  const rows = subject.rows.filter((row) => runs(row)).map((row) => [
    { node: String(row.number), key: row.number },
    { node: link(row.operators, () => open(row.number), { title: row.operators }), key: row.operators },
    { node: el("span", {}, el("span", { class: "mark", css: kindColour(row.kind) }), row.kind), key: row.kind },
    { node: time(row.seconds), key: row.seconds },
    { node: el("span", {}, percent(row.share)), key: row.share },
    ...(measured ? [
      { node: time(row.predicted_seconds), key: row.predicted_seconds || null },
      { node: el("span", { class: row.is_mispredicted ? "wrong" : null }, ratioText(row)), key: ratio(row) },
    ] : []),
    row.bound_by || "-",
    { node: time(row.limit[1]), key: row.limit[1] || null },
    { node: row.space.feasible ? count(row.space.feasible) : "-", key: row.space.feasible || null },
    row.schedule || "-",
  ]);
  return sortable("Regions", columns, rows, 3);
}

function runs(row) {
  return row.kernels.length > 0 || row.has_library || row.kind === "torch";
}

function ratio(row) {
  return row.measured_seconds && row.predicted_seconds ? row.measured_seconds / row.predicted_seconds : null;
}

function ratioText(row) {
  const found = ratio(row);
  return found === null ? "-" : found.toFixed(2) + (row.is_mispredicted ? " !" : "");
}

function kernelTable(subject, open) {
  const last = subject.columns.length - 1;
  const columns = [
    { name: "kernel", words: true }, { name: "regions", words: true }, { name: "their time", title: "of the regions that call it" },
    ...subject.columns.map((name, index) => ({ name, words: index === last })),
  ];
  const rows = Object.entries(subject.kernels).map(([name, kernel]) => {
    const seconds = kernel.regions.reduce((sum, number) => sum + subject.rows[number - 1].seconds, 0);
    return [
      { node: link(name, () => open(kernel.regions[0])), key: name },
      { node: kernel.regions.join(", "), key: kernel.regions[0] },
      { node: time(seconds), key: seconds },
      ...kernel.cells,
    ];
  });
  return sortable("Kernels", columns, rows, 2);
}

function comparisonTable(subjects, matches, open) {
  const [first, second] = subjects;
  const columns = [
    { name: "operators", words: true }, { name: "first" }, { name: "second" }, { name: "first / second", title: "above 1: the second is faster" },
    { name: "difference" }, { name: "times", words: true, title: "measured where those of both are, otherwise predicted" },
    { name: "schedule of the first", words: true }, { name: "schedule of the second", words: true },
  ];
  const rows = matches.map((match) => {
    const sides = [match.first.map((number) => first.rows[number - 1]), match.second.map((number) => second.rows[number - 1])];
    const [a, b] = match.seconds;
    const shown = sides[0].length ? 0 : 1;
    const cell = (side, seconds) => sides[side].length
      ? { node: link(time(seconds), () => open(sides[side][0].number, side), { title: `regions ${sides[side].map((row) => row.number).join(", ")}` }), key: seconds }
      : { node: "none", key: null };
    return [
      { node: sides[shown].map((row) => row.operators).join("; "), key: sides[shown][0].number },
      cell(0, a),
      cell(1, b),
      { node: a && b ? (a / b).toFixed(2) : "-", key: a && b ? a / b : null },
      { node: time(b - a), key: b - a },
      match.measured ? "measured" : "predicted",
      sides[0].map((row) => row.schedule).join("; ") || "-",
      sides[1].map((row) => row.schedule).join("; ") || "-",
    ];
  });
  return sortable("Comparison", columns, rows);
}
