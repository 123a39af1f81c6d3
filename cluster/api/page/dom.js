// Elements made in code. Text only ever becomes text: nothing here or elsewhere on the page reads markup.

const SVG = "http://www.w3.org/2000/svg";

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.map((child) => (typeof child === "number" ? String(child) : child)));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const element = (name, attributes = {}, ...children) => made(document.createElement(name), attributes, children);
export const drawn = (name, attributes = {}, ...children) => made(document.createElementNS(SVG, name), attributes, children);

// Replace what is in a node, unless it would say the same: a selection in it then stays.
export function show(node, ...children) {
  const fresh = element("template");
  fresh.content.append(...children);
  const before = [...node.childNodes];
  const same = [...fresh.content.childNodes];
  if (before.length === same.length && before.every((child, at) => child.isEqualNode(same[at]))) return;
  node.replaceChildren(...same);
}

export const say = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const cells = (kind, values) => element("tr", {}, ...values.map((value) => (value instanceof Node ? value : element(kind, {}, value))));

const SEEN = new Map([[" ", "\u00b7"], ["\n", "\u21b5"], ["\t", "\u21e5"], ["\r", "\u240d"]]);

// A token as one can see it: white space as signs.
export const visible = (text) => (text === "" ? "\u2205" : [...text].map((sign) => SEEN.get(sign) ?? sign).join(""));
