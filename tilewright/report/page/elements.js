// Elements of the document, and numbers as text. Text reaches the document as text nodes only.

const SVG = "http://www.w3.org/2000/svg";
const KINDS = ["contraction", "attention", "window", "row reduction", "scan", "map", "chain", "loop", "torch"];

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "css") for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function link(text, open, attributes = {}) {
  return el("button", { class: "link", type: "button", on: { click: open }, ...attributes }, text);
}

function kindColour(kind) {
  return { "--kind": `var(--${KINDS.includes(kind) ? kind.replace(" ", "-") : "map"})` };
}

function scaled(value, unit) {
  for (const [factor, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= factor) return `${Number((value / factor).toPrecision(3))} ${prefix}${unit}`;
  return `${Number(value.toPrecision(3))} ${unit}`.trim();
}

function time(seconds) {
  if (!seconds) return "-";
  for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
    if (Math.abs(seconds) >= factor) return `${Number((seconds / factor).toPrecision(3))} ${unit}`;
  return `${Number((seconds / 1e-9).toPrecision(3))} ns`;
}

function percent(part) {
  return part > 0 && part < 0.0005 ? "<0.1 %" : `${(100 * part).toFixed(1)} %`;
}

function count(number) {
  return number.toLocaleString("en");
}

// One element of a group is in the tab order; `next` gives the element that a key leads to from one of them.
function roving(elements, next) {
  elements.forEach((element, index) => {
    element.setAttribute("tabindex", index === 0 ? "0" : "-1");
    element.addEventListener("focus", () => {
      for (const other of elements) other.setAttribute("tabindex", other === element ? "0" : "-1");
    });
    element.addEventListener("keydown", (event) => {
      const target = next(element, event.key);
      if (!target) return;
      event.preventDefault();
      target.focus();
      target.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  });
}

function alongRow(elements) {
  return (element, key) => {
    const at = elements.indexOf(element);
    const to = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: elements.length - 1 }[key];
    return elements[to];
  };
}

// Enter and the space bar open what a click opens.
function opens(open) {
  return {
    click: open,
    keydown: (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      open();
    },
  };
}
