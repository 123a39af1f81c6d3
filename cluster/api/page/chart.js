// A line of the last minutes: one point a second, a gap where nothing was known.

import { drawn, element, show } from "./dom.js";

const HEIGHT = 150;
const LEFT = 44;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;

export class History {
  constructor(seconds) {
    this.seconds = seconds;
    this.points = [];
  }

  // A value, or null, at `at` in seconds; older ones than the span are dropped.
  add(at, value) {
    this.points.push([at, value]);
    const first = this.points.findIndex(([then]) => then >= at - this.seconds);
    this.points.splice(0, first);
  }
}

function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * unit).find((round) => round >= value);
}

// Runs of points without a gap: neither a null nor a second that was not seen.
function runs(points) {
  const found = [];
  let last = -Infinity;
  for (const [at, value] of points) {
    if (value === null) continue;
    if (at - last > 2.5) found.push([]);
    found.at(-1).push([at, value]);
    last = at;
  }
  return found;
}

export function draw(node, history, now, digits) {
  const width = Math.max(240, node.clientWidth);
  const known = history.points.filter(([, value]) => value !== null);
  if (!known.length) return show(node, element("p", { class: "quiet" }, "nothing measured yet"));
  const most = roundUp(Math.max(10 ** -digits, ...known.map(([, value]) => value)));
  const x = (at) => width - RIGHT - ((now - at) / history.seconds) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
  const label = `from ${Math.min(...known.map((p) => p[1])).toFixed(digits)} to ${Math.max(...known.map((p) => p[1])).toFixed(digits)}, now ${known.at(-1)[1].toFixed(digits)}`;
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": label });
  for (const value of [0, most / 2, most]) {
    picture.append(
      drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      drawn("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(most / 2 < 1 ? 2 : most < 10 ? 1 : 0)),
    );
  }
  const minutes = history.seconds / 60;
  for (let ago = 0; ago <= minutes; ago += 1) {
    const anchor = ago === 0 ? "end" : ago === minutes ? "start" : "middle";
    picture.append(drawn("text", { x: x(now - 60 * ago), y: HEIGHT - 6, "text-anchor": anchor }, ago ? `\u2212${ago} min` : "now"));
  }
  if (width < 420) picture.querySelectorAll("text[text-anchor=middle]").forEach((text) => text.remove());
  for (const run of runs(history.points)) {
    const at = run.map(([then, value]) => `${x(then).toFixed(1)},${y(value).toFixed(1)}`);
    if (run.length > 1) picture.append(drawn("polyline", { class: "line", points: at.join(" ") }));
    else picture.append(drawn("circle", { class: "dot", cx: x(run[0][0]), cy: y(run[0][1]), r: 1.5 }));
  }
  show(node, picture);
}
