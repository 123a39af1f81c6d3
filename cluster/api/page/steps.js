// The steps of one answer: runs of text, each with the tree that gave it. Trees are kept for the last MOST_TREES steps.

import { byId, element, say } from "./dom.js";
import { inWords, treeOf } from "./tree.js";

export const MOST_TREES = 1000;
const DARKEST = 5;

export class Steps {
  constructor(answer) {
    this.answer = answer;
    this.steps = [];
    this.chosen = -1;
    this.follows = true; // shows the newest step until another one is chosen
    this.due = false;
    answer.replaceChildren();
    byId("shown").hidden = true;
  }

  // What one step gave: its text, how many tokens that is, and its tree, if it has one.
  add(text, tokens, tree) {
    const number = this.steps.length;
    const forced = tree?.accepted.some((node) => tree.nodes[node].forced);
    const kinds = ["run", `n${Math.min(DARKEST, Math.max(1, tokens))}`, forced && "forced", tree && "has-tree"];
    const run = element("span", { class: kinds.filter(Boolean).join(" "), role: "option", tabindex: -1, "aria-selected": "false" }, text);
    run.addEventListener("click", () => this.choose(number, false));
    this.answer.append(run);
    this.steps.push({ run, tokens, tree });
    const old = this.steps[number - MOST_TREES];
    if (old) old.tree = null;
    if (number === 0) run.tabIndex = 0;
    if (this.follows && tree && !this.due) {
      this.due = true;
      requestAnimationFrame(() => {
        this.due = false;
        if (this.follows) this.mark(this.steps.length - 1);
      });
    }
  }

  // Text that came with no tokens of its own, as what was held back for a stop string.
  extend(text) {
    this.steps.at(-1).run.append(text);
  }

  choose(number, focus) {
    if (number < 0 || number >= this.steps.length) return;
    this.follows = false;
    this.mark(number);
    if (focus) this.steps[number].run.focus();
  }

  move(by, focus = true) {
    this.choose(this.chosen < 0 ? 0 : this.chosen + by, focus);
  }

  mark(number) {
    for (const [at, on] of [[this.chosen, false], [number, true]]) {
      const run = this.steps[at]?.run;
      run?.setAttribute("aria-selected", String(on));
      if (run) run.tabIndex = on ? 0 : -1;
    }
    if (this.chosen < 0 && number > 0) this.steps[0].run.tabIndex = -1;
    this.chosen = number;
    this.show(this.steps[number], number);
  }

  show({ tree, tokens }, number) {
    byId("shown").hidden = false;
    say(byId("shown-title"), `Tree of step ${number + 1} of ${this.steps.length}`);
    byId("before").disabled = number === 0;
    byId("after").disabled = number === this.steps.length - 1;
    const none = number === 0 ? "The first token follows the prompt: it has no tree." : `No tree is kept of this step, which gave ${tokens} tokens.`;
    say(byId("shown-text"), tree ? inWords(tree) : none);
    byId("tree").replaceChildren(...(tree ? [treeOf(tree)] : []));
  }
}
