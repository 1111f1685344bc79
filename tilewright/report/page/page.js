// The page: which of its programs is shown, its sections, and the theme.

const data = JSON.parse(document.getElementById("data").textContent);
const openDetail = detail();
const main = el("main");
let current = 0;

function open(number, side = current) {
  openDetail(data.subjects[side], number);
}

function section(id, title, ...content) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content);
}

function sections(subject) {
  const found = [
    section("network", "Network", legend(subject), graphView(subject, open)),
    section("timeline", "Timeline", timeline(subject, open)),
    section("regions", "Regions", regionTable(subject, open)),
    section("kernels", "Kernels", kernelTable(subject, open)),
    section("predictions", "Predicted and measured", subject.profile.map((line) => el("p", { class: "faint" }, line)), scatter(subject, open)),
    section("choices", "Choices", choices(subject)),
  ];
  const totals = [0, 1].map((side) => data.matches.reduce((sum, match) => sum + match.seconds[side], 0));
  if (data.matches.length)
    found.unshift(section("comparison", "Comparison",
      el("p", {}, `First: ${data.subjects[0].title}`), el("p", {}, `Second: ${data.subjects[1].title}`),
      figures([["first", time(totals[0])], ["second", time(totals[1])], ["first / second", totals[1] ? (totals[0] / totals[1]).toFixed(2) : "-"]]),
      comparisonTable(data.subjects, data.matches, open)));
  return found;
}

function choices(subject) {
  const rejected = {}, [unmeasured, chains] = subject.unmeasured;
  let feasible = 0;
  for (const { space } of subject.rows) {
    feasible += space.feasible;
    for (const [reason, number] of Object.entries(space.rejected)) rejected[reason] = (rejected[reason] ?? 0) + number;
  }
  return [
    ...pruning("Schedules of all regions", { feasible, rejected }),
    subject.search.length ? el("details", {}, el("summary", {}, `${subject.search.length} merges of operators and regions were considered`),
      el("ol", {}, subject.search.map((text) => el("li", {}, text)))) : null,
    chains.length ? el("details", {}, el("summary", {}, unmeasured), el("ol", {}, chains.map((text) => el("li", {}, text)))) : null,
    subject.partitions.length ? el("details", {}, el("summary", {}, `${subject.partitions.length} partitions of the whole network were measured`),
      el("ol", {}, subject.partitions.map((text) => el("li", {}, text)))) : null,
    el("details", {}, el("summary", {}, "PyTorch and memory"), el("pre", { tabindex: "0" }, subject.notes.join("\n"))),
  ];
}

function show() {
  const subject = data.subjects[current];
  main.replaceChildren(
    el("header", {}, el("div", { class: "top" }, el("h1", {}, subject.title), controls()),
      figures([...(subject.measured ? [["measured", time(subject.seconds)]] : []), ["predicted", time(subject.predicted_seconds)],
        ["arithmetic", scaled(subject.work.flops, "flop")], ["read and written", scaled(subject.work.bytes_read + subject.work.bytes_written, "B")],
        ["regions", count(subject.rows.filter(runs).length)], ["kernels", count(Object.keys(subject.kernels).length)],
        ["kernel calls", count(subject.calls)],
        ...(subject.measured ? [["predicted wrong", count(subject.rows.filter((row) => row.is_mispredicted).length)]] : [])])));
  const parts = sections(subject);
  main.append(el("nav", { "aria-label": "sections" }, parts.map((part) => el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent))), ...parts);
  const graph = main.querySelector(".graph");
  graph.scrollLeft = (graph.scrollWidth - graph.clientWidth) / 2;
}

function controls() {
  const theme = el("button", { type: "button", class: "control", on: { click: () => { setTheme(dark() ? "light" : "dark"); label(); } } });
  const label = () => { theme.textContent = dark() ? "light" : "dark"; theme.setAttribute("aria-label", `${theme.textContent} colours`); };
  label();
  const chosen = data.subjects.length > 1
    ? el("select", { class: "control", "aria-label": "program", on: { change: (event) => { current = Number(event.target.value); show(); main.querySelector("select").focus(); } } },
      data.subjects.map((subject, index) => el("option", { value: index, selected: index === current }, `${index ? "second" : "first"}: ${subject.name}`)))
    : null;
  return el("span", { class: "controls" }, chosen, theme);
}

function dark() {
  const set = document.documentElement.style.colorScheme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function setTheme(name) {
  document.documentElement.style.colorScheme = name;
}

document.body.append(main);
show();
const asked = /^#region-(\d+)$/.exec(location.hash);
if (asked && data.subjects[0].rows[Number(asked[1]) - 1]) open(Number(asked[1]));
