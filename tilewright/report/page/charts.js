// The timeline and the scatter of predicted and measured times.

function timeline(subject, open) {
  const predicted = [];
  let end = 0;
  for (const row of subject.rows) {
    if (!row.predicted_seconds) continue;
    predicted.push([row.number, end, end + row.predicted_seconds]);
    end += row.predicted_seconds;
  }
  const lanes = [["predicted", predicted]];
  if (subject.timeline.length) lanes.unshift(["measured, one call", subject.timeline]);
  const whole = Math.max(...lanes.flatMap(([, spans]) => spans.map((span) => span[2])), 1e-12);
  const inner = el("div", { class: "lanes" }, lanes.map(([name, spans]) => {
    const pieces = spans.map(([number, from, to]) => {
      const row = subject.rows[number - 1];
      const label = `region ${number}, ${row.operators}: ${time(to - from)}`;
      return el("button", {
        type: "button", class: "span", title: label, "aria-label": label, on: { click: () => open(number) },
        css: { ...kindColour(row.kind), left: `${(100 * from) / whole}%`, width: `${(100 * (to - from)) / whole}%` },
      }, String(number));
    });
    roving(pieces, alongRow(pieces));
    return el("div", {}, el("div", { class: "lane-name" }, `${name}: ${time(spans.at(-1)?.[2] ?? 0)}`), el("div", { class: "lane", role: "group", "aria-label": name }, pieces));
  }));
  const zoom = el("input", { type: "range", min: "0", max: "6", step: "0.5", value: "0", "aria-label": "zoom of the timeline",
    on: { input: (event) => inner.style.setProperty("width", `${100 * 2 ** Number(event.target.value)}%`) } });
  return el("div", {}, el("label", { class: "faint" }, "zoom ", zoom), el("div", { class: "scroll" }, inner));
}

function scatter(subject, open) {
  const rows = subject.rows.filter((row) => row.measured_seconds && row.predicted_seconds).sort((a, b) => a.predicted_seconds - b.predicted_seconds);
  if (!rows.length) return el("p", { class: "faint" }, "Nothing was measured: `tilewright explain MODEL --profile --html FILE` measures each region here.");
  const times = rows.flatMap((row) => [row.measured_seconds, row.predicted_seconds]);
  const low = Math.log10(Math.min(...times)) - 0.1, high = Math.log10(Math.max(...times)) + 0.1;
  const size = 520, left = 62, bottom = 44, top = 10;
  const scale = (seconds) => ((Math.log10(seconds) - low) / (high - low)) * size;
  const x = (seconds) => left + scale(seconds), y = (seconds) => top + size - scale(seconds);
  const parts = [];
  for (let decade = Math.ceil(low - 1); decade <= high; decade++)
    for (const step of [1, 2, 5]) {
      const seconds = step * 10 ** decade, at = Math.log10(seconds);
      if (at < low || at > high || (high - low > 2.2 && step !== 1)) continue;
      parts.push(svg("line", { x1: x(seconds), x2: x(seconds), y1: top, y2: top + size }), svg("line", { x1: left, x2: left + size, y1: y(seconds), y2: y(seconds) }),
        svg("text", { x: x(seconds), y: top + size + 17, "text-anchor": "middle" }, time(seconds)),
        svg("text", { x: left - 6, y: y(seconds) + 4, "text-anchor": "end" }, time(seconds)));
    }
  for (const [factor, name] of [[1, "equal"], [2, "factor"], [0.5, "factor"]]) {
    const from = 10 ** Math.max(low, low - Math.log10(factor)), to = 10 ** Math.min(high, high - Math.log10(factor));
    parts.push(svg("line", { class: name, x1: x(from), y1: y(from * factor), x2: x(to), y2: y(to * factor) }));
  }
  const points = rows.map((row) => {
    const label = `region ${row.number}, ${row.operators}: predicted ${time(row.predicted_seconds)}, measured ${time(row.measured_seconds)}`;
    return svg("circle", { cx: x(row.predicted_seconds), cy: y(row.measured_seconds), r: 6, role: "button", "aria-label": label,
      class: row.is_mispredicted ? "wrong" : null, css: kindColour(row.kind), on: opens(() => open(row.number)) }, svg("title", {}, label));
  });
  roving(points, alongRow(points));
  parts.push(svg("text", { x: left + size / 2, y: top + size + 38, "text-anchor": "middle" }, "predicted"),
    svg("text", { x: 12, y: top + size / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${top + size / 2})` }, "measured"));
  return el("div", { class: "scroll scatter" }, svg("svg", { viewBox: `0 0 ${left + size + 16} ${top + size + bottom}`, role: "group",
    "aria-label": "Predicted and measured time of each region. Arrow keys go from point to point, Enter opens a region." }, parts, points));
}
