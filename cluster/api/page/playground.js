// A prompt or a chat, streamed, with the tree of each step.

import { byId, element, say, show } from "./dom.js";
import { chunks } from "./server.js";
import { Steps } from "./steps.js";

const EXAMPLES = {
  schema: '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}}, "required": ["name", "size"]}',
  regex: "id-[0-9]{4}-[a-z]{3,8}",
};

let steps = null;
let asked = null; // the AbortController of the answer that is coming
let said = []; // the messages of the chat

const isChat = () => byId("kind").value === "chat";

function constraint() {
  const text = byId("constraint").value;
  if (byId("form").value === "regex") return { structured_outputs: { regex: text } };
  if (byId("form").value !== "schema") return {};
  try {
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } };
  } catch (error) {
    throw new Error(`The schema is not JSON: ${error.message}`);
  }
}

function bodyOf(prompt) {
  const system = byId("system").value ? [{ role: "system", content: byId("system").value }] : [];
  const body = {
    ...(isChat() ? { messages: [...system, ...said, { role: "user", content: prompt }] } : { prompt }),
    ...constraint(),
    temperature: byId("temperature").valueAsNumber,
    max_tokens: byId("max_tokens").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_tree: byId("trees-too").checked,
  };
  if (byId("seed").value) body.seed = byId("seed").valueAsNumber;
  return body;
}

// One chunk of a stream: what its choice said becomes a step, or the end of the one before.
function take(chunk, state) {
  const tokens = (chunk.usage?.completion_tokens ?? state.tokens) - state.tokens;
  state.tokens += tokens;
  const [choice] = chunk.choices;
  const text = choice?.text ?? choice?.delta?.content ?? "";
  state.text += text;
  if (tokens > 0) steps.add(text, tokens, choice?.tree ?? null);
  else if (text && steps.steps.length) steps.extend(text);
  if (choice?.finish_reason) state.end = choice.finish_reason;
  if (!state.first && tokens > 0) state.first = performance.now();
  const seconds = (performance.now() - state.began) / 1000;
  const each = steps.steps.length ? (state.tokens / steps.steps.length).toFixed(2) : "0";
  const end = state.end ? `, ended by ${state.end}` : "";
  const wait = state.first ? `, the first after ${((state.first - state.began) / 1000).toFixed(2)} s` : "";
  say(byId("tally"), `${state.tokens} tokens in ${steps.steps.length} steps (${each} each), ${seconds.toFixed(2)} s${wait}${end}`);
}

function busy(now) {
  byId("run").disabled = now;
  byId("stop").disabled = !now;
  byId("answer").setAttribute("aria-busy", String(now));
}

async function run() {
  const prompt = byId("prompt").value;
  say(byId("trouble"), "");
  let body;
  try {
    body = bodyOf(prompt);
  } catch (error) {
    return say(byId("trouble"), error.message);
  }
  asked?.abort();
  const own = (asked = new AbortController());
  const state = { began: performance.now(), first: 0, tokens: 0, text: "", end: "" };
  steps = new Steps(byId("answer"));
  byId("hint").hidden = !body.return_tree;
  say(byId("tally"), "waiting for the first token");
  showTurns(isChat() ? prompt : null);
  busy(true);
  try {
    const path = isChat() ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of chunks(path, body, own.signal)) if (asked === own) take(chunk, state);
  } catch (error) {
    if (asked !== own) return;
    if (own.signal.aborted) say(byId("tally"), `stopped after ${state.tokens} tokens`);
    else say(byId("trouble"), error.message);
  }
  if (asked !== own) return;
  asked = null;
  busy(false);
  if (isChat() && state.text) {
    said.push({ role: "user", content: prompt }, { role: "assistant", content: state.text });
    byId("prompt").value = "";
    byId("anew").hidden = false;
  }
}

// What was said before, and the question that is being answered.
function showTurns(question) {
  const turns = [...said, ...(question === null ? [] : [{ role: "user", content: question }])];
  const shown = isChat() ? turns : [];
  show(byId("turns"), ...shown.map((turn) => element("li", { class: turn.role }, element("b", {}, turn.role), element("span", {}, turn.content))));
}

function settle() {
  const form = byId("form").value;
  byId("constraint-label").hidden = !form;
  byId("constraint").required = Boolean(form);
  byId("system-label").hidden = !isChat();
  byId("anew").hidden = !isChat() || !said.length;
  say(byId("prompt-name"), isChat() ? "Message" : "Prompt");
}

export function begin() {
  byId("prompt").value = "class Queue:\n    def __init__(self";
  byId("form").addEventListener("change", () => {
    byId("constraint").value = EXAMPLES[byId("form").value] ?? "";
    settle();
  });
  byId("kind").addEventListener("change", () => {
    settle();
    showTurns(null);
  });
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => asked?.abort());
  byId("anew").addEventListener("click", () => {
    asked?.abort();
    said = [];
    steps = new Steps(byId("answer"));
    showTurns(null);
    settle();
  });
  byId("before").addEventListener("click", () => steps?.move(-1, false));
  byId("after").addEventListener("click", () => steps?.move(1, false));
  byId("answer").addEventListener("keydown", (event) => {
    const ends = { Home: () => steps.choose(0, true), End: () => steps.choose(steps.steps.length - 1, true) };
    const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
    if (!steps || !(event.key in ends || event.key in moves)) return;
    event.preventDefault();
    if (event.key in ends) ends[event.key]();
    else steps.move(moves[event.key]);
  });
  settle();
}
