// The tree of one step: levels from left to right, the accepted path and the bonus along the top.

import { drawn, visible } from "./dom.js";

const ROW = 30;
const BOX = 22;
const GAP = 26;
const SIGN = 7.3; // width of a sign of the font
const MOST_SIGNS = 16;
const EDGE = 4;

const short = (text) => {
  const signs = [...visible(text)];
  return signs.length > MOST_SIGNS ? `${signs.slice(0, MOST_SIGNS - 1).join("")}\u2026` : signs.join("");
};

// Nodes with their children, the one that was taken first; the bonus is a child of the last accepted node.
function linked(tree) {
  const accepted = new Set(tree.accepted);
  const nodes = tree.nodes.map((node, number) => ({ ...node, number, accepted: accepted.has(number), children: [] }));
  for (const node of nodes) if (node.parent !== null) nodes[node.parent].children.push(node);
  const last = nodes[tree.accepted.at(-1)];
  for (const node of nodes) node.children.sort((a, b) => b.accepted - a.accepted || a.number - b.number);
  last.children.unshift({ ...tree.bonus, bonus: true, children: [] });
  return nodes[0];
}

function place(root) {
  const placed = [];
  let row = 0;
  const visit = (node, parent, depth, first) => {
    if (!first) row += 1;
    Object.assign(node, { above: parent, depth, row, text: short(node.token) });
    placed.push(node);
    node.children.forEach((child, at) => visit(child, node, depth + 1, at === 0));
  };
  visit(root, null, 0, true);
  const widths = [];
  for (const node of placed) {
    node.width = Math.max(BOX, SIGN * [...node.text].length + 12);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = widths.map((_, depth) => EDGE + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  for (const node of placed) node.left = lefts[node.depth];
  return { placed, width: lefts.at(-1) + widths.at(-1) + EDGE, height: (row + 1) * ROW };
}

const middle = (node) => node.row * ROW + ROW / 2;

export function kindOf(node) {
  const kinds = ["node", node.accepted && "accepted", node.bonus && "bonus", node.forced && "forced", node.depth === 0 && "root"];
  return kinds.filter(Boolean).join(" ");
}

const describe = (node) => {
  const what = node.bonus ? "bonus" : node.depth === 0 ? "root" : node.accepted ? "accepted" : "not taken";
  return `${JSON.stringify(node.token)}, token ${node.token_id}: ${what}${node.forced ? ", forced by the grammar" : ""}`;
};

export function treeOf(tree) {
  const { placed, width, height } = place(linked(tree));
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": inWords(tree) });
  const taken = (node) => Boolean(node.bonus || node.accepted);
  for (const node of placed.slice(1).sort((a, b) => taken(a) - taken(b))) {
    const start = node.above.left + node.above.width;
    const path = `M${start} ${middle(node.above)}H${node.left - GAP / 2}V${middle(node)}H${node.left}`;
    picture.append(drawn("path", { class: taken(node) ? "edge taken" : "edge", d: path }));
  }
  for (const node of placed) {
    const box = drawn("rect", { x: node.left, y: middle(node) - BOX / 2, width: node.width, height: BOX, rx: node.bonus ? BOX / 2 : 4 });
    const text = drawn("text", { x: node.left + node.width / 2, y: middle(node) + 4.5, "text-anchor": "middle" }, node.text);
    picture.append(drawn("g", { class: kindOf(node) }, drawn("title", {}, describe(node)), box, text));
  }
  return picture;
}

export function inWords(tree) {
  const proposed = tree.nodes.length - 1;
  const forced = tree.nodes.filter((node) => node.forced).length;
  const taken = tree.accepted.length - 1;
  const grammar = forced ? `, ${forced} of them forced by the grammar` : "";
  return `${proposed} proposed${grammar}; ${taken} accepted, then the bonus ${JSON.stringify(tree.bonus.token)}`;
}
