// The steps of one answer: spans of text, each with its tree. Trees are stored for the last MAX_TREES steps.

import { byId, element, setText } from "./dom.js";
import { summarize, drawTree } from "./tree.js";

export const MAX_TREES = 1000;
const DARKEST_CLASS = 5;

export class Steps {
  constructor(answerNode) {
    this.answerNode = answerNode;
    this.steps = [];
    this.selected = -1;
    this.followsNewest = true; // shows the newest step until the user selects one
    this.updateScheduled = false;
    answerNode.replaceChildren();
    byId("shown").hidden = true;
  }

  // Adds a step: its text, its number of tokens, and its tree, if it has one.
  add(text, tokens, tree) {
    const number = this.steps.length;
    const forced = tree?.accepted.some((node) => tree.nodes[node].forced);
    const classes = ["run", `n${Math.min(DARKEST_CLASS, Math.max(1, tokens))}`, forced && "forced", tree && "has-tree"];
    const span = element("span", { class: classes.filter(Boolean).join(" "), role: "option", tabindex: -1, "aria-selected": "false" }, text);
    span.addEventListener("click", () => this.select(number, false));
    this.answerNode.append(span);
    this.steps.push({ span, tokens, tree });
    const oldStep = this.steps[number - MAX_TREES];
    if (oldStep) oldStep.tree = null;
    if (number === 0) span.tabIndex = 0;
    if (this.followsNewest && tree && !this.updateScheduled) {
      this.updateScheduled = true;
      requestAnimationFrame(() => {
        this.updateScheduled = false;
        if (this.followsNewest) this.markSelected(this.steps.length - 1);
      });
    }
  }

  // Appends text that came without new tokens, such as text that was buffered for a stop string.
  extend(text) {
    this.steps.at(-1).span.append(text);
  }

  select(number, focus) {
    if (number < 0 || number >= this.steps.length) return;
    this.followsNewest = false;
    this.markSelected(number);
    if (focus) this.steps[number].span.focus();
  }

  move(offset, focus = true) {
    this.select(this.selected < 0 ? 0 : this.selected + offset, focus);
  }

  markSelected(number) {
    for (const [index, isSelected] of [[this.selected, false], [number, true]]) {
      const span = this.steps[index]?.span;
      span?.setAttribute("aria-selected", String(isSelected));
      if (span) span.tabIndex = isSelected ? 0 : -1;
    }
    if (this.selected < 0 && number > 0) this.steps[0].span.tabIndex = -1;
    this.selected = number;
    this.show(this.steps[number], number);
  }

  show({ tree, tokens }, number) {
    byId("shown").hidden = false;
    setText(byId("shown-title"), `Tree of step ${number + 1} of ${this.steps.length}`);
    byId("before").disabled = number === 0;
    byId("after").disabled = number === this.steps.length - 1;
    const noTreeText = number === 0 ? "The first token follows the prompt: it has no tree." : `No tree is kept of this step, which gave ${tokens} tokens.`;
    setText(byId("shown-text"), tree ? summarize(tree) : noTreeText);
    byId("tree").replaceChildren(...(tree ? [drawTree(tree)] : []));
  }
}
