// Elements made in code. Text only ever becomes text: nothing here or elsewhere on the page reads markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.map((child) => (typeof child === "number" ? String(child) : child)));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svgElement = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// Replaces the children of a node, unless they are equal: a text selection in it then stays.
export function setChildren(node, ...children) {
  const template = element("template");
  template.content.append(...children);
  const oldChildren = [...node.childNodes];
  const newChildren = [...template.content.childNodes];
  if (oldChildren.length === newChildren.length && oldChildren.every((child, index) => child.isEqualNode(newChildren[index]))) return;
  node.replaceChildren(...newChildren);
}

export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const tableRow = (cellTag, values) => element("tr", {}, ...values.map((value) => (value instanceof Node ? value : element(cellTag, {}, value))));

const VISIBLE_SPACES = new Map([[" ", "\u00b7"], ["\n", "\u21b5"], ["\t", "\u21e5"], ["\r", "\u240d"]]);

// The text of a token with white space shown as visible characters.
export const withVisibleSpaces = (text) => (text === "" ? "\u2205" : [...text].map((character) => VISIBLE_SPACES.get(character) ?? character).join(""));
