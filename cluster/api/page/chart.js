// A line chart of the last minutes: one point per second, a gap where the value was unknown.

import { svgElement, element, setChildren } from "./dom.js";

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

  // Adds a value, or null, at the time `seconds`; drops points older than the span `this.seconds`.
  add(seconds, value) {
    this.points.push([seconds, value]);
    const first = this.points.findIndex(([pointSeconds]) => pointSeconds >= seconds - this.seconds);
    this.points.splice(0, first);
  }
}

function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= value);
}

// Sequences of points without a gap; a gap is a null, or more than 2.5 seconds without a point.
function segments(points) {
  const segmentList = [];
  let lastSeconds = -Infinity;
  for (const [seconds, value] of points) {
    if (value === null) continue;
    if (seconds - lastSeconds > 2.5) segmentList.push([]);
    segmentList.at(-1).push([seconds, value]);
    lastSeconds = seconds;
  }
  return segmentList;
}

export function draw(node, history, now, digits) {
  const width = Math.max(240, node.clientWidth);
  const measured = history.points.filter(([, value]) => value !== null);
  if (!measured.length) return setChildren(node, element("p", { class: "quiet" }, "nothing measured yet"));
  const maximum = roundUp(Math.max(10 ** -digits, ...measured.map(([, value]) => value)));
  const x = (seconds) => width - RIGHT - ((now - seconds) / history.seconds) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / maximum) * (HEIGHT - TOP - BOTTOM);
  const label = `from ${Math.min(...measured.map((p) => p[1])).toFixed(digits)} to ${Math.max(...measured.map((p) => p[1])).toFixed(digits)}, now ${measured.at(-1)[1].toFixed(digits)}`;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": label });
  for (const value of [0, maximum / 2, maximum]) {
    svg.append(
      svgElement("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svgElement("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(maximum / 2 < 1 ? 2 : maximum < 10 ? 1 : 0)),
    );
  }
  const minutes = history.seconds / 60;
  for (let minutesAgo = 0; minutesAgo <= minutes; minutesAgo += 1) {
    const anchor = minutesAgo === 0 ? "end" : minutesAgo === minutes ? "start" : "middle";
    svg.append(svgElement("text", { x: x(now - 60 * minutesAgo), y: HEIGHT - 6, "text-anchor": anchor }, minutesAgo ? `\u2212${minutesAgo} min` : "now"));
  }
  if (width < 420) svg.querySelectorAll("text[text-anchor=middle]").forEach((text) => text.remove());
  for (const segment of segments(history.points)) {
    const coordinates = segment.map(([seconds, value]) => `${x(seconds).toFixed(1)},${y(value).toFixed(1)}`);
    if (segment.length > 1) svg.append(svgElement("polyline", { class: "line", points: coordinates.join(" ") }));
    else svg.append(svgElement("circle", { class: "dot", cx: x(segment[0][0]), cy: y(segment[0][1]), r: 1.5 }));
  }
  setChildren(node, svg);
}
