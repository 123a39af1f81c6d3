// The tree of one step: levels from left to right, the accepted path and the bonus along the top.

import { svgElement, withVisibleSpaces } from "./dom.js";

const ROW_HEIGHT = 30;
const BOX_HEIGHT = 22;
const GAP = 26;
const CHARACTER_WIDTH = 7.3; // in the font of the tree
const MAX_CHARACTERS = 16;
const MARGIN = 4;

const shortened = (text) => {
  const characters = [...withVisibleSpaces(text)];
  return characters.length > MAX_CHARACTERS ? `${characters.slice(0, MAX_CHARACTERS - 1).join("")}\u2026` : characters.join("");
};

// Returns the root of nodes with their children, the accepted child first; the bonus is a child of the last accepted node.
function linkNodes(tree) {
  const accepted = new Set(tree.accepted);
  const nodes = tree.nodes.map((node, number) => ({ ...node, number, accepted: accepted.has(number), children: [] }));
  for (const node of nodes) if (node.parent !== null) nodes[node.parent].children.push(node);
  const lastAccepted = nodes[tree.accepted.at(-1)];
  for (const node of nodes) node.children.sort((a, b) => b.accepted - a.accepted || a.number - b.number);
  lastAccepted.children.unshift({ ...tree.bonus, bonus: true, children: [] });
  return nodes[0];
}

function layOut(root) {
  const nodes = [];
  let row = 0;
  const visit = (node, parent, depth, isFirstChild) => {
    if (!isFirstChild) row += 1;
    Object.assign(node, { drawnParent: parent, depth, row, text: shortened(node.token) });
    nodes.push(node);
    node.children.forEach((child, index) => visit(child, node, depth + 1, index === 0));
  };
  visit(root, null, 0, true);
  const widths = [];
  for (const node of nodes) {
    node.width = Math.max(BOX_HEIGHT, CHARACTER_WIDTH * [...node.text].length + 12);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = widths.map((_, depth) => MARGIN + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  for (const node of nodes) node.left = lefts[node.depth];
  return { nodes, width: lefts.at(-1) + widths.at(-1) + MARGIN, height: (row + 1) * ROW_HEIGHT };
}

const centerY = (node) => node.row * ROW_HEIGHT + ROW_HEIGHT / 2;

export function classOf(node) {
  const classes = ["node", node.accepted && "accepted", node.bonus && "bonus", node.forced && "forced", node.depth === 0 && "root"];
  return classes.filter(Boolean).join(" ");
}

const describe = (node) => {
  const role = node.bonus ? "bonus" : node.depth === 0 ? "root" : node.accepted ? "accepted" : "not taken";
  return `${JSON.stringify(node.token)}, token ${node.token_id}: ${role}${node.forced ? ", forced by the grammar" : ""}`;
};

export function drawTree(tree) {
  const { nodes, width, height } = layOut(linkNodes(tree));
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": summarize(tree) });
  const isOnAcceptedPath = (node) => Boolean(node.bonus || node.accepted);
  for (const node of nodes.slice(1).sort((a, b) => isOnAcceptedPath(a) - isOnAcceptedPath(b))) {
    const start = node.drawnParent.left + node.drawnParent.width;
    const path = `M${start} ${centerY(node.drawnParent)}H${node.left - GAP / 2}V${centerY(node)}H${node.left}`;
    svg.append(svgElement("path", { class: isOnAcceptedPath(node) ? "edge taken" : "edge", d: path }));
  }
  for (const node of nodes) {
    const box = svgElement("rect", { x: node.left, y: centerY(node) - BOX_HEIGHT / 2, width: node.width, height: BOX_HEIGHT, rx: node.bonus ? BOX_HEIGHT / 2 : 4 });
    const text = svgElement("text", { x: node.left + node.width / 2, y: centerY(node) + 4.5, "text-anchor": "middle" }, node.text);
    svg.append(svgElement("g", { class: classOf(node) }, svgElement("title", {}, describe(node)), box, text));
  }
  return svg;
}

export function summarize(tree) {
  const proposed = tree.nodes.length - 1;
  const forced = tree.nodes.filter((node) => node.forced).length;
  const accepted = tree.accepted.length - 1;
  const grammar = forced ? `, ${forced} of them forced by the grammar` : "";
  return `${proposed} proposed${grammar}; ${accepted} accepted, then the bonus ${JSON.stringify(tree.bonus.token)}`;
}
