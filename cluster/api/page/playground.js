// A prompt or a chat, streamed, with the tree of each step.

import { byId, element, setText, setChildren } from "./dom.js";
import { streamChunks } from "./server.js";
import { Steps } from "./steps.js";

const EXAMPLES = {
  schema: '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}}, "required": ["name", "size"]}',
  regex: "id-[0-9]{4}-[a-z]{3,8}",
};

let steps = null;
let currentRequest = null; // the AbortController of the answer that is being received
let messages = []; // the messages of the chat

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
    ...(isChat() ? { messages: [...system, ...messages, { role: "user", content: prompt }] } : { prompt }),
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

// Shows one chunk of a stream: its text becomes a step, or is appended to the step before if it has no tokens.
function showChunk(chunk, progress) {
  const tokens = (chunk.usage?.completion_tokens ?? progress.tokens) - progress.tokens;
  progress.tokens += tokens;
  const [choice] = chunk.choices;
  const text = choice?.text ?? choice?.delta?.content ?? "";
  progress.text += text;
  if (tokens > 0) steps.add(text, tokens, choice?.tree ?? null);
  else if (text && steps.steps.length) steps.extend(text);
  if (choice?.finish_reason) progress.finishReason = choice.finish_reason;
  if (!progress.firstTokenAt && tokens > 0) progress.firstTokenAt = performance.now();
  const seconds = (performance.now() - progress.startedAt) / 1000;
  const tokensPerStep = steps.steps.length ? (progress.tokens / steps.steps.length).toFixed(2) : "0";
  const endText = progress.finishReason ? `, ended by ${progress.finishReason}` : "";
  const firstTokenText = progress.firstTokenAt ? `, the first after ${((progress.firstTokenAt - progress.startedAt) / 1000).toFixed(2)} s` : "";
  setText(byId("tally"), `${progress.tokens} tokens in ${steps.steps.length} steps (${tokensPerStep} each), ${seconds.toFixed(2)} s${firstTokenText}${endText}`);
}

function setBusy(isBusy) {
  byId("run").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("answer").setAttribute("aria-busy", String(isBusy));
}

async function submitPrompt() {
  const prompt = byId("prompt").value;
  setText(byId("trouble"), "");
  let body;
  try {
    body = bodyOf(prompt);
  } catch (error) {
    return setText(byId("trouble"), error.message);
  }
  currentRequest?.abort();
  const thisRequest = (currentRequest = new AbortController());
  const progress = { startedAt: performance.now(), firstTokenAt: 0, tokens: 0, text: "", finishReason: "" };
  steps = new Steps(byId("answer"));
  byId("hint").hidden = !body.return_tree;
  setText(byId("tally"), "waiting for the first token");
  showConversation(isChat() ? prompt : null);
  setBusy(true);
  try {
    const path = isChat() ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of streamChunks(path, body, thisRequest.signal)) if (currentRequest === thisRequest) showChunk(chunk, progress);
  } catch (error) {
    if (currentRequest !== thisRequest) return;
    if (thisRequest.signal.aborted) setText(byId("tally"), `stopped after ${progress.tokens} tokens`);
    else setText(byId("trouble"), error.message);
  }
  if (currentRequest !== thisRequest) return;
  currentRequest = null;
  setBusy(false);
  if (isChat() && progress.text) {
    messages.push({ role: "user", content: prompt }, { role: "assistant", content: progress.text });
    byId("prompt").value = "";
    byId("anew").hidden = false;
  }
}

// Shows the messages of the conversation, and the question that is being answered.
function showConversation(question) {
  const turns = [...messages, ...(question === null ? [] : [{ role: "user", content: question }])];
  const visibleTurns = isChat() ? turns : [];
  setChildren(byId("turns"), ...visibleTurns.map((turn) => element("li", { class: turn.role }, element("b", {}, turn.role), element("span", {}, turn.content))));
}

function updateForm() {
  const form = byId("form").value;
  byId("constraint-label").hidden = !form;
  byId("constraint").required = Boolean(form);
  byId("system-label").hidden = !isChat();
  byId("anew").hidden = !isChat() || !messages.length;
  setText(byId("prompt-name"), isChat() ? "Message" : "Prompt");
}

export function initPlayground() {
  byId("prompt").value = "class Queue:\n    def __init__(self";
  byId("form").addEventListener("change", () => {
    byId("constraint").value = EXAMPLES[byId("form").value] ?? "";
    updateForm();
  });
  byId("kind").addEventListener("change", () => {
    updateForm();
    showConversation(null);
  });
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    submitPrompt();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => currentRequest?.abort());
  byId("anew").addEventListener("click", () => {
    currentRequest?.abort();
    messages = [];
    steps = new Steps(byId("answer"));
    showConversation(null);
    updateForm();
  });
  byId("before").addEventListener("click", () => steps?.move(-1, false));
  byId("after").addEventListener("click", () => steps?.move(1, false));
  byId("answer").addEventListener("keydown", (event) => {
    const selectEnd = { Home: () => steps.select(0, true), End: () => steps.select(steps.steps.length - 1, true) };
    const offsets = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
    if (!steps || !(event.key in selectEnd || event.key in offsets)) return;
    event.preventDefault();
    if (event.key in selectEnd) selectEnd[event.key]();
    else steps.move(offsets[event.key]);
  });
  updateForm();
}
