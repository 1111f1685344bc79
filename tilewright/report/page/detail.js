// One region in a dialog: figures, what else was considered, terms, pruning, and the code of its kernels.

function detail() {
  const dialog = el("dialog", { "aria-labelledby": "detail-title", on: { close: () => history.replaceState(null, "", location.pathname + location.search) } });
  document.body.append(dialog);
  return function open(subject, number, focused = null) {
    const shown = subject.rows.filter(runs).map((row) => row.number);
    const at = shown.indexOf(number);
    const step = (by, name, sign) => el("button", { type: "button", class: "control", "aria-label": name, disabled: shown[at + by] === undefined,
      on: { click: () => open(subject, shown[at + by], name) } }, sign);
    const row = subject.rows[number - 1];
    dialog.replaceChildren(
      el("div", { class: "bar-top" },
        el("h2", { id: "detail-title" }, el("span", { class: "mark", css: kindColour(row.kind) }), `${row.number}. ${row.name}: ${row.kind}`),
        step(-1, "previous region", "‹"), step(1, "next region", "›"),
        el("button", { type: "button", class: "control", "aria-label": "close", on: { click: () => dialog.close() } }, "×")),
      el("div", { class: "inside" }, detailParts(subject, row)));
    dialog.scrollTop = 0;
    if (!dialog.open) dialog.showModal();
    if (focused) dialog.querySelector(`[aria-label="${focused}"]:enabled, [aria-label="close"]`).focus();
    history.replaceState(null, "", `#region-${number}`);
  };
}

function detailParts(subject, row) {
  return [
    figures([
      ["share", percent(row.share)],
      ...(row.measured_seconds === null ? [] : [["measured", time(row.measured_seconds)], ["measured / predicted", ratioText(row)]]),
      ["predicted", time(row.predicted_seconds)],
      ...(row.limit[1] ? [[row.limit[0], time(row.limit[1])]] : []),
      ...(row.work.flops && row.seconds ? [["rate", scaled(row.work.flops / row.seconds, "flop/s")]] : []),
    ]),
    row.is_mispredicted ? el("p", { class: "wrong" }, "Predicted wrong by more than twice.") : null,
    el("dl", {}, row.entries.flatMap(([label, texts]) => [el("dt", {}, label), el("dd", {}, texts.map((text) => el("div", {}, text)))])),
    ...candidates(row), ...terms(row), ...pruning("Candidates", row.space),
    [...new Set(row.kernels)].flatMap((name) => kernelParts(subject, name)),
  ];
}

function figures(pairs) {
  return el("div", { class: "figures" }, pairs.map(([name, value]) => el("div", {}, el("b", {}, value), el("span", { class: "faint" }, name))));
}

function candidates(row) {
  const { schema, others, unsuitable } = row.comparison;
  if (!others.length && !Object.keys(unsuitable).length) return [];
  const chosen = { schema, schedule: row.schedule, predicted_seconds: row.predicted_seconds, measured_seconds: row.measured_seconds, loses_by: "chosen" };
  const line = (other) => el("tr", {}, el("td", { class: "words" }, other.schema), el("td", { class: "words wide" }, other.schedule),
    el("td", {}, time(other.predicted_seconds)), el("td", {}, time(other.measured_seconds)), el("td", {}, other.loses_by));
  const heads = ["schema", "schedule", "predicted", "measured", "loses by"];
  return [
    el("h3", {}, "Why this one: the best of every schema"),
    schema && others.length ? el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((name, index) => el("th", { scope: "col", class: index < 2 ? "words" : null }, name)))),
      el("tbody", {}, [chosen, ...others].map(line)))) : null,
    Object.entries(unsuitable).map(([name, reason]) => el("p", { class: "faint" }, `${name}: ${reason}`)),
  ];
}

function terms(row) {
  const own = Object.entries(row.terms).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  if (!own.length) return [];
  const second = row.comparison.others.find((other) => Object.keys(other.terms).length);
  const parts = [el("h3", {}, "Terms of the prediction"), bars("terms", own.map(([name, seconds]) => [name, seconds, time(seconds)]))];
  if (second) {
    const theirs = Object.entries(second.terms).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
    parts.push(el("details", {}, el("summary", {}, `Terms of the runner-up, ${second.schema} ${second.schedule}`),
      bars("terms of the runner-up", theirs.map(([name, seconds]) => [name, seconds, time(seconds)]))));
  }
  return parts;
}

function pruning(title, space) {
  const rejected = Object.entries(space.rejected).sort((a, b) => b[1] - a[1]);
  const all = rejected.reduce((sum, [, number]) => sum + number, space.feasible);
  if (all < 2) return [];
  return [
    el("h3", {}, title),
    el("p", {}, `${count(all)} candidates: ${count(space.feasible)} feasible, ${count(all - space.feasible)} rejected`),
    rejected.length ? bars("rejected candidates by reason", rejected.map(([reason, number]) => [reason, number, count(number)])) : null,
  ];
}

function kernelParts(subject, name) {
  const kernel = subject.kernels[name];
  const others = kernel.regions.length > 1 ? `Regions ${kernel.regions.join(", ")} call it.` : "";
  return [
    el("h3", {}, `Kernel ${name}`),
    others ? el("p", { class: "faint" }, others) : null,
    el("pre", { tabindex: "0", "aria-label": `what was read of the code of ${name}` }, kernel.lines.join("\n")),
    kernel.source ? el("details", { open: true }, el("summary", {}, "Generated code"),
      el("pre", { tabindex: "0", "aria-label": `generated code of ${name}` }, coloured(kernel.source))) : el("p", { class: "faint" }, "Its source is not in the artifact."),
  ];
}

function coloured(source) {
  return source.split(/(\/\/[^\n]*|\/\*[^]*?\*\/)/).map((part, index) => (index % 2 ? el("span", { class: "comment" }, part) : part));
}
