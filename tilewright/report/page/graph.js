// The network as a graph: boxes coloured by time with a stripe for the kind, arrow keys along edges and layers, Enter to open.

function graphView(subject, open) {
  const { graph } = subject;
  const [width, height] = graph.box;
  const hottest = Math.max(...subject.rows.map((row) => row.share), 1e-9);
  const byId = new Map();
  const segments = graph.segments.map(([x1, y1, x2, y2, source]) => {
    const middle = (y1 + y2) / 2;
    const path = svg("path", { class: "segment", d: `M${x1},${y1}C${x1},${middle} ${x2},${middle} ${x2},${y2}` });
    return { path, source, ends: `${x2},${y2}` };
  });
  for (const node of graph.nodes) {
    const box = { x: node.x - width / 2, y: node.y, width, height, rx: 6 };
    const row = node.number ? subject.rows[node.number - 1] : null;
    const texts = row
      ? [`${row.number} ${row.operators}`, `${time(row.seconds)}  ${percent(row.share)}`]
      : [node.what === "in" ? "input" : "result", node.value];
    const label = row
      ? `region ${row.number}, ${row.kind}: ${row.operators}; ${time(row.seconds)}, ${percent(row.share)}${row.is_mispredicted ? ", predicted wrong" : ""}`
      : texts.join(" ");
    const element = svg("g", {
      class: `node${row ? "" : " plain"}${row?.is_mispredicted ? " wrong" : ""}`,
      role: row ? "button" : "img", "aria-label": label,
      css: row ? { ...kindColour(row.kind), "--heat": String(100 * Math.sqrt(row.share / hottest)) } : {},
      on: row ? opens(() => open(row.number)) : {},
    },
      svg("title", {}, label),
      svg("rect", box),
      row ? svg("rect", { ...box, width: 6, class: "stripe" }) : null,
      texts.map((text, index) => svg("text", { x: box.x + 13, y: box.y + 18 + 17 * index, class: index ? "second" : null }, fitting(text))));
    byId.set(node.id, { node, element });
  }
  const layers = [];
  for (const { node, element } of byId.values()) (layers[node.layer] ??= []).push({ node, element });
  const after = neighbours(graph.edges, 0, byId), before = neighbours(graph.edges, 1, byId);
  const elements = [...byId.values()].map((found) => found.element);
  const idOf = new Map([...byId].map(([id, { element }]) => [element, id]));
  roving(elements, (element, key) => {
    const id = idOf.get(element), row = layers[byId.get(id).node.layer].map((found) => found.element);
    if (key === "ArrowDown") return nearest(after.get(id), byId.get(id).node);
    if (key === "ArrowUp") return nearest(before.get(id), byId.get(id).node);
    if (key === "ArrowLeft") return row[row.indexOf(element) - 1];
    if (key === "ArrowRight") return row[row.indexOf(element) + 1];
    return { Home: elements[0], End: elements.at(-1) }[key];
  });
  for (const { node, element } of byId.values()) {
    const light = (on) => () => {
      for (const { path, source, ends } of segments)
        if (source === node.id || ends === `${node.x},${node.y}`) path.classList.toggle("lit", on);
    };
    for (const [event, on] of [["focus", true], ["blur", false], ["mouseenter", true], ["mouseleave", false]]) element.addEventListener(event, light(on));
  }
  const picture = svg("svg", {
    width: graph.width + 4, height: graph.height + 4, viewBox: `-2 -2 ${graph.width + 4} ${graph.height + 4}`, role: "group",
    "aria-label": "The network. Arrow keys follow edges and layers, Enter opens a region.",
  }, segments.map((segment) => segment.path), elements);
  return el("div", { class: "scroll graph" }, picture);
}

function neighbours(edges, end, byId) {
  const found = new Map([...byId.keys()].map((id) => [id, []]));
  for (const edge of edges) found.get(edge[end]).push(byId.get(edge[1 - end]));
  return found;
}

function nearest(candidates, node) {
  const far = (other) => [Math.abs(other.node.layer - node.layer), Math.abs(other.node.x - node.x)];
  return candidates.toSorted((a, b) => far(a)[0] - far(b)[0] || far(a)[1] - far(b)[1])[0]?.element;
}

function fitting(text) {
  return text.length > 21 ? `${text.slice(0, 20)}…` : text;
}

function legend(subject) {
  const kinds = KINDS.filter((kind) => subject.rows.some((row) => row.kind === kind && runs(row)));
  return el("div", { class: "legend" },
    kinds.map((kind) => el("span", {}, el("i", { css: kindColour(kind) }), kind === "torch" ? "through PyTorch" : kind)),
    el("span", {}, el("i", { class: "heat" }), "share of the time"));
}
