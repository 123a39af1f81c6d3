// The page itself: the form for the API key, two views, and a refresh once per second while the page is visible.

import { byId, setText } from "./dom.js";
import { showState } from "./overview.js";
import { initPlayground } from "./playground.js";
import { key, RequestError, fetchState, storeKey } from "./server.js";

const REFRESH_MS = 1000;
const VIEWS = ["overview", "playground"];

let timer = 0;
let refreshing = false;

function showHealth(kind, text) {
  byId("health").className = kind;
  setText(byId("health"), text);
}

function showMain(allowed) {
  byId("door").hidden = allowed;
  document.querySelector("main").hidden = !allowed;
  byId("forget").hidden = !allowed || !key();
}

function askForKey(error) {
  showMain(false);
  showHealth("bad", "a key is needed");
  setText(byId("denied"), key() ? error.message : "");
  storeKey("");
  byId("key").focus();
}

async function refresh() {
  if (refreshing || document.hidden) return;
  refreshing = true;
  clearTimeout(timer);
  let scheduleNext = true;
  try {
    const state = await fetchState();
    showMain(true);
    const lastLoss = state.losses.at(-1);
    const lossText = lastLoss && lastLoss.restored_s === null ? `: rank ${lastLoss.rank} ${lastLoss.kind.replaceAll("_", " ")}` : "";
    showHealth(state.healthy ? "good" : "bad", state.healthy ? "serving" : `not serving${state.reason ? `: ${state.reason}` : lossText}`);
    setText(byId("served"), `${state.model}, version ${state.version}`);
    document.title = `${state.model} \u2013 Aerie`;
    showState(state);
  } catch (error) {
    if (error instanceof RequestError && error.status === 401) {
      scheduleNext = false;
      askForKey(error);
    } else {
      showHealth("bad", `no answer: ${error.message}`);
    }
  } finally {
    refreshing = false;
    if (scheduleNext) timer = setTimeout(refresh, REFRESH_MS);
  }
}

function showView(name, focus) {
  for (const viewName of VIEWS) {
    byId(viewName).hidden = viewName !== name;
    const tab = byId(`tab-${viewName}`);
    tab.setAttribute("aria-selected", String(viewName === name));
    tab.tabIndex = viewName === name ? 0 : -1;
    if (viewName === name && focus) tab.focus();
  }
  history.replaceState(null, "", `#${name}`);
}

for (const [index, name] of VIEWS.entries()) {
  byId(`tab-${name}`).addEventListener("click", () => showView(name, false));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (offset) showView(VIEWS[(index + offset + VIEWS.length) % VIEWS.length], true);
  });
}
byId("door").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  byId("key").value = "";
  refresh();
});
byId("forget").addEventListener("click", () => {
  storeKey("");
  location.reload();
});
document.addEventListener("visibilitychange", refresh);
initPlayground();
if (VIEWS.includes(location.hash.slice(1))) showView(location.hash.slice(1), false);
refresh();
